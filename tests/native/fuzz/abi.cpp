// Target: the C ABI, as a sequence of calls with hostile arguments. Pointers that the contract
// requires to be valid are valid: output parameters, lists and their counts, transitions.
//
// Single-threaded: between a transition's begin and run, it makes only calls that do not wait for
// the transition.
#include <climits>
#include <cstring>
#include <vector>

#include "input.h"
#include "memsaver_inspection.h"
#include "memsaver_transitions.h"
#include "shares.h"
#include "sim/sim.h"

namespace {

using fuzz::Input;
using fuzz::require;

const std::string kLong(300, 'x');
const char* const kTags[] = {"a", "b", "c", "", "\xff", "\xe2\x82", "a\n", kLong.c_str(), nullptr};
constexpr size_t kPlainTags = 3;  // the first tags, which contain memory
constexpr int kDevices[] = {0, 1, -1, 2, 63, 64, INT_MAX, INT_MIN};
constexpr int kBackups[] = {-1, 0, 1, 2, 3, 4, 5, -2, INT_MAX, INT_MIN};
constexpr uint64_t kSizes[] = {1,          512,           513,
                               4096,       1 << 20,       (2 << 20) - 1,
                               2 << 20,    (2 << 20) + 1, 8 << 20,
                               16 << 20,   48 << 20,      1ull << 36,
                               1ull << 63, UINT64_MAX,    UINT64_MAX - 511,
                               0};
const char* const kOptions[] = {"share_bytes",      "slab_bytes", "margin_bytes",
                                "host_bytes",       "poison",     "fingerprints",
                                "disk_dir",         "Poison",     "",
                                "importer_seconds", nullptr};
const char* const kValues[] = {"2MiB",  "0",    "1GiB", "18446744073709551615", "4096KiB", "on",
                               "FALSE", "-1",   " 1",   "/nowhere/at/all",      "",        "\xff",
                               "8MiB",  nullptr};
constexpr size_t kMostBlocks = 12;

struct Block {
  char* pointer;
  uint64_t bytes;
};

class Session {
 public:
  explicit Session(Input& input) : in_(input) {}

  void run() {
    reset();
    for (int calls = 0; !in_.empty() && calls < 60; ++calls) call();
    clean();
  }

 private:
  void call();
  void allocate();
  void free_one();
  void transit();
  void beside(ms_transition* transition);
  void ask();
  void record();
  void configure();
  void view();
  void reset();
  void clean();

  const char* tag() {
    const size_t which = in_.below(std::size(kTags) + 8);
    return which < std::size(kTags) ? kTags[which] : kTags[which % kPlainTags];
  }
  int device() { return kDevices[in_.below(4) ? in_.below(2) : in_.below(std::size(kDevices))]; }
  int backup() { return kBackups[in_.below(4) ? in_.below(6) : in_.below(std::size(kBackups))]; }
  uint64_t size() { return in_.below(8) ? kSizes[in_.below(std::size(kSizes))] : in_.word(); }
  // Returns an address: of a live block, inside or next to one, of a freed block, or of nothing.
  char* address();
  std::vector<const char*> tags();
  std::vector<ms_range> ranges();

  // Checks a call's status and error; returns whether the call succeeded.
  bool done(ms_status status);
  ms_error* error() { return in_.below(8) ? &error_ : nullptr; }

