#include <array>

#include <ATen/AccumulateType.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_batch_norm_with_update_ops.h>
#include <ATen/ops/_native_batch_norm_legit_ops.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cudnn_batch_norm_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <ATen/ops/native_group_norm_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/norm/arguments.h"

// What group_norm, layer_norm and batch_norm are made of on one device, called
// directly: the norm, and the statistics it was made with. Those come from the
// reduction of the same name, which merges ranks as the norms do.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using NormAndStatistics = std::tuple<Tensor, Tensor, Tensor>;

at::ScalarType type_beside(const Tensor& x, const OptionalTensor& weight) {
  const auto given = value_or_undefined(weight);
  return given.defined() ? given.scalar_type() : x.scalar_type();
}

/// The same where CUDA's kernels, but for groups, keep wide statistics.
at::ScalarType wide_on_cuda(const Tensor& x, const OptionalTensor& weight) {
  return x.is_cuda() ? at::toAccumulateType(x.scalar_type(), /*is_cuda=*/true)
                     : type_beside(x, weight);
}

/// Mean and reciprocal deviation of x over `dims`, whatever autocast makes of
/// what they are computed by.
std::pair<Tensor, Tensor> statistics(
    const Tensor& x,
    at::ScalarType type,
    const std::vector<int64_t>& dims,
    bool keepdim,
    double eps) {
  const auto [var, mean] =
      at::var_mean(x.to(type), dims, /*correction=*/at::Scalar(0), keepdim);
  return {mean, (var + eps).rsqrt().to(type)};
}

NormAndStatistics native_group_norm_function(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    int64_t samples,
    int64_t channels,
    int64_t extent,
    int64_t groups,
    double eps) {
  const auto x = norm_input("aten::native_group_norm", input, {weight, bias});
  const auto result = at::group_norm(x, groups, weight, bias, eps);
  const auto [mean, rstd] = statistics(
      x.reshape({samples, groups, channels / groups * extent}),
      type_beside(x, weight),
      {2},
      false,
      eps);
  return {result.to(input.scalar_type()), mean, rstd};
}

// The other two have statistics without a derivative.

NormAndStatistics native_layer_norm_function(
    const Tensor& input,
    at::IntArrayRef normalized_shape,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    double eps) {
  constexpr auto op = "aten::native_layer_norm";
  const auto x = norm_input(op, input, {weight, bias});
  const auto result = at::layer_norm(x, normalized_shape, weight, bias, eps);
  const auto covered = static_cast<int64_t>(normalized_shape.size());
  const auto type =
      autocast_widens(op, input) ? x.scalar_type() : wide_on_cuda(x, weight);
  const auto [mean, rstd] = statistics(
      x.detach(), type, dims_from(x.dim() - covered, x.dim()), true, eps);
  return {result.to(x.scalar_type()), mean.detach(), rstd.detach()};
}

/// Over the samples that share a weight, in its type.
Tensor sum_of_rows(const Tensor& x, int64_t rows, const OptionalTensor& like) {
  return (rows == 0 ? x : x.sum(dims_from(0, rows))).to(like->scalar_type());
}

bool is_given(const OptionalTensor& tensor) {
  return tensor && tensor->defined();
}

/// What a DTensor calls: Note [Function level left out]. The rule of layer_norm
/// has a backward of its own.
NormAndStatistics native_layer_norm_backward_kernel(
    const Tensor& grad,
    const Tensor& input,
    c10::SymIntArrayRef normalized_shape,
    const Tensor& mean,
    const Tensor& rstd,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    std::array<bool, 3> wanted) {
  const CommScope scope("aten::native_layer_norm_backward");
  const auto type = at::toOpMathType(input.scalar_type());
  const auto rows = input.dim() - static_cast<int64_t>(normalized_shape.size());
  const auto g = grad.to(type);
  const auto x = (input.to(type) - mean) * rstd;
  NormAndStatistics result;
  if (wanted[0]) {
    const auto dims = dims_from(rows, input.dim());
    const auto scaled = is_given(weight) ? g * *weight : g;
    const auto centred =
        scaled - scaled.mean(dims, true) - x * (scaled * x).mean(dims, true);
    std::get<0>(result) = (centred * rstd).to(input.scalar_type());
  }
  if (wanted[1] && is_given(weight)) {
    std::get<1>(result) = sum_of_rows(g * x, rows, weight);
  }
  if (wanted[2] && is_given(bias)) {
    std::get<2>(result) = sum_of_rows(g, rows, bias);
  }
  return result;
}

