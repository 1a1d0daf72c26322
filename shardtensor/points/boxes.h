#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "shardtensor/points/search.h"

namespace shardtensor::detail {

/// The lower and the upper corner of points (N, D): (2, D), infinite the wrong
/// way round of none. On CPUs, float or double, contiguous.
at::Tensor box_of(const at::Tensor& points);

/// Queries and their limits, which are asked about one box after the other. A
/// box is compared with that of all queries first, as those of most ranks are
/// far from it, then with that of a block: queries in an order that leaves
/// neighbours near each other are mostly ruled out at once.
class QueryBlocks {
 public:
  explicit QueryBlocks(const OrderedQueries& queries);

  /// Which queries may have a point of the box (2, D) within their limit: (n),
  /// int64, ascending. See Note [Order of neighbours].
  at::Tensor near(const at::Tensor& box) const;

 private:
  template <class T>
  at::Tensor near_of(const at::Tensor& box) const;

  at::Tensor points_; // (M, D)
  at::Tensor limits_; // (M)
  at::Tensor boxes_; // (blocks, 2, D)
  at::Tensor most_; // (blocks), the largest limit
  at::Tensor box_; // (2, D), of all queries
  at::Tensor most_of_all_; // (1)
};

} // namespace shardtensor::detail
