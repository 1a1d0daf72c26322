#include "shardtensor/rules/reduce/moments.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sum.h>

#include "shardtensor/tensor/cuda_kernel.h"

namespace shardtensor::detail {

namespace {

SHARDTENSOR_CUDA_KERNEL(
    kShareOfMean,
    share_of_mean,
    template <typename T>
    T share_of_mean(T mean, T count, T total) {
      return mean * (count / (total < 1 ? 1 : total));
    })

SHARDTENSOR_CUDA_KERNEL(
    kSquaresAboutMean,
    squares_about_mean,
    template <typename T>
    T squares_about_mean(T squares, T own, T mean, T count) {
      return squares + (own - mean) * count * (own - mean);
    })

Moments merged(
    const Moments& samples,
    const at::Tensor& counts,
    const at::Tensor& total,
    const std::vector<int64_t>& dims) {
  if (have_cuda_kernels(samples.mean) && samples.mean.is_floating_point()) {
    const auto shares =
        run_cuda_kernel(kShareOfMean, {samples.mean, counts, total});
    const auto mean = at::sum(shares, dims, true);
    const auto squares = run_cuda_kernel(
        kSquaresAboutMean, {samples.squares, samples.mean, mean, counts});
    return {mean, at::sum(squares, dims, true)};
  }
  const auto mean =
      at::sum(samples.mean * (counts / total.clamp_min(1)), dims, true);
  // In this order: of no elements even an infinite square counts for nothing.
  const auto away = (samples.mean - mean).abs();
  const auto between = away * counts * away;
  return {mean, at::sum(samples.squares + between, dims, true)};
}

} // namespace

Moments merge_moments(
    const Moments& samples,
    const at::Tensor& counts,
    const std::vector<int64_t>& dims) {
  return merged(samples, counts, at::sum(counts, dims, true), dims);
}

std::vector<at::Tensor> merge_stacked_moments(
    const std::vector<at::Tensor>& stacked) {
  const auto& counts = stacked[2];
  const auto total = at::sum(counts, at::IntArrayRef{0}, true);
  const auto all = merged({stacked[0], stacked[1]}, counts, total, {0});
  return {all.mean.squeeze(0), all.squares.squeeze(0), total.squeeze(0)};
}

int64_t count_over(at::IntArrayRef sizes, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    count *= sizes[dim];
  }
  return count;
}

} // namespace shardtensor::detail
