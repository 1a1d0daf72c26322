#pragma once

#include "shardtensor/rules/attention/by_scores.h"
#include "shardtensor/rules/attention/layouts.h"

namespace shardtensor::detail {

/// Attention of ShardTensors that lie as `layouts` says; the output does, too.
/// No scores are kept: backward computes them again, block by block, from the
/// logarithms of their sums. Differentiable to any order; double backward and
/// forward mode hold this rank's scores at once. `dropout` is a probability
/// below 1, by numbers of the "counter" policy. `strides` are the output's;
/// none: contiguous. Communication: see AttentionWork.
at::Tensor attention(
    const AttentionOperands& operands,
    const std::shared_ptr<const AttentionLayouts>& layouts,
    double scale,
    double dropout,
    at::IntArrayRef strides);

} // namespace shardtensor::detail
