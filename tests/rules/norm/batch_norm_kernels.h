#pragma once

#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/var.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

// What PyTorch's CUDA kernels for a batch norm over processes compute, with
// what they expect of their arguments, in operators of any device: for tests
// where there is no GPU (aten/src/ATen/native/cuda/Normalization.cu, .cuh).

namespace batch_norm_kernels {

using at::Tensor;

inline at::ScalarType statistics_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// The kernels take (N, C, L), and (N, C) as channels last.
inline void check_input(const Tensor& x) {
  TORCH_CHECK(
      (x.dim() == 2 || x.dim() == 3) && x.is_contiguous() && x.numel() > 0,
      "batch norm kernel: input of sizes ",
      x.sizes(),
      " and strides ",
      x.strides());
}

/// One number a channel, to broadcast with x.
inline Tensor per_channel(const Tensor& tensor, const Tensor& x) {
  TORCH_CHECK(
      tensor.dim() == 1 && tensor.size(0) == x.size(1) &&
          tensor.is_contiguous() && tensor.device() == x.device() &&
          tensor.scalar_type() == statistics_type(x),
      "batch norm kernel: ",
      tensor.options(),
      " numbers of sizes ",
      tensor.sizes(),
      " for an input of sizes ",
      x.sizes());
  return x.dim() == 3 ? tensor.unsqueeze(1) : tensor;
}

inline std::vector<int64_t> all_but_channels(const Tensor& x) {
  return x.dim() == 3 ? std::vector<int64_t>{0, 2} : std::vector<int64_t>{0};
}

inline std::tuple<Tensor, Tensor> update_stats(
    const Tensor& x,
    const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var,
    double) {
  check_input(x);
  TORCH_CHECK(!running_mean && !running_var, "batch norm kernel: running");
  const auto wide = x.to(statistics_type(x));
  const auto dims = all_but_channels(x);
  return {
      at::mean(wide, dims),
      at::var(wide, dims, /*correction=*/at::Scalar(0), /*keepdim=*/false)};
}

inline Tensor elemt(
    const Tensor& x,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const Tensor& mean,
    const Tensor& invstd,
    double) {
  check_input(x);
  auto result = (x - per_channel(mean, x)) * per_channel(invstd, x);
  result = weight ? result * per_channel(*weight, x) : result;
  result = bias ? result + per_channel(*bias, x) : result;
  return result.to(x.scalar_type());
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    bool input_g,
    bool weight_g,
    bool bias_g) {
  check_input(x);
  check_input(grad);
  TORCH_CHECK(
      grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() &&
          !weight && input_g && !weight_g && !bias_g,
      "batch norm kernel: gradients of other kinds");
  per_channel(invstd, x);
  const auto wide = grad.to(statistics_type(x));
  const auto dims = all_but_channels(x);
  return {
      at::sum(wide, dims),
      at::sum(wide * (x - per_channel(mean, x)), dims),
      Tensor(),
      Tensor()};
}

inline Tensor backward_elemt(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const Tensor& sum_dy,
    const Tensor& sum_dy_xmu,
    const Tensor& count) {
  check_input(x);
  check_input(grad);
  TORCH_CHECK(
      grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() &&
          count.scalar_type() == at::kInt && count.device() == x.device(),
      "batch norm kernel: gradients of other kinds");
  const auto norm_fct = at::sum(count).to(statistics_type(x)).reciprocal();
  const auto std = per_channel(invstd, x);
  const auto shift = per_channel(sum_dy, x) * norm_fct;
  const auto slope = std * std * per_channel(sum_dy_xmu, x) * norm_fct;
  const auto factor = weight ? per_channel(*weight, x) * std : std;
  const auto result =
      (grad - shift - (x - per_channel(mean, x)) * slope) * factor;
  return result.to(x.scalar_type());
}

inline void define(torch::Library& library) {
  library.impl("batch_norm_update_stats", update_stats);
  library.impl("batch_norm_elemt", elemt);
  library.impl("batch_norm_backward_reduce", backward_reduce);
  library.impl("batch_norm_backward_elemt", backward_elemt);
}

} // namespace batch_norm_kernels
