#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// What a view shows of a contiguous tensor: where its first element is, and
/// how far apart the rows of each dim are.
struct ViewGeometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
};

/// The smallest box that has all that the view shows; the whole tensor where
/// that is not seen from its strides.
Box shown_box(const std::vector<int64_t>& sizes, const ViewGeometry& view);

/// A layout of a tensor of `sizes` into a view of which a value is written that
/// lies as `value`, of sizes that broadcast to the view's. Dims that are cut in
/// the value are cut in the tensor by the same axes, all others are whole. The
/// rows of the value stay where they are, and the tensor's other rows go to the
/// nearest pieces, unless a piece then holds more than 3/2 of its even share:
/// such a dim gets torch.chunk's split. Sums that are still to be done are
/// scattered: their axes cut a dim that the value fills.
///
/// Example: sizes (9, 4), a view of columns [0, 3), a value of sizes (9, 3) cut
/// on dim 0 as [5, 4]: dim 0 cut as [5, 4]. Cut on dim 1 as [2, 1]: dim 1 cut
/// as [2, 2].
SpecPtr layout_of_written(
    const std::vector<int64_t>& sizes,
    const ViewGeometry& view,
    const SpecPtr& value);

} // namespace shardtensor::detail
