#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// Negative dims made positive, sorted; none at all means every dim. Raises for
/// a dim out of range or named twice, as PyTorch does.
std::vector<int64_t> reduced_dims(
    const char* op,
    int64_t ndim,
    at::OptionalIntArrayRef dims);

/// The mesh axes that shard one of these dims.
std::vector<int64_t> axes_of_dims(
    const ShardSpec& spec,
    const std::vector<int64_t>& dims);

/// The layout of a reduction's result: the reduced dims are gone (or of size
/// 1), `on_reduced_axes` stands where an axis cut a reduced dim.
SpecPtr reduced_spec(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    bool keepdim,
    Placement on_reduced_axes);

} // namespace shardtensor::detail
