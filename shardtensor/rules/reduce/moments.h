#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Means and variances, from samples that hold a part of the elements each.
// Nothing here communicates.

struct Moments {
  at::Tensor mean;
  at::Tensor squares; // sum of |x - mean|^2
};

/// Those of all samples along `dims` together, which get size 1; `counts` says
/// how many elements each sample has, none is right, too. Stable for any mean:
/// no large number is squared (Chan, Golub and LeVeque, 1979).
Moments merge_moments(
    const Moments& samples,
    const at::Tensor& counts,
    const std::vector<int64_t>& dims);

/// {mean, squares, counts} of samples stacked along dim 0, merged in the same
/// way: a MergeTerms.
std::vector<at::Tensor> merge_stacked_moments(
    const std::vector<at::Tensor>& stacked);

/// The elements that each sum over `dims` takes.
int64_t count_over(at::IntArrayRef sizes, const std::vector<int64_t>& dims);

} // namespace shardtensor::detail