  Input& in_;
  ms_error error_{};
  std::vector<Block> blocks_;
  std::vector<char*> freed_;
  std::vector<void*> bound_;
  uint64_t recorded_ = 0;
  fuzz::Shares shares_;
};

bool Session::done(ms_status status) {
  require(status >= MS_OK && status <= MS_SHARING_FAILED, "a status is one of ms_status");
  if (status == MS_INTERNAL) std::fprintf(stderr, "%s\n", error_.message);
  require(status != MS_INTERNAL, "no call reports an internal error");
  if (status == MS_OK || error_.status == MS_OK) return status == MS_OK;
  require(std::memchr(error_.message, 0, sizeof(error_.message)) && error_.message[0],
          "an error has a message");
  require(std::memchr(error_.tag, 0, sizeof(error_.tag)) != nullptr,
          "an error's tag is terminated");
  require(std::memchr(error_.call, 0, sizeof(error_.call)) != nullptr,
          "an error's call is terminated");
  require(error_.status == status, "an error has the status that was returned");
  error_ = ms_error{};
  return false;
}

char* Session::address() {
  switch (in_.below(6)) {
    case 0:
      return freed_.empty() ? nullptr : freed_[in_.below(freed_.size())];
    case 1:
      return reinterpret_cast<char*>(in_.word());
    case 2:
    case 3: {
      if (blocks_.empty()) return reinterpret_cast<char*>(uintptr_t{1});
      const Block& block = blocks_[in_.below(blocks_.size())];
      return block.pointer + (in_.below(2) ? block.bytes : in_.byte());
    }
    default:
      return blocks_.empty() ? nullptr : blocks_[in_.below(blocks_.size())].pointer;
  }
}

std::vector<const char*> Session::tags() {
  std::vector<const char*> list;
  for (size_t count = in_.below(4); count > 0; --count) list.push_back(tag());
  return list;
}

std::vector<ms_range> Session::ranges() {
  std::vector<ms_range> list;
  for (size_t count = in_.below(3); count > 0; --count) {
    list.push_back({reinterpret_cast<uint64_t>(address()), size()});
  }
  return list;
}

void Session::allocate() {
  void* pointer = nullptr;
  const uint64_t bytes = blocks_.size() < kMostBlocks ? size() : UINT64_MAX;
  bool made = false;
  switch (in_.below(5)) {
    case 0:
      made = done(
          ms_malloc_any(bytes, device(), in_.below(2) ? nullptr : address(), &pointer, error()));
      break;
    case 1:
      pointer = ms_torch_malloc(static_cast<ptrdiff_t>(bytes), device(), nullptr);
      made = pointer != nullptr;
      break;
    case 2: {
      ms_torch_malloc_function function = nullptr;
      const bool bound =
          done(ms_torch_malloc_of(tag(), backup(), in_.below(8) ? &function : nullptr, error()));
      require(bound == (function != nullptr), "there is a function, or an error");
      if (function) pointer = function(static_cast<ptrdiff_t>(bytes), device(), nullptr);
      made = pointer != nullptr;
      break;
    }
    default:
      made = done(ms_malloc(bytes, device(), in_.below(8) ? &pointer : nullptr, error()));
  }
  require(made || !pointer, "a failed allocation returns null");
  if (!pointer) return;
  if (ms_owns(pointer)) *static_cast<char*>(pointer) = 1;
  blocks_.push_back({static_cast<char*>(pointer), bytes});
}

void Session::free_one() {
  char* const pointer = address();
  size_t which = 0;
  while (which < blocks_.size() && blocks_[which].pointer != pointer) ++which;
  const bool live = which < blocks_.size();
  bool gone = false;
  switch (in_.below(3)) {
    case 0:
      gone = done(ms_free_any(pointer, device(), error()));
      break;
    case 1:
      if (live) ms_torch_free(pointer, 0, 0, nullptr);
      gone = live;
      break;
    default:
      gone = done(ms_free(pointer, error()));
  }
  if (!live || !gone) return;
  freed_.push_back(pointer);
  blocks_.erase(blocks_.begin() + static_cast<ptrdiff_t>(which));
}

// Makes only calls that do not wait for a tag.
void Session::beside(ms_transition* transition) {
  uint64_t progress = 0, total = 0;
  switch (in_.below(5)) {
    case 0:
      ms_transition_progress(transition, &progress, in_.below(2) ? &total : nullptr);
      break;
    case 1: {
      const std::string caller = in_.text(40);
      done(ms_transition_set_caller(transition, in_.below(4) ? caller.c_str() : nullptr, error()));
      break;
    }
    case 2: {
      ms_location location;
      done(ms_locate(address(), &location, error()));
      break;
    }
    case 3: {
      int state = 0;
      done(ms_tag_state(tag(), &state, error()));
      break;
    }
    default:
      ask();
  }
}

void Session::transit() {
  const std::vector<const char*> out = tags(), into = tags();
  const std::vector<ms_range> dead = ranges();
  const uint64_t changes = in_.below(2) ? ms_changes() : in_.word();
  const uint64_t* const seen = in_.below(2) ? &changes : nullptr;
  ms_transition* transition = nullptr;
  ms_status begun = MS_OK;
  switch (in_.below(3)) {
    case 0:
      begun = ms_pause_begin(out.data(), out.size(), backup(), dead.data(), dead.size(), seen,
                             &transition, error());
      break;
    case 1:
      begun = ms_resume_begin(into.data(), into.size(), &transition, error());
      break;
    default:
      begun = ms_swap_begin(out.data(), out.size(), into.data(), into.size(), backup(), dead.data(),
                            dead.size(), seen, &transition, error());
  }
  require((begun == MS_OK) == (transition != nullptr),
          "a transition is returned only if it has begun");
  if (!done(begun)) return;
  for (size_t count = in_.below(4); count > 0; --count) beside(transition);
  for (size_t runs = in_.below(4) ? 1 : in_.below(3); runs > 0; --runs) {
    ms_change* rows = nullptr;
    size_t count = 0;
    if (runs > 1) {
      ms_transition* const twice[] = {transition, transition};
      ms_run_result results[2] = {};
      const size_t listed = in_.below(4) ? 1 : 2;
      if (done(ms_transition_run_all(twice, listed, in_.below(4) ? results : nullptr, error()))) {
        done(static_cast<ms_status>(results[0].status));
      }
      rows = results[0].rows;
    } else {
      done(ms_transition_run(transition, in_.below(4) ? &rows : nullptr,
                             in_.below(4) ? &count : nullptr, error()));
    }
    ms_list_free(rows);
    if (in_.below(4) == 0) done(ms_transition_wait_stream(transition, address(), error()));
    if (in_.below(4) == 0) {
      void* const stream = address();
      const std::vector<ms_range> wanted = ranges();
      done(ms_transition_wait_ranges(transition, wanted.data(), wanted.size(),
                                     in_.below(2) ? &stream : nullptr, error()));
    }
    if (in_.below(4) == 0) beside(transition);
  }
  ms_transition_free(transition);
}

void Session::ask() {
  uint64_t first = 0, second = 0;
  size_t count = 0;
  int number = 0;
  switch (in_.below(11)) {
    case 0: {
      ms_usage* rows = nullptr;
      done(ms_stats(in_.below(4) ? &rows : nullptr, &count, error()));
      ms_list_free(rows);
      break;
    }
    case 1: {
      ms_range* rows = nullptr;
      done(ms_ranges(tag(), device(), &rows, in_.below(4) ? &count : nullptr, error()));
      ms_list_free(rows);
      break;
    }
    case 2:
      done(ms_tag_backup(tag(), in_.below(4) ? &number : nullptr, error()));
      break;
    case 3:
      done(ms_host_memory(&first, in_.below(4) ? &second : nullptr, error()));
      done(ms_deferred_releases(&first, &second, in_.below(4) ? &second : nullptr, error()));
      break;
    case 4:
      done(ms_device_memory(device(), &first, &second, error()));
      break;
    case 5: {
      char value[16];
      const char* const name = kOptions[in_.below(std::size(kOptions))];
      done(ms_option(name, value, in_.below(17), error()));
      done(ms_check_option(name, in_.below(4) ? in_.text(8).c_str() : nullptr, error()));
      break;
    }
    case 6: {
      char text[64];
      ms_next_warning(in_.below(8) ? text : nullptr, in_.below(65));
      break;
    }
    case 7:
      ms_warn(in_.below(4) ? in_.text(80).c_str() : nullptr);
      break;
    case 8:
      done(ms_tag_pausable(tag(), in_.below(4) ? &number : nullptr, error()));
      break;
    case 9: {
      char text[16];
      const size_t room = in_.below(sizeof(text) + 1);
      done(ms_device_bus_id(device(), in_.below(8) ? text : nullptr, room, error()));
      break;
    }
    default:
      ms_owns(address());
      ms_wants();
      ms_region_tag();
      done(ms_device_count(in_.below(4) ? &number : nullptr, error()));
      record();
  }
}

// Makes the timeline calls in turn and reads no input, so that existing inputs keep their meaning.
void Session::record() {
  ms_event* rows = nullptr;
  size_t count = 0;
  uint64_t dropped = 0;
  switch (recorded_++ % 6) {
    case 0:
      done(ms_timeline_start(recorded_ % 4 == 1 ? 3 : 0, error()));
      break;
    case 1:
    case 3:
      done(ms_timeline_read(&rows, &count, &dropped, error()));
      ms_list_free(rows);
      break;
    case 2:
      done(ms_timeline_sample(error()));
      break;
    case 4:
      done(ms_timeline_stop(error()));
      break;
    default:
      done(ms_timeline_read(nullptr, &count, nullptr, error()));
  }
}

void Session::view() {
  const uint64_t place = reinterpret_cast<uint64_t>(address());
  const uint64_t bytes = in_.below(2) ? 1 : size();
  const bool writable = in_.below(2) != 0;
  ms_error* const told = error();
  for (const auto look : {ms_backup_view, ms_retained_view}) {
    void* host = nullptr;
    if (!done(look(place, bytes, writable, &host, told))) continue;
    require(bytes > 0, "an empty range has no view");
    char first = *static_cast<char*>(host), last = static_cast<char*>(host)[bytes - 1];
    if (writable) static_cast<char*>(host)[bytes - 1] = static_cast<char>(first + last);
  }
}

void Session::configure() {
  const std::string value = in_.text(12);
  const char* const name = kOptions[in_.below(std::size(kOptions))];
  const size_t which = in_.below(2 * std::size(kValues));
  done(ms_configure(name, which < std::size(kValues) ? kValues[which] : value.c_str(), error()));
}

void Session::call() {
  switch (in_.below(16)) {
    case 0:
      done(ms_region_enter(tag(), backup(), error()));
      break;
    case 1:
      done(ms_region_enter(kTags[in_.below(kPlainTags)], kBackups[in_.below(6)], &error_));
      break;
    case 2:
      done(in_.below(4) ? ms_region_exit(error()) : ms_region_limit(in_.word(), error()));
      break;
    case 3:
      done(ms_disable_enter(error()));
      break;
    case 4: {
      void* const stream = address();
      if (done(ms_stream_bind(stream, tag(), backup(), error()))) bound_.push_back(stream);
      break;
    }
    case 5:
      done(ms_stream_unbind(address(), error()));
      break;
    case 6:
    case 7:
      allocate();
      break;
    case 8:
      free_one();
      break;
    case 9:
    case 10:
      transit();
      break;
    case 11:
      view();
      break;
    case 12: {
      const std::vector<ms_range> list = ranges();
      ms_digest* rows = nullptr;
      size_t count = 0;
      done(ms_fingerprint(list.data(), list.size(), &rows, &count, error()));
      ms_list_free(rows);
      break;
    }
    case 13:
      configure();
      break;
    case 14: {
      static constexpr const char* kCalls[] = {"cuMemCreate",
                                               "cuMemMap",
                                               "cuMemHostRegister",
                                               "cuMemHostAlloc",
                                               "cuMemExportToShareableHandle",
                                               "cuMemImportFromShareableHandle"};
      sim_fail(kCalls[in_.below(std::size(kCalls))], 1 + in_.below(8), 2, 1);
      break;
    }
    default:
      if (in_.below(3) == 0) {
        done(shares_.act(in_, tag(), ranges(), device(), size(), error()));
      } else {
        ask();
      }
  }
}

void Session::reset() {
  static constexpr const char* kDefaults[][2] = {
      {"share_bytes", "16MiB"}, {"slab_bytes", "4MiB"},   {"margin_bytes", "0"},
      {"host_bytes", "0"},      {"fingerprints", "on"},   {"poison", "off"},
      {"disk_dir", ""},         {"importer_seconds", "0"}};
  for (const auto& [name, value] : kDefaults)
    require(ms_configure(name, value, nullptr) == MS_OK, name);
}

// Checks that, after any calls, all memory can be freed and resumed, and that nothing is left.
void Session::clean() {
  sim_clear_faults();
  shares_.clear();
  reset();
  ms_timeline_stop(nullptr);
  while (ms_region_depth() > 0) ms_region_exit(nullptr);
  for (void* stream : bound_) ms_stream_unbind(stream, nullptr);
  for (const Block& block : blocks_) {
    require(done(ms_free_any(block.pointer, 0, &error_)), "a live block can be freed");
  }
  error_ = ms_error{};
  const bool resumed = ms_resume(nullptr, 0, nullptr, nullptr, &error_) == MS_OK;
  if (!resumed) std::fprintf(stderr, "%s\n", error_.message);
  require(resumed, "everything can be resumed");
  ms_usage* rows = nullptr;
  size_t count = 0;
  require(ms_trim(nullptr, nullptr) == MS_OK && ms_stats(&rows, &count, nullptr) == MS_OK,
          "the figures can be queried");
  for (size_t i = 0; i < count; ++i) {
    require(rows[i].state == MS_MAPPED && rows[i].allocations == 0 && rows[i].resident_bytes == 0 &&
                rows[i].host_bytes == 0 && rows[i].disk_bytes == 0 && rows[i].peer_bytes == 0,
            "nothing is left");
  }
  ms_list_free(rows);
  char text[256];
  while (ms_next_warning(text, sizeof(text))) {
  }
  sim_totals totals;
  sim_counts(&totals);
  require(totals.handles == 0 && totals.mappings == 0 && totals.violations == 0 &&
              totals.illegal_accesses == 0,
          "no driver object is left, and no rule of the driver was violated");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  Input input(bytes, count);
  Session(input).run();
  return 0;
}
