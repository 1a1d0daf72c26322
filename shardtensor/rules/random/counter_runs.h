#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "shardtensor/rules/random/counter_numbers.h"

namespace shardtensor::detail {

/// The elements of a piece as runs of neighbours in the whole tensor.
class Runs {
 public:
  explicit Runs(const GlobalIndex& index) : offset_(index.offset) {
    for (size_t dim = 0; dim < index.sizes.size(); ++dim) {
      const auto size = index.sizes[dim];
      const auto stride = index.strides[dim];
      if (size == 1) {
        continue;
      }
      if (!sizes_.empty() && strides_.back() == size * stride) {
        sizes_.back() *= size;
        strides_.back() = stride;
      } else {
        sizes_.push_back(size);
        strides_.push_back(stride);
      }
    }
    if (!strides_.empty() && strides_.back() == 1) {
      length_ = sizes_.back();
      sizes_.pop_back();
      strides_.pop_back();
    }
  }

  /// visit(first element, its global number, how many), for elements
  /// [begin, end).
  template <class Visit>
  void visit(int64_t begin, int64_t end, const Visit& visit) const {
    while (begin < end) {
      const auto inside = begin % length_;
      const auto count = std::min(length_ - inside, end - begin);
      visit(begin, start_of(begin / length_) + inside, count);
      begin += count;
    }
  }

 private:
  int64_t start_of(int64_t run) const {
    auto start = offset_;
    for (auto dim = sizes_.size(); dim-- > 0;) {
      start += run % sizes_[dim] * strides_[dim];
      run /= sizes_[dim];
    }
    return start;
  }

  int64_t offset_;
  int64_t length_ = 1;
  std::vector<int64_t> sizes_; // of the runs
  std::vector<int64_t> strides_;
};

} // namespace shardtensor::detail
