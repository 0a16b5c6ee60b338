// Streams: in-order queues of operations, each run by a thread of its own.
//
// Every function needs the lock of state.h; those that wait give it up meanwhile and say so.
// Operations start when the ones they depend on are complete. The legacy stream of a context
// depends on all of its blocking streams and they on it; streams created with
// CU_STREAM_NON_BLOCKING stand apart.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "address_space.h"

namespace memsaver::sim {

using Lock = std::unique_lock<std::mutex>;

struct Capture;
struct Context;

// Completion of one operation.
struct Ticket {
  bool done = false;
  double milliseconds = 0;  // when, by the monotonic clock
};
using TicketPtr = std::shared_ptr<Ticket>;

struct Operation {
  enum class Kind { kMarker, kCopy, kSet, kHostFunction, kLaunch };
  Kind kind = Kind::kMarker;
  const char* call = "";     // what submitted it, for diagnostics
  Range destination;         // kCopy, kSet; of a kLaunch what it writes
  Range source;              // kCopy; of a kLaunch the list of what it reads
  std::vector<Range> reads;  // kLaunch: what stood there when it was submitted
  uint32_t value = 0;        // kSet, in the lowest `width` bytes
  unsigned width = 1;        // 1 or 4
  CUhostFn function = nullptr;
  void* argument = nullptr;

  std::vector<TicketPtr> after;
  TicketPtr ticket;

  bool touches(const Range& range) const;
};

struct Stream {
  CUstream handle = nullptr;  // null: legacy or per-thread
  Context* context = nullptr;
  bool legacy = false;
  bool blocking = true;  // synchronises with the legacy stream
  bool closed = false;   // destroyed; runs what is queued
  bool has_worker = false;
  std::deque<Operation> queue;  // the front one may be running
  TicketPtr last;               // of the operation submitted last; may be null
  std::shared_ptr<Capture> capture;
};
using StreamPtr = std::shared_ptr<Stream>;

struct Event {
  Context* context = nullptr;
  bool timing = true;
  TicketPtr ticket;  // of the last record; null before
  std::weak_ptr<Capture> capture;
  bool captured = false;  // the last record was into a capture
};

class Streams {
 public:
  StreamPtr create(Context* context, CUstream handle, bool blocking);
  // The stream accepts nothing more and goes away when it is idle.
  void close(const StreamPtr& stream);

  // The stream behind a handle, special values included; null for an unknown one. The per-thread
  // stream is the calling thread's in `current`.
  StreamPtr find(CUstream handle, Context* current);
  // All that run or may run operations, closed ones with work left included.
  const std::vector<StreamPtr>& all() const { return all_; }
  uint64_t created() const;

  // Queues the operation. Null when no thread could be had for the stream.
  TicketPtr submit(const StreamPtr& stream, Operation operation);
  // What cuStreamSynchronize waits for.
  std::vector<TicketPtr> pending(const StreamPtr& stream) const;
  std::vector<TicketPtr> pending(const Context* context) const;
  // Waits; gives up the lock.
  void wait(Lock* lock, const std::vector<TicketPtr>& tickets);

  // Records a violation for each queued or running operation that touches the range.
  void report_use(const char* call, const Range& range);
  uint64_t queued_operations() const;

  // Delays of sim.h.
  void set_delay(uint64_t microseconds) { delay_us_ = microseconds; }
  void set_copy_rate(uint64_t bytes_per_second) { copy_rate_ = bytes_per_second; }
  void hold(bool held);

  static bool in_host_function();

 private:
  static void* work(void* argument);
  void run(const StreamPtr& stream);
  void execute(Lock* lock, const Stream& stream, const Operation& operation);
  uint64_t pause_us(const Operation& operation) const;

  std::vector<StreamPtr> all_;
  uint64_t delay_us_ = 0;
  uint64_t copy_rate_ = 0;
  bool held_ = false;
};

}  // namespace memsaver::sim
