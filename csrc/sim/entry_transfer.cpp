// Entry points: copies and sets.
//
// A device range must be mapped and accessible at the time of the call (CUDA_ERROR_INVALID_VALUE)
// and when the operation runs (an illegal access). A host range that begins in pinned memory must
// end there (CUDA_ERROR_INVALID_VALUE). Copies to or from pageable host memory are complete when
// the call returns, on every stream. Copies with pinned memory are not, unless the call is
// synchronous and involves the host. cuMemcpyDtoD and cuMemsetD* use the legacy stream and do not
// wait.
#include <cuda.h>

#include <vector>

#include "submission.h"

using namespace memsaver::sim;

namespace {

enum class Side { kHost, kDevice };

bool usable(const Range& range, Side side, int device, bool write) {
  if (range.end() < range.address) return false;
  if (side == Side::kHost) return range.address != 0 && !state().host.leaves(range);
  std::vector<Piece> pieces;
  return state().space.pieces(range, device, write, &pieces);
}

bool pageable(const Range& range, Side side) {
  return side == Side::kHost && !state().host.contains(range) && !state().space.owns(range.address);
}

CUresult copy(const char* name, uint64_t to, Side to_side, uint64_t from, Side from_side,
              size_t size, CUstream handle, bool synchronous) {
  Call call(name, Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (size == 0) return CUDA_SUCCESS;
  Operation operation;
  operation.kind = Operation::Kind::kCopy;
  operation.destination = {to, size};
  operation.source = {from, size};
  const int device = stream->context->device;
  if (!usable(operation.destination, to_side, device, true) ||
      !usable(operation.source, from_side, device, false)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool host_waits = synchronous && (to_side == Side::kHost || from_side == Side::kHost);
  const bool staged =
      pageable(operation.destination, to_side) || pageable(operation.source, from_side);
  return submit(&call, stream, operation,
                host_waits || staged ? Completion::kBeforeReturn : Completion::kLater);
}

CUresult set(const char* name, uint64_t to, uint32_t value, unsigned width, size_t count,
             CUstream handle) {
  Call call(name, Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (count == 0) return CUDA_SUCCESS;
  const uint64_t size = count * width;
  if (size / width != count || to % width != 0) return CUDA_ERROR_INVALID_VALUE;
  Operation operation;
  operation.kind = Operation::Kind::kSet;
  operation.destination = {to, size};
  operation.value = value;
  operation.width = width;
  if (!usable(operation.destination, Side::kDevice, stream->context->device, true)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return submit(&call, stream, operation, Completion::kLater);
}

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  return copy("cuMemcpyHtoD", to, Side::kDevice, address_of(from), Side::kHost, size, nullptr,
              true);
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  return copy("cuMemcpyDtoH", address_of(to), Side::kHost, from, Side::kDevice, size, nullptr,
              true);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
  return copy("cuMemcpyDtoD", to, Side::kDevice, from, Side::kDevice, size, nullptr, true);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  return copy("cuMemcpyHtoDAsync", to, Side::kDevice, address_of(from), Side::kHost, size, stream,
              false);
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream stream) {
  return copy("cuMemcpyDtoHAsync", address_of(to), Side::kHost, from, Side::kDevice, size, stream,
              false);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return copy("cuMemcpyDtoDAsync", to, Side::kDevice, from, Side::kDevice, size, stream, false);
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  return set("cuMemsetD8", to, value, 1, count, nullptr);
}

CUresult cuMemsetD32(CUdeviceptr to, unsigned int value, size_t count) {
  return set("cuMemsetD32", to, value, 4, count, nullptr);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return set("cuMemsetD8Async", to, value, 1, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
  return set("cuMemsetD32Async", to, value, 4, count, stream);
}

}  // extern "C"
#pragma GCC visibility pop
