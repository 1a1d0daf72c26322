#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

// Pure planners: what a view operator does to a layout. Sizes and dims are
// valid and not negative; the kernels see to that.

/// The layout in which a local view can be taken, the layout of its result, and
/// the arguments of the local call where they depend on the rank.
struct ViewPlan {
  SpecPtr wanted;
  SpecPtr output;
  std::vector<int64_t> arguments = {};
  /// Of the result, see Note [Nominal strides]; none: contiguous.
  std::vector<int64_t> strides = {};
};
using ViewPlanPtr = std::shared_ptr<const ViewPlan>;

/// The same elements in other sizes.
///
/// Note [Reshaping a partition]
/// Sizes are factored into the smallest groups of input and output dims with
/// equal products. Inside a group a cut of dim d is a cut of the flattened
/// group: its cut points times the extent of the dims inside d, repeated as
/// often as the extent of the dims outside. It can be placed on an output dim e
/// when the cut points are multiples of the extent inside e and e holds whole
/// repetitions. Where it can be placed nowhere, or several dims of the group
/// are cut, the tensor is redistributed first: `wanted` is then the cheapest
/// layout that can be.
///
/// Example: (2, 6) cut as [4, 2] on dim 1 becomes (12) cut as 2 x [4, 2], and
/// that (2, 3, 2) cut as [2, 1] on dim 1. Nothing moves.
ViewPlan plan_reshape(const SpecPtr& spec, const std::vector<int64_t>& sizes);

/// Output dim i is input dim dims[i]; a new dim of size 1 where dims[i] is -1.
/// Input dims that are not named have size 1.
ViewPlan plan_dims(const SpecPtr& spec, const std::vector<int64_t>& dims);

/// Dims of size 1 become any size; new ones come in front.
ViewPlan plan_expand(const SpecPtr& spec, const std::vector<int64_t>& sizes);

/// Rows [start, end) of `dim` by `step`, 0 <= start <= end <= size. Every rank
/// keeps its own; arguments are the local start and end.
ViewPlan plan_slice(
    const SpecPtr& spec,
    int64_t dim,
    int64_t start,
    int64_t end,
    int64_t step);

/// A layout of the sliced tensor in which the rows of `grad`, the gradient of a
/// slice, stay where they are. Rows outside of the slice go to the nearest
/// pieces, first to those that have no rows of it. arguments as in plan_slice.
ViewPlan plan_slice_backward(
    const SpecPtr& grad,
    int64_t size,
    int64_t dim,
    int64_t start,
    int64_t end,
    int64_t step);

/// The layout of a gradient that is zero but for one row of a new dim `dim`:
/// axes that have the whole gradient cut the new dim, so that no rank makes a
/// tensor of global size.
ViewPlan plan_select_backward(const SpecPtr& grad, int64_t size, int64_t dim);

/// The same layout with `dims` whole. Their mesh axes cut the largest of
/// `others` instead, or nothing when these are too small.
SpecPtr whole_dims(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& others);
/// `others`: all dims but `dims`.
SpecPtr whole_dims(const SpecPtr& spec, const std::vector<int64_t>& dims);

/// The same layout with `dim`, cut repeatedly, cut once in pieces of the same
/// size.
SpecPtr contiguous_dim(const SpecPtr& spec, int64_t dim);

} // namespace shardtensor
