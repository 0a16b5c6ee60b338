#include "streams.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>

#include "contexts.h"
#include "kernels.h"
#include "state.h"
#include "transfer.h"

namespace memsaver::sim {
namespace {

thread_local bool t_in_host_function = false;

double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool complete(const std::vector<TicketPtr>& tickets) {
  return std::all_of(tickets.begin(), tickets.end(),
                     [](const TicketPtr& ticket) { return ticket->done; });
}

void add_unfinished(const TicketPtr& ticket, std::vector<TicketPtr>* tickets) {
  if (ticket != nullptr && !ticket->done) tickets->push_back(ticket);
}

std::string describe(const char* call, const Range& range) {
  char text[96];
  std::snprintf(text, sizeof text, "%s of [%#llx, +%#llx)", call,
                static_cast<unsigned long long>(range.address),
                static_cast<unsigned long long>(range.size));
  return text;
}

// Starts a thread of the simulated device, which blocks the program's signals.
bool start_thread(void* (*body)(void*), void* argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const bool started = pthread_create(&thread, nullptr, body, argument) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started) pthread_detach(thread);
  return started;
}

// Runs a copy or a set with the lock released. Returns false if memory was unmapped or
// inaccessible.
bool run_transfer(Lock* lock, const Operation& operation, int device) {
  const bool copies = operation.kind == Operation::Kind::kCopy;
  std::vector<Span> destination, source;
  if (!resolve(operation.destination, device, true, &destination)) return false;
  if (copies && !resolve(operation.source, device, false, &source)) return false;
  lock->unlock();
  const bool fine =
      copies ? copy(destination, source) : fill(destination, operation.value, operation.width);
  lock->lock();
  return fine;
}

}  // namespace

bool Operation::touches(const Range& range) const {
  return destination.overlaps(range) || source.overlaps(range) ||
         std::any_of(reads.begin(), reads.end(),
                     [&](const Range& read) { return read.overlaps(range); });
}

bool Streams::in_host_function() { return t_in_host_function; }

StreamPtr Streams::create(Context* context, CUstream handle, bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->handle = handle;
  stream->blocking = blocking;
  all_.push_back(stream);
  return stream;
}

void Streams::close(const StreamPtr& stream) {
  stream->closed = true;
  stream->ready.notify_one();
  if (!stream->has_worker) all_.erase(std::find(all_.begin(), all_.end(), stream));
  state().changed.notify_all();
}

StreamPtr Streams::find(CUstream handle, Context* current) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return current->legacy;
  if (handle == CU_STREAM_PER_THREAD) return current->stream_of_this_thread();
  for (const StreamPtr& stream : all_) {
    if (stream->handle == handle && !stream->closed) return stream;
  }
  return nullptr;
}

uint64_t Streams::created() const {
  return static_cast<uint64_t>(std::count_if(all_.begin(), all_.end(), [](const StreamPtr& stream) {
    return stream->handle != nullptr && !stream->closed;
  }));
}

TicketPtr Streams::submit(const StreamPtr& stream, Operation operation) {
  if (!stream->has_worker) {
    auto* argument = new StreamPtr(stream);
    if (!start_thread(&Streams::work, argument)) {
      delete argument;
      return nullptr;
    }
    stream->has_worker = true;
  }
  if (stream->legacy) {
    for (const StreamPtr& other : all_) {
      if (other->context == stream->context && other->blocking) {
        add_unfinished(other->last, &operation.after);
      }
    }
  } else if (stream->blocking) {
    add_unfinished(stream->context->legacy->last, &operation.after);
  }
  auto ticket = std::make_shared<Ticket>();
  operation.ticket = ticket;
  stream->last = ticket;
  stream->queue.push_back(std::move(operation));
  stream->ready.notify_one();
  return ticket;
}

std::vector<TicketPtr> Streams::pending(const StreamPtr& stream) const {
  std::vector<TicketPtr> tickets;
  add_unfinished(stream->last, &tickets);
  if (!stream->blocking) return tickets;
  for (const StreamPtr& other : all_) {
    const bool both_ways = stream->legacy ? other->blocking : other->legacy;
    if (other->context == stream->context && both_ways) add_unfinished(other->last, &tickets);
  }
  return tickets;
}

