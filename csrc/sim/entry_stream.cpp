// Entry points: streams, host functions, captures, graphs.
#include <cuda.h>

#include "submission.h"

using namespace memsaver::sim;

#pragma GCC visibility push(default)
extern "C" {

CUresult cuStreamCreate(CUstream* handle, unsigned int flags) {
  Call call("cuStreamCreate", Needs::kContext);
  if (call.refused()) return call.status();
  if (handle == nullptr || (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *handle = reinterpret_cast<CUstream>(state().next_handle());
  state().streams.create(call.context(), *handle, flags != CU_STREAM_NON_BLOCKING);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
  Call call("cuStreamDestroy", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (stream->handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  state().captures.leave(stream);
  state().streams.close(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  Call call("cuStreamSynchronize", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  const CUresult admitted = state().captures.admit_stream_wait(stream);
  if (admitted != CUDA_SUCCESS) return admitted;
  state().streams.wait(call.lock(), state().streams.pending(stream));
  return stream->context->broken;
}

CUresult cuStreamQuery(CUstream handle) {
  Call call("cuStreamQuery", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  const CUresult admitted = state().captures.admit_stream_wait(stream);
  if (admitted != CUDA_SUCCESS) return admitted;
  return state().streams.pending(stream).empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
  Call call("cuStreamWaitEvent", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  auto recorded = state().events.find(event);
  if (recorded == state().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
  bool runs_now = false;
  const CUresult followed = state().captures.follow(stream, *recorded->second, &runs_now);
  if (followed != CUDA_SUCCESS || !runs_now) return followed;
  if (recorded->second->ticket == nullptr) return CUDA_SUCCESS;
  Operation wait;
  wait.after.push_back(recorded->second->ticket);
  return submit(&call, stream, wait, Completion::kLater);
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
  Call call("cuLaunchHostFunc", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Operation operation;
  operation.kind = Operation::Kind::kHostFunction;
  operation.function = function;
  operation.argument = argument;
  return submit(&call, stream, operation, Completion::kLater);
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  Call call("cuStreamIsCapturing", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (stream->legacy) {
    const CUresult admitted = state().captures.admit_legacy_stream(stream->context, false);
    if (admitted != CUDA_SUCCESS) return admitted;
  }
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (stream->capture != nullptr) {
    *status = stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                       : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  Call call("cuStreamBeginCapture", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return state().captures.begin(stream, mode);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  Call call("cuStreamEndCapture", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *graph = nullptr;
  Graph recorded;
  const CUresult ended = state().captures.end(stream, &recorded);
  if (ended != CUDA_SUCCESS) return ended;
  *graph = reinterpret_cast<CUgraph>(state().next_handle());
  state().graphs[*graph] = std::move(recorded);
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  Call call("cuThreadExchangeStreamCaptureMode", Needs::kInit);
  if (call.refused()) return call.status();
  if (mode == nullptr || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL ||
      *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *mode = Captures::exchange_thread_mode(*mode);
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph,
                                     unsigned long long /*flags*/) {
  Call call("cuGraphInstantiateWithFlags", Needs::kContext);
  if (call.refused()) return call.status();
  auto found = state().graphs.find(graph);
  if (executable == nullptr || found == state().graphs.end()) return CUDA_ERROR_INVALID_VALUE;
  *executable = reinterpret_cast<CUgraphExec>(state().next_handle());
  state().executables[*executable] = found->second;
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
  Call call("cuGraphLaunch", Needs::kContext);
  if (call.refused()) return call.status();
  StreamPtr stream;
  const CUresult found = find_stream(&call, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  auto graph = state().executables.find(executable);
  if (graph == state().executables.end()) return CUDA_ERROR_INVALID_VALUE;
  for (const Operation& node : graph->second.nodes) {
    const CUresult submitted = submit(&call, stream, node, Completion::kLater);
    if (submitted != CUDA_SUCCESS) return submitted;
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
  Call call("cuGraphExecDestroy", Needs::kInit);
  if (call.refused()) return call.status();
  return state().executables.erase(executable) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphDestroy(CUgraph graph) {
  Call call("cuGraphDestroy", Needs::kInit);
  if (call.refused()) return call.status();
  return state().graphs.erase(graph) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
#pragma GCC visibility pop