/// What PyTorch gives instead of something that nobody will need.
Tensor nothing_like(const Tensor& x, at::ScalarType type) {
  const auto options = to_local(x.detach()).options().dtype(type);
  return promote(at::empty({0}, options), spec(x)->mesh());
}

NormAndStatistics native_batch_norm_function(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    bool training,
    double momentum,
    double eps) {
  const auto x = norm_input(
      "aten::native_batch_norm",
      input,
      {weight, bias, running_mean, running_var});
  const auto result = at::batch_norm(
      x,
      weight,
      bias,
      running_mean,
      running_var,
      training,
      momentum,
      eps,
      /*cudnn_enabled=*/false);
  const auto output = result.to(input.scalar_type());
  if (!training && x.is_cuda()) { // whose kernel says what it took
    const auto type = at::toOpMathType(x.scalar_type());
    const auto rstd = (running_var->to(type) + eps).rsqrt();
    const auto mean = running_mean->to(type, false, /*copy=*/true);
    return {
        output,
        promote(mean.detach(), spec(x)->mesh()),
        promote(rstd.detach(), spec(x)->mesh())};
  }
  if (!training) {
    const auto type = x.scalar_type();
    return {output, nothing_like(x, type), nothing_like(x, type)};
  }
  auto dims = dims_from(1, x.dim());
  dims[0] = 0;
  const auto [mean, rstd] =
      statistics(x.detach(), wide_on_cuda(x, weight), dims, false, eps);
  return {output, mean.detach(), rstd.detach()};
}

// The same under the names that torch.export gives it, which say what is
// written.

NormAndStatistics native_batch_norm_legit_function(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    Tensor& running_mean,
    Tensor& running_var,
    bool training,
    double momentum,
    double eps) {
  return native_batch_norm_function(
      input, weight, bias, running_mean, running_var, training, momentum, eps);
}

NormAndStatistics batch_norm_without_running_function(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    bool training,
    double momentum,
    double eps) {
  return native_batch_norm_function(
      input, weight, bias, {}, {}, training, momentum, eps);
}

/// The last one is what a backward of cuDNN's would want.
using WithReserve = std::tuple<Tensor, Tensor, Tensor, Tensor>;

WithReserve batch_norm_with_update_function(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    Tensor& running_mean,
    Tensor& running_var,
    double momentum,
    double eps) {
  const auto [output, mean, rstd] = native_batch_norm_function(
      input, weight, bias, running_mean, running_var, true, momentum, eps);
  return {output, mean, rstd, nothing_like(output, at::kByte)};
}

/// What torch.func meets in a batch_norm on a GPU.
WithReserve cudnn_batch_norm_function(
    const Tensor& input,
    const Tensor& weight,
    const OptionalTensor& bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    bool training,
    double momentum,
    double eps) {
  const auto [output, mean, rstd] = native_batch_norm_function(
      input, weight, bias, running_mean, running_var, training, momentum, eps);
  const auto kept = [&](const Tensor& statistic) {
    return training ? statistic : nothing_like(output, statistic.scalar_type());
  };
  return {output, kept(mean), kept(rstd), nothing_like(output, at::kByte)};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "native_group_norm",
      function_rule<at::_ops::native_group_norm, native_group_norm_function>);
  m.impl(
      "native_layer_norm",
      function_rule<at::_ops::native_layer_norm, native_layer_norm_function>);
  m.impl(
      "native_batch_norm",
      function_rule<at::_ops::native_batch_norm, native_batch_norm_function>);
  m.impl(
      "_native_batch_norm_legit",
      function_rule<
          at::_ops::_native_batch_norm_legit,
          native_batch_norm_legit_function>);
  m.impl(
      "_native_batch_norm_legit.no_stats",
      function_rule<
          at::_ops::_native_batch_norm_legit_no_stats,
          batch_norm_without_running_function>);
  m.impl(
      "_batch_norm_with_update",
      function_rule<
          at::_ops::_batch_norm_with_update,
          batch_norm_with_update_function>);
  m.impl(
      "cudnn_batch_norm",
      function_rule<at::_ops::cudnn_batch_norm, cudnn_batch_norm_function>);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("native_layer_norm_backward", native_layer_norm_backward_kernel);
}

} // namespace shardtensor::detail
