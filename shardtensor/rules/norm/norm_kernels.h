#pragma once

#include <cmath>

#include "shardtensor/tensor/cuda_kernel.h"

// One launch each on a GPU, for tensors whose operators take longer to launch
// than to run. The formulas are those of passes.cpp and normalize.cpp.

namespace shardtensor::detail {

SHARDTENSOR_CUDA_KERNEL(
    kNormScale,
    norm_scale,
    template <typename T>
    T norm_scale(T squares, T count, T eps) {
      return 1 / sqrt(squares / count + eps);
    })

SHARDTENSOR_CUDA_KERNEL(
    kNormPlain,
    norm_plain,
    template <typename T>
    T norm_plain(T x, T mean, T rstd) { return (x - mean) * rstd; })

SHARDTENSOR_CUDA_KERNEL(
    kNormAffine,
    norm_affine,
    template <typename T>
    T norm_affine(T x, T mean, T rstd, T weight, T bias) {
      return (x - mean) * (rstd * weight) + bias;
    })

/// From the sums over a statistic's `count` elements of the weighted gradient,
/// and of that times the normalized value.
SHARDTENSOR_CUDA_KERNEL(
    kNormGradient,
    norm_gradient,
    template <typename T>
    T norm_gradient(T grad, T x, T mean, T rstd, T sum, T product, T count) {
      return (grad - (sum + (x - mean) * rstd * product) / count) * rstd;
    })

SHARDTENSOR_CUDA_KERNEL(
    kWeightedNormGradient,
    weighted_norm_gradient,
    template <typename T>
    T weighted_norm_gradient(
        T grad,
        T x,
        T mean,
        T rstd,
        T weight,
        T sum,
        T product,
        T count) {
      return (grad * weight - (sum + (x - mean) * rstd * product) / count) *
          rstd;
    })

} // namespace shardtensor::detail
