// coverage: g++ reports each basic block that runs (-fsanitize-coverage=trace-pc); libFuzzer needs
// a counter per block. A block is assigned the next free counter when it first runs. Linked into
// the measured library, so that it receives only that library's calls; calls no instrumented code.
#include <cstddef>
#include <cstdint>

#define NOT_INSTRUMENTED gnu::no_sanitize_coverage, gnu::no_sanitize("address", "undefined")

extern "C" {
void __sanitizer_cov_8bit_counters_init(uint8_t* begin, uint8_t* end);
void __sanitizer_cov_pcs_init(const uintptr_t* begin, const uintptr_t* end);
}

namespace {

constexpr size_t kMostBlocks = 1 << 16;
constexpr size_t kPlaces = 2 * kMostBlocks;

uint8_t counters[kMostBlocks];
uintptr_t blocks[kMostBlocks][2];  // the address and flags of each
uint32_t blocks_seen;

// A hash table from addresses to counters; nothing is ever removed.
struct Place {
  uintptr_t pc;
  uint32_t counter;  // 0: none yet; otherwise the index plus 1
};
Place places[kPlaces];

[[NOT_INSTRUMENTED]] uint32_t add_block(uintptr_t pc) {
  const uint32_t counter = __atomic_fetch_add(&blocks_seen, 1, __ATOMIC_RELAXED);
  if (counter >= kMostBlocks) return 0;
  blocks[counter][0] = pc;
  return counter + 1;
}

[[NOT_INSTRUMENTED]] void hit(uintptr_t pc) {
  size_t at = (pc * 0x9E3779B97F4A7C15ull) >> 40;
  for (size_t tries = 0; tries < kPlaces; ++tries, ++at) {
    Place* const place = &places[at % kPlaces];
    uintptr_t there = __atomic_load_n(&place->pc, __ATOMIC_RELAXED);
    if (there == 0 && __atomic_compare_exchange_n(&place->pc, &there, pc, false, __ATOMIC_RELAXED,
                                                  __ATOMIC_RELAXED)) {
      __atomic_store_n(&place->counter, add_block(pc), __ATOMIC_RELAXED);
      there = pc;
    }
    if (there != pc) continue;
    const uint32_t counter = __atomic_load_n(&place->counter, __ATOMIC_RELAXED);
    if (counter != 0 && counters[counter - 1] < UINT8_MAX) ++counters[counter - 1];
    return;
  }
}

[[gnu::constructor, NOT_INSTRUMENTED]] void announce() {
  __sanitizer_cov_8bit_counters_init(counters, counters + kMostBlocks);
  __sanitizer_cov_pcs_init(&blocks[0][0], &blocks[0][0] + 2 * kMostBlocks);
}

}  // namespace

extern "C" {

[[gnu::visibility("hidden"), NOT_INSTRUMENTED]] void __sanitizer_cov_trace_pc() {
  hit(reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

// g++ also reports floating-point comparisons, which libFuzzer does not support.
[[gnu::visibility("hidden"), NOT_INSTRUMENTED]] void __sanitizer_cov_trace_cmpf(float, float) {}
[[gnu::visibility("hidden"), NOT_INSTRUMENTED]] void __sanitizer_cov_trace_cmpd(double, double) {}

}  // extern "C"
