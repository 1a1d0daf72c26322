
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/square.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/rules/norm/norm_kernels.h"
#include "shardtensor/rules/norm/normalize.h"
#include "shardtensor/rules/norm/passes.h"
#include "shardtensor/tensor/gradients/saved_inputs_node.h"
#include "shardtensor/tensor/shard_tensor_impl.h"
#include "shardtensor/tensor/terms.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

// ---- groups of channels -----------------------------------------------------

/// Sums over the own channels of each group, if ranks share groups.
Tensor by_group(const Tensor& of_channels, const NormGeometry& geometry) {
  if (!geometry.groups.defined()) {
    return of_channels;
  }
  auto sizes = of_channels.sizes().vec();
  sizes[1] = geometry.statistics->size(1);
  return at::zeros(sizes, of_channels.options())
      .index_add(1, geometry.groups, of_channels);
}

/// What is known of groups, for each own channel.
Tensor by_channel(const Tensor& of_groups, const NormGeometry& geometry) {
  return geometry.groups.defined() ? of_groups.index_select(1, geometry.groups)
                                   : of_groups;
}

/// Whether this rank's statistics are those of all.
bool are_whole(const NormGeometry& geometry) {
  return !geometry.groups.defined() &&
      geometry.statistics->mesh()->ranks(geometry.axes) == 1;
}

/// {mean, squares, counts} of each channel, as those of each group.
Terms merge_channels(const Terms& own, const NormGeometry& geometry) {
  if (!geometry.groups.defined()) {
    return own;
  }
  const auto counts = by_group(own[2], geometry);
  const auto shares = own[2] / by_channel(counts.clamp_min(1), geometry);
  const auto mean = by_group(own[0] * shares, geometry);
  const auto between = (own[0] - by_channel(mean, geometry)).square() * own[2];
  return {mean, by_group(own[1] + between, geometry), counts};
}

// ---- statistics over ranks --------------------------------------------------

/// Of all ranks together.
Moments merge_ranks(
    const Moments& own,
    int64_t count,
    const NormGeometry& geometry) {
  const auto counts = at::full_like(own.mean, at::Scalar(count));
  const auto all = merge_terms(
      merge_channels({own.mean, own.squares, counts}, geometry),
      geometry.statistics,
      geometry.axes,
      merge_stacked_moments);
  return {by_channel(all[0], geometry), by_channel(all[1], geometry)};
}

} // namespace

Moments norm_moments(const Tensor& input, const NormGeometry& geometry) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      input.is_floating_point(),
      current_comm_scope(),
      ": not implemented for '",
      input.scalar_type(),
      "'");
  const at::NoGradGuard no_grad;
  const auto x = input.detach();
  if (!geometry.centered) {
    return {
        Tensor(),
        all_reduce(
            own_squares(x, geometry.dims),
            Reduce::Sum,
            *geometry.statistics->mesh(),
            geometry.axes)};
  }
  const auto own = own_moments(x, geometry.dims);
  const auto count = count_over(x.sizes(), geometry.dims);
  return are_whole(geometry) ? own : merge_ranks(own, count, geometry);
}

// ---- normalization and its gradient -----------------------------------------

