// The interface between preload.c and tms.c, the two halves of the preloaded library.
#ifndef TMS_H_
#define TMS_H_

#include <stdbool.h>

// Returns whether an environment variable is true according to torch_memory_saver's rules.
bool tms_is_true(const char* name);

// Looks up memsaver's functions in its loaded library. `library` is NULL if the library was not
// found. Call this function once before main.
void tms_find_memsaver(void* library);

#endif  // TMS_H_
