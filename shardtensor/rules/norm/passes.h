#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/norm/normalize.h"

namespace shardtensor::detail {

// What a norm does with large tensors: few passes, piece by piece through the
// cache, with no large temporary. Sums are in the accumulation type, fp32 or
// fp64. Nothing here communicates or records.

/// From so many on a pass over a GPU's memory takes longer than to launch it.
constexpr int64_t kManyElements = 1 << 20;

at::ScalarType accumulate_type(const at::Tensor& x);
/// In the accumulation type.
at::Tensor wide(const at::Tensor& x);
/// An empty list of dims means none here, not all.
at::Tensor kept_sum(const at::Tensor& x, const std::vector<int64_t>& dims);
/// Ones in front, so that all tensors of a formula have the same dims.
at::Tensor with_leading_dims(const at::Tensor& x, int64_t dims);

/// Of this rank's elements.
Moments own_moments(const at::Tensor& x, const std::vector<int64_t>& dims);
/// The sum of x^2.
at::Tensor own_squares(const at::Tensor& x, const std::vector<int64_t>& dims);

/// What x is normalized with.
struct NormStatistics {
  at::Tensor mean; // undefined when not centered
  at::Tensor rstd;
};

/// (x - mean) * rstd * weight + bias, in x's dtype.
at::Tensor apply_norm(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const NormStatistics& statistics);

/// This rank's terms of the gradient.
struct NormSums {
  at::Tensor sum; // of the weighted gradient, per statistic
  at::Tensor product; // of that times the normalized value
  at::Tensor weight; // gradients of weight and bias, with x's dims
  at::Tensor bias;
};
NormSums norm_sums(
    const at::Tensor& grad,
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::vector<int64_t>& bias_sizes,
    const NormStatistics& statistics,
    const NormGeometry& geometry);

/// The gradient of x from the sums over all ranks.
at::Tensor norm_input_gradient(
    const at::Tensor& grad,
    const at::Tensor& x,
    const at::Tensor& weight,
    const NormStatistics& statistics,
    const at::Tensor& sum,
    const at::Tensor& product,
    const NormGeometry& geometry);

} // namespace shardtensor::detail
