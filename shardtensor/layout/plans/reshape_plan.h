#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/plans/view_plan.h"

namespace shardtensor::detail {

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

} // namespace shardtensor::detail
