#include "shardtensor/rules/reduce/moments.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sum.h>

namespace shardtensor::detail {

Moments merge_moments(
    const Moments& samples,
    const at::Tensor& counts,
    const std::vector<int64_t>& dims) {
  const auto total = at::sum(counts, dims, true).clamp_min_(1);
  const auto mean = at::sum(samples.mean * (counts / total), dims, true);
  const auto between = (samples.mean - mean).abs().square() * counts;
  return {mean, at::sum(samples.squares + between, dims, true)};
}

std::vector<at::Tensor> merge_stacked_moments(
    const std::vector<at::Tensor>& stacked) {
  const auto& counts = stacked[2];
  const auto all = merge_moments({stacked[0], stacked[1]}, counts, {0});
  return {
      all.mean.squeeze(0),
      all.squares.squeeze(0),
      at::sum(counts, at::IntArrayRef{0})};
}

int64_t count_over(at::IntArrayRef sizes, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    count *= sizes[dim];
  }
  return count;
}

} // namespace shardtensor::detail
