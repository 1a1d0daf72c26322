#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "shardtensor/rules/random/counter_numbers.h"

namespace shardtensor::detail {

/// A piece as runs of `length` neighbours in the whole tensor.
struct RunsOf {
  GlobalIndex firsts; // their first elements, with as few dims as can say it
  int64_t length = 1;
};

inline RunsOf runs_of(const GlobalIndex& index) {
  RunsOf runs{{{}, {}, index.offset}};
  auto& [sizes, strides, _] = runs.firsts;
  for (size_t dim = 0; dim < index.sizes.size(); ++dim) {
    const auto size = index.sizes[dim];
    const auto stride = index.strides[dim];
    if (size == 1) {
      continue;
    }
    if (!sizes.empty() && strides.back() == size * stride) {
      sizes.back() *= size;
      strides.back() = stride;
    } else {
      sizes.push_back(size);
      strides.push_back(stride);
    }
  }
  if (!strides.empty() && strides.back() == 1) {
    runs.length = sizes.back();
    sizes.pop_back();
    strides.pop_back();
  }
  return runs;
}

/// The same, run by run.
class Runs {
 public:
  explicit Runs(const GlobalIndex& index) : runs_(runs_of(index)) {}

  /// visit(first element, its global number, how many), for elements
  /// [begin, end).
  template <class Visit>
  void visit(int64_t begin, int64_t end, const Visit& visit) const {
    while (begin < end) {
      const auto inside = begin % runs_.length;
      const auto count = std::min(runs_.length - inside, end - begin);
      visit(begin, start_of(begin / runs_.length) + inside, count);
      begin += count;
    }
  }

 private:
  int64_t start_of(int64_t run) const {
    const auto& [sizes, strides, offset] = runs_.firsts;
    auto start = offset;
    for (auto dim = sizes.size(); dim-- > 0;) {
      start += run % sizes[dim] * strides[dim];
      run /= sizes[dim];
    }
    return start;
  }

  RunsOf runs_;
};

} // namespace shardtensor::detail
