#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

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

/// Every rank's `local` (laid out as `spec`, but different on each rank of
/// `axes`) stacked along a new dim 0, in rank order. Communication: one
/// exchange; local.numel() elements to each rank of the axes.
at::Tensor gather_terms(
    const at::Tensor& local,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes);

/// The same for several tensors of one layout and dtype in one exchange.
std::vector<at::Tensor> gather_terms(
    const std::vector<at::Tensor>& locals,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes);

/// The sum of a ShardTensor over dims: a Partial ShardTensor, so that nothing
/// moves until the value is needed. fp16 and bf16 sums accumulate in fp32 and
/// are reduced at once. Its gradient is made shard by shard.
at::Tensor sum_dims(
    const at::Tensor& tensor,
    const std::vector<int64_t>& dims,
    bool keepdim,
    std::optional<at::ScalarType> dtype);

} // namespace shardtensor
