#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/points/tree.h"

namespace shardtensor::detail {

// Note [Order of neighbours]
// Neighbours are ordered by squared distance, equal ones by row of the whole
// cloud. A squared distance is the sum of the dims' squared differences, dim by
// dim, in the points' dtype and without fused operations, whichever search
// computes it; and no node's bound exceeds the distance of a point in it, for
// each step of the sum rounds monotonously. So the result does not depend on
// how a cloud was cut, nor on the order in which its pieces were searched.

/// The best neighbours of each query so far, ascending.
struct Nearest {
  at::Tensor squares; // (M, k); infinite where there is none yet
  at::Tensor rows; // (M, k), int64; kNoRow where there is none yet

  static constexpr int64_t kNoRow = INT64_MAX;
  /// Of queries ([B,] M, D).
  static Nearest none(const at::Tensor& queries, int64_t k);
};

/// Queries in an order that leaves neighbours near each other, for speed.
struct OrderedQueries {
  at::Tensor points; // (M, D), contiguous, of the cloud's dtype
  at::Tensor order; // (M), int64: their rows in results; undefined: as they are
  at::Tensor limits; // (M), squared distances; undefined: none
};

/// Takes the tree's points into `best` that are nearer than what it has, of
/// those no further away than the query's limit. A cloud has fewer than 2^31
/// points. PyTorch's threads share the queries.
void search_nearest(
    const PointTree& tree,
    const OrderedQueries& queries,
    const Nearest& best);

/// Takes what was found for the rows `places` (n) of `best`, elsewhere and
/// among other points, (n, k) each and ascending, into it.
void merge_nearest(
    const Nearest& best,
    const at::Tensor& places,
    const Nearest& found);

/// All pairs of a query and a point within its limit, query by query,
/// unordered within a query.
struct Pairs {
  at::Tensor counts; // (M), int64
  at::Tensor rows; // (pairs), int64
  at::Tensor squares; // (pairs)
};
/// Those have limits; their order counts for nothing.
Pairs search_within(const PointTree& tree, const OrderedQueries& queries);

/// The pairs of several clouds for the same queries, each query's nearest
/// first, see Note [Order of neighbours].
Pairs join_pairs(const std::vector<Pairs>& parts);

} // namespace shardtensor::detail
