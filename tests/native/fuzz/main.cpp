// The program for a target: contains only libFuzzer; the target is a separate library.
#include <cstddef>
#include <cstdint>

extern "C" {
int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count);
int LLVMFuzzerRunDriver(int* count, char*** arguments, int (*test)(const uint8_t*, size_t));
}

int main(int count, char** arguments) {
  return LLVMFuzzerRunDriver(&count, &arguments, &LLVMFuzzerTestOneInput);
}
