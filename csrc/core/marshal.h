// marshal: what crosses the C ABI: arguments in, rows and errors out. For abi.cpp.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/range.h"
#include "core/registry.h"
#include "core/stats.h"
#include "core/status.h"
#include "core/timeline.h"
#include "memsaver.h"

namespace memsaver {

// --- in; a null text or place throws kInvalidArgument

std::string_view view_of(const char* text, const char* what);
std::string text_of(const char* text, const char* what);
std::vector<std::string> names_of(const char* const* tags, size_t count);
// Nothing for MS_BACKUP_DEFAULT. Throws kInvalidArgument for no backup.
std::optional<Backup> policy_of(int backup);
// Cut where a range runs beyond the last address.
std::vector<Range> ranges_of(const ms_range* ranges, size_t count);
std::optional<uint64_t> value_of(const uint64_t* number);
void require_place(const void* place);

// --- out

ms_event event_row(const Record& record);

// Copies text into a fixed field, cut at a UTF-8 boundary.
void copy_text(char* field, size_t capacity, const std::string& text);
// Copies the end of a text into a fixed field, cut at a UTF-8 boundary.
void copy_end_of_text(char* field, size_t capacity, const std::string& text);

// Writes the failure down, where `error` is not null; its status.
ms_status report(const Error& failure, ms_error* error) noexcept;

// Runs `body` and turns whatever it throws into a status.
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
    // Only a message that found no memory comes here, whatever it was to say.
    if (error) {
      *error = ms_error{
          MS_OUT_OF_HOST_MEMORY, 0, 0, -1, 0, 0, "", "", "the process has no host memory left"};
    }
    return MS_OUT_OF_HOST_MEMORY;
  }
}

// A list that the caller of the ABI is to free, with room for so many rows; null for none.
template <typename Row>
std::unique_ptr<Row, decltype(&std::free)> make_list(size_t count) {
  std::unique_ptr<Row, decltype(&std::free)> list(nullptr, &std::free);
  if (count == 0) return list;
  list.reset(static_cast<Row*>(std::malloc(count * sizeof(Row))));
  if (!list) throw std::bad_alloc();
  return list;
}

// Gives the caller a list of what `convert` makes of each of `source`, and how many; where `rows`
// is null only that.
template <typename Row, typename Source, typename Convert>
void hand_out(const std::vector<Source>& source, Convert convert, Row** rows, size_t* count) {
  if (count) *count = source.size();
  if (!rows) return;
  *rows = nullptr;
  auto list = make_list<Row>(source.size());
  for (size_t i = 0; i < source.size(); ++i) list.get()[i] = convert(source[i]);
  *rows = list.release();
}

}  // namespace memsaver
