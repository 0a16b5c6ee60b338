// Streams: in-order queues of operations. Each stream has its own thread.
//
// The caller of a function must own State::mutex (state.h), unless the function is documented to
// need no lock; functions that are documented to wait release the mutex. An operation starts when
// its dependencies are complete. A context's legacy stream depends on all of the context's blocking
// streams, and the blocking streams depend on the legacy stream. Streams that were created with
// CU_STREAM_NON_BLOCKING are independent of the legacy stream.
#pragma once

#include <cuda.h>

#include <condition_variable>
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

// The completion of one operation.
struct Ticket {
  bool done = false;
  double milliseconds = 0;  // time of completion on the monotonic clock
};
using TicketPtr = std::shared_ptr<Ticket>;

struct Operation {
  enum class Kind { kMarker, kCopy, kSet, kHostFunction, kLaunch };
  Kind kind = Kind::kMarker;
  const char* call = "";     // the call that submitted it, for diagnostics
  Range destination;         // kCopy, kSet; for a kLaunch, the range that it writes
  Range source;              // kCopy; for a kLaunch, the list of ranges that it reads
  std::vector<Range> reads;  // kLaunch: that list at the time of submission
  uint32_t value = 0;        // kSet: the value, in the lowest `width` bytes
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
  bool blocking = true;  // synchronizes with the legacy stream
  bool closed = false;   // destroyed; still runs its queue
  bool has_worker = false;
  std::deque<Operation> queue;  // the first operation may be running
  TicketPtr last;               // the ticket of the last operation; may be null
  std::shared_ptr<Capture> capture;
  std::condition_variable
      ready;  // its thread waits here, so that other streams' operations do not wake it
};
using StreamPtr = std::shared_ptr<Stream>;

struct Event {
  Context* context = nullptr;
  bool timing = true;
  TicketPtr ticket;  // the ticket of the last record; null if never recorded
  std::weak_ptr<Capture> capture;
  bool captured = false;  // the last record was into a capture
};

class Streams {
 public:
  StreamPtr create(Context* context, CUstream handle, bool blocking);
  // Closes a stream. A closed stream accepts no operations and is removed when it is idle.
  void close(const StreamPtr& stream);

  // Returns the stream of a handle, or null if the handle is unknown. The handle may be a special
  // value. The special per-thread handle means the calling thread's stream in `current`.
  StreamPtr find(CUstream handle, Context* current);
  // Returns all streams that run or may run operations, including closed streams that still have
  // work.
  const std::vector<StreamPtr>& all() const { return all_; }
  uint64_t created() const;

  // Queues the operation. Returns null if no thread could be started for the stream.
  TicketPtr submit(const StreamPtr& stream, Operation operation);
  // Returns the operations that cuStreamSynchronize waits for.
  std::vector<TicketPtr> pending(const StreamPtr& stream) const;
  std::vector<TicketPtr> pending(const Context* context) const;
  // Waits for the tickets with the lock released.
  void wait(Lock* lock, const std::vector<TicketPtr>& tickets);

  // Records a violation for each queued or running operation that touches the range.
  void report_use(const char* call, const Range& range);
  uint64_t queued_operations() const;

  // These functions set the delays that sim.h describes.
  void set_delay(uint64_t microseconds) { delay_us_ = microseconds; }
  void set_copy_rate(uint64_t bytes_per_second) { copy_rate_ = bytes_per_second; }
  void hold(bool held);
  void hold_memory(const Range& range);

  // Returns whether the calling thread is running a host function. Needs no lock.
  static bool in_host_function();

 private:
  static void* work(void* argument);
  void run(const StreamPtr& stream);
  // Returns whether the stream's thread has an operation to start or must end.
  bool is_ready(const Stream& stream) const;
  // Wakes the threads of all streams that are ready.
  void wake();
  void execute(Lock* lock, const Stream& stream, const Operation& operation);
  uint64_t pause_us(const Operation& operation) const;

  std::vector<StreamPtr> all_;
  uint64_t delay_us_ = 0;
  uint64_t copy_rate_ = 0;
  bool held_ = false;
  Range held_memory_;
};

}  // namespace memsaver::sim