namespace {

NormStatistics statistics_of(
    const Moments& moments,
    double eps,
    const NormGeometry& geometry) {
  const at::Scalar count(static_cast<double>(geometry.count));
  return {
      moments.mean,
      have_cuda_kernels(moments.squares)
          ? run_cuda_kernel(kNormScale, {moments.squares}, {count, eps})
          : (moments.squares / count + eps).rsqrt()};
}

/// The same as a differentiable function of x. Communication: two all-reduces.
NormStatistics differentiable_statistics(
    const Tensor& x,
    double eps,
    const NormGeometry& geometry) {
  const at::Scalar count(static_cast<double>(geometry.count));
  const auto total = [&](const Tensor& values) {
    const auto own = by_group(kept_sum(values, geometry.dims), geometry);
    const auto& mesh = *geometry.statistics->mesh();
    return by_channel(
        all_reduce(own, Reduce::Sum, mesh, geometry.axes), geometry);
  };
  const auto x_wide = wide(x);
  if (!geometry.centered) {
    return {Tensor(), (total(at::square(x_wide)) / count + eps).rsqrt()};
  }
  const auto mean = total(x_wide) / count;
  return {mean, (total(at::square(x_wide - mean)) / count + eps).rsqrt()};
}

Tensor centered(const Tensor& x, const NormStatistics& statistics) {
  return statistics.mean.defined() ? wide(x) - statistics.mean : wide(x);
}

/// Sums over all ranks of the gradient, and of the gradient times the
/// normalized value, for each statistic: one message.
std::pair<Tensor, Tensor> total_pair(
    const Tensor& sum,
    const Tensor& product,
    const NormGeometry& geometry) {
  if (are_whole(geometry)) {
    return {geometry.centered ? sum : Tensor(), product};
  }
  const auto& mesh = *geometry.statistics->mesh();
  if (!geometry.centered) {
    return {Tensor(), all_reduce(product, Reduce::Sum, mesh, geometry.axes)};
  }
  const auto own =
      at::stack({by_group(sum, geometry), by_group(product, geometry)});
  const auto total = all_reduce(own, Reduce::Sum, mesh, geometry.axes);
  return {
      by_channel(total.select(0, 0), geometry),
      by_channel(total.select(0, 1), geometry)};
}

struct Gradients {
  Tensor x;
  Tensor weight;
  Tensor bias;
};

struct Wanted {
  bool x;
  bool weight;
  bool bias;
};

/// By differentiable operators, for double backward.
Gradients composed_gradients(
    const Tensor& grad_output,
    const Tensor& x,
    const Tensor& weight,
    const std::vector<int64_t>& bias_sizes,
    const NormStatistics& statistics,
    const Wanted& wanted,
    const NormGeometry& geometry) {
  const auto grad = wide(grad_output);
  const auto normalized = centered(x, statistics) * statistics.rstd;
  Gradients result;
  if (wanted.x) {
    const at::Scalar count(static_cast<double>(geometry.count));
    const auto scaled = weight.defined() ? grad * weight : grad;
    const auto [sum, product] = total_pair(
        kept_sum(scaled, geometry.dims),
        kept_sum(scaled * normalized, geometry.dims),
        geometry);
    auto inner = scaled - normalized * (product / count);
    if (geometry.centered) {
      inner = inner - sum / count;
    }
    result.x = (inner * statistics.rstd).to(x.scalar_type());
  }
  if (wanted.weight) {
    result.weight =
        at::sum_to(grad * normalized, weight.sizes()).to(weight.scalar_type());
  }
  if (wanted.bias) {
    result.bias = at::sum_to(grad, bias_sizes);
  }
  return result;
}

/// Passes go through both tensors in the order in which x lies in memory.
Tensor laid_out_as(const Tensor& x, const Tensor& grad) {
  for (int64_t dim = 0; !is_traced(x) && dim < x.dim(); ++dim) {
    if (x.size(dim) > 1 && x.stride(dim) != grad.stride(dim)) {
      return at::empty_like(x, grad.options()).copy_(grad);
    }
  }
  return grad;
}

/// The same numbers with few passes.
Gradients fused_gradients(
    const Tensor& grad_output,
    const Tensor& x,
    const Tensor& weight,
    const std::vector<int64_t>& bias_sizes,
    const NormStatistics& statistics,
    const Wanted& wanted,
    const NormGeometry& geometry) {
  const auto grad = laid_out_as(x, grad_output);
  const auto sums =
      norm_sums(grad, x, weight, bias_sizes, statistics, geometry);
  Gradients result;
  if (wanted.x) {
    const auto [sum, product] = total_pair(sums.sum, sums.product, geometry);
    result.x = norm_input_gradient(
        grad, x, weight, statistics, sum, product, geometry);
  }
  if (wanted.weight) {
    result.weight =
        at::sum_to(sums.weight, weight.sizes()).to(weight.scalar_type());
  }
  if (wanted.bias) {
    result.bias = at::sum_to(sums.bias, bias_sizes);
  }
  return result;
}

struct NormBackward : SavedInputsNode {
  NormBackward(
      const Tensor& x,
      const Tensor& weight,
      const Tensor& bias,
      const NormStatistics& statistics,
      double eps,
      NormGeometry geometry)
      : SavedInputsNode({x, weight}),
        statistics_(statistics),
        eps_(eps),
        bias_dtype_(bias.defined() ? bias.scalar_type() : at::kFloat),
        geometry_(std::move(geometry)) {
    if (bias.defined()) {
      bias_sizes_ = bias.sizes().vec();
    }
  }
  std::string name() const override {
    return "ShardTensorNormBackward";
  }
  void release() override {
    statistics_ = {};
  }
  variable_list gradients(
      const Tensor& grad,
      const variable_list& inputs,
      bool differentiable) override {
    const auto& [x, weight] = std::tie(inputs[0], inputs[1]);
    const Wanted wanted{wants(0), wants(1), wants(2)};
    const CommScope scope("backward of a norm");
    const auto result = differentiable
        ? composed_gradients(
              grad,
              x,
              weight,
              bias_sizes_,
              differentiable_statistics(x, eps_, geometry_),
              wanted,
              geometry_)
        : fused_gradients(
              grad, x, weight, bias_sizes_, statistics_, wanted, geometry_);
    return {
        result.x,
        result.weight,
        result.bias.defined() ? result.bias.to(bias_dtype_) : result.bias};
  }

  NormStatistics statistics_;
  double eps_;
  std::vector<int64_t> bias_sizes_;
  at::ScalarType bias_dtype_;
  NormGeometry geometry_;
};

} // namespace

Tensor normalize(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const Moments& moments,
    double eps,
    const NormGeometry& geometry) {
  for (const auto& input : {x, weight, bias}) {
    if (input.defined()) {
      check_no_tangent("a norm of a cut dim", input);
    }
  }
  const auto statistics = statistics_of(moments, eps, geometry);
  Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = apply_norm(x, weight, bias, statistics);
  }
  connect<NormBackward>(
      result, {x, weight, bias}, x, weight, bias, statistics, eps, geometry);
  return result;
}

} // namespace shardtensor::detail