std::vector<TicketPtr> Streams::pending(const Context* context) const {
  std::vector<TicketPtr> tickets;
  for (const StreamPtr& stream : all_) {
    if (stream->context == context) add_unfinished(stream->last, &tickets);
  }
  return tickets;
}

void Streams::wait(Lock* lock, const std::vector<TicketPtr>& tickets) {
  state().changed.wait(*lock, [&] { return complete(tickets); });
}

void Streams::report_use(const char* call, const Range& range) {
  for (const StreamPtr& stream : all_) {
    for (const Operation& operation : stream->queue) {
      if (!operation.touches(range)) continue;
      state().diagnostics.violation(describe(call, range) + " while " + operation.call +
                                    " on it is not complete");
    }
  }
}

uint64_t Streams::queued_operations() const {
  uint64_t count = 0;
  for (const StreamPtr& stream : all_) count += stream->queue.size();
  return count;
}

void Streams::hold(bool held) {
  held_ = held;
  wake();
}

void Streams::hold_memory(const Range& range) {
  held_memory_ = range;
  wake();
}

bool Streams::is_ready(const Stream& stream) const {
  if (stream.queue.empty()) return stream.closed;
  const Operation& next = stream.queue.front();
  const bool held = held_ || (held_memory_.size != 0 && next.touches(held_memory_));
  return !held && complete(next.after);
}

void Streams::wake() {
  for (const StreamPtr& stream : all_) {
    if (is_ready(*stream)) stream->ready.notify_one();
  }
}

void* Streams::work(void* argument) {
  auto* owned = static_cast<StreamPtr*>(argument);
  const StreamPtr stream = std::move(*owned);
  delete owned;
  state().streams.run(stream);
  return nullptr;
}

void Streams::run(const StreamPtr& stream) {
  State& shared = state();
  Lock lock(shared.mutex);
  while (true) {
    stream->ready.wait(lock, [&] { return is_ready(*stream); });
    if (stream->queue.empty()) break;
    execute(&lock, *stream, stream->queue.front());
    Ticket& ticket = *stream->queue.front().ticket;
    ticket.milliseconds = now_ms();
    ticket.done = true;
    stream->queue.pop_front();
    wake();
    shared.changed.notify_all();
  }
  all_.erase(std::find(all_.begin(), all_.end(), stream));
  shared.changed.notify_all();
}

uint64_t Streams::pause_us(const Operation& operation) const {
  uint64_t pause = delay_us_;
  if (operation.kind == Operation::Kind::kCopy && copy_rate_ != 0) {
    pause += static_cast<uint64_t>(1e6 * static_cast<double>(operation.source.size) /
                                   static_cast<double>(copy_rate_));
  }
  return pause;
}

void Streams::execute(Lock* lock, const Stream& stream, const Operation& operation) {
  if (operation.kind == Operation::Kind::kMarker) return;
  if (const uint64_t pause = pause_us(operation)) {
    lock->unlock();
    usleep(static_cast<useconds_t>(std::min<uint64_t>(pause, UINT32_MAX)));
    lock->lock();
  }
  if (operation.kind == Operation::Kind::kHostFunction) {
    lock->unlock();
    t_in_host_function = true;
    operation.function(operation.argument);
    t_in_host_function = false;
    lock->lock();
    return;
  }
  if (stream.context->broken != CUDA_SUCCESS) return;
  const int device = stream.context->device;
  Range culprit = operation.destination;
  try {
    const bool fine = operation.kind == Operation::Kind::kLaunch
                          ? run_launch(lock, operation, device, &culprit)
                          : run_transfer(lock, operation, device);
    if (fine) return;
  } catch (const std::bad_alloc&) {
    if (!lock->owns_lock()) lock->lock();
    stream.context->broken = CUDA_ERROR_OUT_OF_MEMORY;
    return;
  }
  state().diagnostics.illegal_access(describe(operation.call, culprit));
  stream.context->broken = CUDA_ERROR_ILLEGAL_ADDRESS;
}

}  // namespace memsaver::sim
