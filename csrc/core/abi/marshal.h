// marshal: converts arguments and results of the C ABI. Used by the abi units.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory/registry.h"
#include "core/platform/lifecycle.h"
#include "core/platform/range.h"
#include "core/platform/status.h"
#include "memsaver.h"

namespace memsaver {

// Creates the process's own tag. Every ABI function that uses tags calls this function first.
// Throws kInvalidState in a forked child.
void require_tags();

// --- Arguments. These functions throw kInvalidArgument if a pointer to a text, an output or a
// non-empty list is null.

std::string_view view_of(const char* text, const char* what);
std::string text_of(const char* text, const char* what);
// Also throws kInvalidArgument if the count is MS_ALL_TAGS.
std::vector<std::string> names_of(const char* const* tags, size_t count);
// Returns no value for MS_BACKUP_DEFAULT. Throws kInvalidArgument for an unknown backup.
std::optional<Backup> policy_of(int backup);
// Truncates ranges that extend beyond the last address.
std::vector<Range> ranges_of(const ms_range* ranges, size_t count);
std::optional<uint64_t> value_of(const uint64_t* number);
void require_place(const void* place);
// Returns the core object behind an ABI handle. Throws kInvalidArgument if the handle is null.
template <typename Object>
Object* unwrapped(void* handle, const char* what) {
  if (!handle) throw Error(Status::kInvalidArgument, std::string(what) + " is null");
  return static_cast<Object*>(handle);
}
// `what` names the elements in the plural, for the message.
void require_list(const void* list, size_t count, const char* what);

// --- results

// Copies text into a fixed-size field, truncated at a UTF-8 boundary.
void copy_text(char* field, size_t capacity, const std::string& text);
// Copies the end of a text into a fixed-size field, truncated at a UTF-8 boundary.
void copy_end_of_text(char* field, size_t capacity, const std::string& text);

// Writes the failure to `error`, unless `error` is null, and returns the failure's status.
ms_status report(const Error& failure, ms_error* error) noexcept;

// Runs `body` and converts its exceptions to a status.
template <typename Body>
ms_status guarded(ms_error* error, Body body) noexcept {
  try {
    try {
      body();
      return MS_OK;
    } catch (const Error& failure) {
      return report(failure, error);
    } catch (const std::bad_alloc&) {
      return report(Error(Status::kOutOfHostMemory, "the process has no host memory left"), error);
    } catch (const std::exception& failure) {
      return report(Error(Status::kInternal, failure.what()), error);
    }
  } catch (...) {
    // Reached only if there was no memory for the message.
    if (error) {
      *error = ms_error{
          MS_OUT_OF_HOST_MEMORY, 0, 0, -1, 0, 0, "", "", "the process has no host memory left"};
    }
    return MS_OUT_OF_HOST_MEMORY;
  }
}

// Like guarded(), but fails with kInvalidState in a forked child.
template <typename Body>
ms_status in_own_process(ms_error* error, Body body) noexcept {
  return guarded(error, [&] {
    require_not_forked();
    body();
  });
}

// Like guarded(), but calls require_tags() first.
template <typename Body>
ms_status on_tags(ms_error* error, Body body) noexcept {
  return guarded(error, [&] {
    require_tags();
    body();
  });
}

// Like on_tags(), but passes the tag named `tag` to `body`, and locks the registry while `body`
// runs. Fails with kUnknownTag.
template <typename Body>
ms_status on_tag(const char* tag, ms_error* error, Body body) noexcept {
  return on_tags(error, [&] {
    const std::string_view name = view_of(tag, "the tag");
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    body(Registry::instance().known(name));
  });
}

// Allocates a list of `count` rows, which the caller of the ABI frees. Returns null if `count` is
// 0.
template <typename Row>
std::unique_ptr<Row, decltype(&std::free)> make_list(size_t count) {
  std::unique_ptr<Row, decltype(&std::free)> list(nullptr, &std::free);
  if (count == 0) return list;
  list.reset(static_cast<Row*>(std::malloc(count * sizeof(Row))));
  if (!list) throw std::bad_alloc();
  return list;
}

// Returns a list with the result of `convert` for each element of `source`, and the length of the
// list. If `rows` is null, returns only the length.
template <typename Row, typename Source, typename Convert>
void return_list(const std::vector<Source>& source, Convert convert, Row** rows, size_t* count) {
  if (count) *count = source.size();
  if (!rows) return;
  *rows = nullptr;
  auto list = make_list<Row>(source.size());
  for (size_t i = 0; i < source.size(); ++i) list.get()[i] = convert(source[i]);
  *rows = list.release();
}

}  // namespace memsaver
