#pragma once

#include <cmath>

#include "shardtensor/tensor/cuda_kernel.h"

// One launch each on a GPU. Elsewhere softmax.cpp computes the same by ATen's
// operators. What is as large as the largest needs no difference: two
// infinities have none.

namespace shardtensor::detail {

SHARDTENSOR_CUDA_KERNEL(
    kExponential,
    exponential_below,
    template <typename T>
    T exponential_below(T x, T largest) {
      return x == largest ? T(1) : exp(x - largest);
    })

/// A rank's sum of exponentials, relative to the largest of all ranks.
SHARDTENSOR_CUDA_KERNEL(
    kShareOfSum,
    share_of_sum,
    template <typename T>
    T share_of_sum(T sum, T own, T largest) {
      return own == largest ? sum : sum * exp(own - largest);
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
