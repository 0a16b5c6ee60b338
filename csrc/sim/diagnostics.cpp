#include "diagnostics.h"

#include <utility>

namespace memsaver::sim {
namespace {

constexpr size_t kKept = 1000;

}  // namespace

void Diagnostics::violation(std::string text) {
  ++violations_;
  keep("violation: " + std::move(text));
}

void Diagnostics::illegal_access(std::string text) {
  ++illegal_accesses_;
  keep("illegal access: " + std::move(text));
}

void Diagnostics::clear() {
  entries_.clear();
  violations_ = 0;
  illegal_accesses_ = 0;
}

void Diagnostics::keep(std::string text) {
  if (entries_.size() < kKept) entries_.push_back(std::move(text));
}

}  // namespace memsaver::sim
