#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Note [Rows that hide all keys]
// Public code hides a key by adding -1e9 or the lowest number. A query whose
// keys are all hidden so sees them all alike, for next to such a number its
// scores round away, and so does the logarithm of their sum: blocks of its keys
// could not be merged. But then the mask alone says what a block weighs: the
// number of keys where it has the row's largest value. So for these queries
// log_sums are the logarithms of such numbers.

/// The largest value of each row of a mask that is added, where scores of this
/// type round away next to it; inf in other rows. Sizes are the mask's, but for
/// one column. `mask` has all keys. Undefined for other masks, and on CPUs
/// where no row is so.
at::Tensor hidden_rows(const at::Tensor& mask, at::ScalarType type);

/// The log_sums of a block of so many keys, where `hidden` says so the
/// logarithm of its weight. `mask` and `hidden` are those of the block.
at::Tensor with_weights(
    const at::Tensor& log_sum,
    const at::Tensor& mask,
    const at::Tensor& hidden,
    int64_t keys);

/// What kernels of backward take in the place of an output's gradient and the
/// log_sum of all keys: there the weight of all keys divides the gradient, for
/// next to the row's largest value each key's weight is 1.
std::tuple<at::Tensor, at::Tensor> for_backward(
    const at::Tensor& grad,
    const at::Tensor& log_sum,
    const at::Tensor& hidden);

} // namespace shardtensor::detail
