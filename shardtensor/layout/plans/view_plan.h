#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

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
  /// Where the result begins in the viewed tensor, by nominal strides.
  int64_t offset = 0;
};
using ViewPlanPtr = std::shared_ptr<const ViewPlan>;

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

/// The share of `pieces` ranks that are busy when they divide `extent` rows as
/// evenly as they can: 33 rows on 16 ranks keep 11 / 16 of them so.
double busy_share(int64_t extent, int64_t pieces);

/// The same layout with dims that are cut repeatedly cut once, in pieces of the
/// same size: one dim, some, all.
SpecPtr contiguous_dim(const SpecPtr& spec, int64_t dim);
SpecPtr contiguous_dims(SpecPtr spec, const std::vector<int64_t>& dims);
SpecPtr contiguous(const SpecPtr& spec);

} // namespace shardtensor::detail
