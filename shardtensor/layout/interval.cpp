#include "shardtensor/layout/interval.h"

#include <c10/util/Exception.h>

namespace shardtensor {

Box intersect(const Box& a, const Box& b) {
  TORCH_CHECK_VALUE(
      a.size() == b.size(),
      "intersect: boxes of ",
      a.size(),
      " and ",
      b.size(),
      " dims, expected as many in both");
  Box common(a.size());
  for (size_t dim = 0; dim < a.size(); ++dim) {
    common[dim] = intersect(a[dim], b[dim]);
  }
  return common;
}

int64_t numel(const Box& box) {
  int64_t product = 1;
  for (const Interval& interval : box) {
    product *= interval.empty() ? 0 : interval.extent();
  }
  return product;
}

std::vector<int64_t> extents(const Box& box) {
  std::vector<int64_t> result;
  result.reserve(box.size());
  for (const Interval& interval : box) {
    result.push_back(interval.extent());
  }
  return result;
}

std::ostream& operator<<(std::ostream& out, const Interval& interval) {
  return out << '[' << interval.begin << ", " << interval.end << ')';
}

} // namespace shardtensor
