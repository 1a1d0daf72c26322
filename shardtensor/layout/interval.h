#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <vector>

namespace shardtensor {

/// A half-open range of indices [begin, end) along one tensor dim. An empty
/// interval is written {b, b}.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t extent() const {
    return end - begin;
  }
  bool empty() const {
    return end <= begin;
  }
  Interval shifted(int64_t by) const {
    return {begin + by, end + by};
  }
  bool operator==(const Interval&) const = default;
};

/// The common part; {begin, begin} when there is none.
/// Example: intersect({2, 7}, {5, 9}) is {5, 7}.
inline Interval intersect(const Interval& a, const Interval& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// One interval per tensor dim. A box with an empty interval has no elements.
using Box = std::vector<Interval>;

/// Dim by dim. Raises when the numbers of dims differ.
Box intersect(const Box& a, const Box& b);
/// 1 for a box without dims.
int64_t numel(const Box& box);
std::vector<int64_t> extents(const Box& box);

/// "[2, 7)".
std::ostream& operator<<(std::ostream& out, const Interval& interval);

} // namespace shardtensor
