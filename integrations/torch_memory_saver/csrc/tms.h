// What the two halves of the preloaded library know of each other.
#ifndef TMS_H_
#define TMS_H_

#include <stdbool.h>

// Whether an environment variable says yes, in torch_memory_saver's words.
bool tms_is_true(const char* name);

// Looks up memsaver's functions in its loaded library, or in none (NULL). Once, before main.
void tms_find_memsaver(void* library);

#endif  // TMS_H_
