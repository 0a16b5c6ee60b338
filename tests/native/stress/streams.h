// streams: the program's own work on the simulated devices. Any thread can call these functions.
#pragma once

#include <cstdint>

namespace stress {

// Creates a stream in the device's primary context; returns null on failure.
void* make_stream(int device);
void destroy_stream(int device, void* stream);

// Waits for the work queued on the stream; returns whether the wait succeeded.
bool wait_for(int device, void* stream);

// Queues a fill of the memory on the stream; returns whether the call succeeded.
bool queue_fill(int device, void* stream, void* at, unsigned char byte, uint64_t bytes);

}  // namespace stress
