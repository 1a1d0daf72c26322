#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/points/search.h"

namespace shardtensor::detail {

// Note [Tiles]
// On a GPU, which has no use for a tree, every query meets every point: squared
// distances, a tile at a time, and top-k of each query's. Top-k takes any of
// several equal squares, so those that equal the last one are chosen again, by
// row: what is found is that of Note [Order of neighbours]. ATen's operators
// alone, on any device; nothing waits for it but the number of pairs.

/// Queries (M, D) of float or double while they meet piece after piece: the
/// `most` nearest points within `radius`, or all pairs where there is no most.
class TileSearch {
 public:
  TileSearch(
      const at::Tensor& queries,
      std::optional<int64_t> most,
      std::optional<double> radius);

  /// Points (N, D), the first of which is row `first_row` of the cloud.
  void meet(const at::Tensor& points, int64_t first_row);

  /// (M, most), where there is a most.
  const Nearest& nearest() const {
    return nearest_;
  }
  /// Query by query, each one's nearest first.
  Pairs pairs() const;

 private:
  void take_nearest(
      int64_t first_query,
      const at::Tensor& squares,
      const at::Tensor& rows);
  void take_pairs(
      int64_t first_query,
      const at::Tensor& squares,
      const at::Tensor& rows);

  at::Tensor queries_;
  std::optional<int64_t> most_;
  at::Tensor limit_; // a squared distance; undefined: none
  Nearest nearest_;
  // Pairs, in the order in which they were met.
  std::vector<at::Tensor> queries_of_pairs_;
  std::vector<at::Tensor> rows_of_pairs_;
  std::vector<at::Tensor> squares_of_pairs_;
};

} // namespace shardtensor::detail
