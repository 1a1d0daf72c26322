#pragma once

#include <cmath>

#include "shardtensor/tensor/cuda_kernel.h"

// One launch each on a GPU. Elsewhere softmax.cpp computes the same by ATen's
// operators. Rows of nothing but -inf have no exponentials; those with +inf are
// NaN, as PyTorch's.

namespace shardtensor::detail {

SHARDTENSOR_CUDA_KERNEL(
    kExponential,
    exponential_below,
    template <typename T>
    T exponential_below(T x, T largest) {
      const bool none = largest < 0 && largest + largest == largest;
      return none ? T(0) : exp(x - largest);
    })

/// A rank's sum of exponentials, relative to the largest of all ranks.
SHARDTENSOR_CUDA_KERNEL(
    kShareOfSum,
    share_of_sum,
    template <typename T>
    T share_of_sum(T sum, T own, T largest) {
      const bool none = largest < 0 && largest + largest == largest;
      return none ? T(0) : sum * exp(own - largest);
    })

/// What a rank's exponentials are times to be shares of all ranks' sum.
SHARDTENSOR_CUDA_KERNEL(
    kShareOfAll,
    share_of_all,
    template <typename T>
    T share_of_all(T own, T largest, T sum) {
      return exp(own - largest) / sum;
    })

} // namespace shardtensor::detail
