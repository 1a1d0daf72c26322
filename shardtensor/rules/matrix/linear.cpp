#include <ATen/ops/linear.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"

// x @ weight^T + bias where every row is whole: rows are independent, so the
// plain operator runs on the shard, and forward and backward communicate
// nothing but the gradients of the weights. Where features are sharded, the
// operators that linear decomposes into have rules.

namespace shardtensor::detail {
namespace {

using at::Tensor;

bool is_whole(const Tensor& weight) {
  return !is_shard_tensor(weight) || spec(weight)->is_replicated();
}

bool has_whole_rows(
    const Tensor& input,
    const Tensor& weight,
    const Tensor& bias) {
  // Of integers kernels refuse some, but not without rows.
  if (!is_shard_tensor(input) || !is_whole(weight) || !is_whole(bias) ||
      at::isIntegralType(input.scalar_type(), /*includeBool=*/true) ||
      weight.dim() != 2 ||
      (bias.defined() && bias.sizes() != weight.sizes().slice(0, 1))) {
    return false;
  }
  const auto& x = spec(input);
  return x->dim() > 0 && !x->has_partial() && !x->is_sharded(x->dim() - 1) &&
      x->size(x->dim() - 1) == weight.size(1);
}

Tensor linear_function(
    c10::DispatchKeySet keys,
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& maybe_bias) {
  const auto bias = value_or_undefined(maybe_bias);
  if (promotion_mode() != TensorPromotionMode::Silent ||
      !has_whole_rows(input, weight, bias)) {
    // linear's own decomposition, whose operators have rules.
    return without_rule<at::_ops::linear>(keys, input, weight, maybe_bias);
  }
  const auto& x = spec(input);
  const auto weights =
      shared_weights({weight, bias}, x->mesh(), x->sharded_axes());
  const auto local = at::linear(to_local(input), weights[0], weights[1]);
  auto sizes = x->sizes();
  sizes.back() = weight.size(0);
  return from_local(local, with_sizes(x, std::move(sizes)));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("linear", function_rule<at::_ops::linear, linear_function>);
}

} // namespace shardtensor::detail
