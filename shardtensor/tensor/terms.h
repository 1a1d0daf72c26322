#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

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

} // namespace shardtensor::detail
