// streams: work of the program's own on the simulated devices. Any thread.
#pragma once

#include <cstdint>

namespace stress {

// A stream of the device's primary context; null where there is none to be had.
void* make_stream(int device);
void destroy_stream(int device, void* stream);

// Returns when all that was queued on it is done; whether it is.
bool wait_for(int device, void* stream);

// Whether a fill of the memory is now queued on the stream.
bool queue_fill(int device, void* stream, void* at, unsigned char byte, uint64_t bytes);

}  // namespace stress
