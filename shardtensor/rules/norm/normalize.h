#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/rules/reduce/moments.h"

namespace shardtensor::detail {

/// How a norm looks at this rank's tensor, or at a view of it.
struct NormGeometry {
  std::vector<int64_t> dims; // those that one statistic covers, sorted
  // The layout of the statistics: the tensor's other dims, in order.
  SpecPtr statistics;
  std::vector<int64_t> axes; // mesh axes whose ranks share each statistic
  int64_t count; // elements of one statistic, over all ranks
  bool centered = true; // false: the root mean square norm
  // Where ranks have channels of the same groups: the group of each own one.
  // `dims` are then those of a channel, the statistics of (samples, groups).
  at::Tensor groups;
};

/// Of the elements of each statistic, over all ranks; the covered dims have
/// extent 1, each channel has its group's. fp32, or fp64 for an fp64 tensor; no
/// mean when not centered. Communication: merge_terms of three numbers per
/// statistic (an all-reduce of one when not centered). Stable for any mean: no
/// large number is squared. No autograd history.
Moments norm_moments(const at::Tensor& x, const NormGeometry& geometry);

/// (x - mean) / sqrt(squares / count + eps) * weight + bias, in x's dtype.
/// Weight and bias broadcast with x, or are undefined. Differentiable to any
/// order in x, weight and bias, the moments being those of x; the gradients of
/// weight and bias are this rank's terms. Keeps x, weight and one mean and
/// scale per statistic for backward. Communication: none; backward: one
/// all-reduce of two numbers per statistic.
at::Tensor normalize(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const Moments& moments,
    double eps,
    const NormGeometry& geometry);

} // namespace shardtensor::detail
