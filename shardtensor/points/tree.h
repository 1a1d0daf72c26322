#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Note [Point tree]
// A k-d tree whose nodes are halved by number, so that where they begin and end
// follows from the number of points alone: of depth d, node j holds the points
// [N * j >> d, N * (j + 1) >> d) of an order, and its halves are the nodes 2j
// and 2j + 1 of the next depth. Points in that order are the whole tree, and
// their boxes one pass over them: a cloud is sorted once, where it lies, and
// travels as it stands.

/// Points (N, D), contiguous, in the order of the tree over them; `rows` (N),
/// int32, says which row of the given tensor each one was.
struct OrderedPoints {
  at::Tensor points;
  at::Tensor rows;
};

/// On CPUs, float or double, finite, fewer than 2^31 points. The tree over
/// equal points is the same on every rank. On PyTorch's threads.
OrderedPoints order_as_tree(const at::Tensor& points);

/// What a search walks through, of points in their tree's order. It sees every
/// third depth only, so that it compares a query with the boxes of up to eight
/// nodes at once.
struct PointTree {
  explicit PointTree(const OrderedPoints& ordered, int64_t first_row = 0);

  static constexpr int64_t kLanes = 8;
  static constexpr int64_t kLeafPoints = 32; // at most; a multiple of kLanes

  int64_t points = 0;
  int64_t dims = 0;
  int64_t first_row = 0; // of the cloud that these points are a piece of
  int64_t leaf_stride = 0; // slots of a leaf
  /// Of the levels that a search sees, from 0, the root, to that of the leaves.
  std::vector<int64_t> depths;
  /// Where the boxes of a level begin; the root has none.
  std::vector<int64_t> first_groups;
  /// Lower and upper corners, (groups, 2, D, kLanes): a group for the nodes
  /// that have one parent in the level before, infinite the wrong way round in
  /// lanes without a node.
  at::Tensor boxes;
  /// Coordinates leaf by leaf, (leaves, D, leaf_stride): one dim of a leaf's
  /// points is contiguous. Slots behind the points are zero.
  at::Tensor leaves;
  at::Tensor rows; // OrderedPoints::rows

  int64_t depth() const {
    return depths.back();
  }
  /// Where a node's points begin in the order; it ends where the next begins.
  static int64_t begin_of(int64_t points, int64_t depth, int64_t node) {
    return (points * node) >> depth;
  }
};

} // namespace shardtensor::detail
