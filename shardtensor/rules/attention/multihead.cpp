#include <cmath>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_native_multi_head_attention_ops.h>
#include <ATen/ops/_nested_tensor_from_mask_left_aligned_ops.h>
#include <ATen/ops/_transformer_encoder_layer_fwd_ops.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/attention/by_scores.h"

// What nn.MultiheadAttention and nn.TransformerEncoderLayer call in eval mode
// without grad: one operator for all, here written with those that have rules.
// And what nn.TransformerEncoder asks about padding then.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// As these operators have it: true where a query does not see a key, of
/// queries and keys, of batches and keys, or of all four.
Tensor seen_of(const OptionalTensor& mask, std::optional<int64_t> mask_type) {
  constexpr int64_t kPadding = 1;
  if (!mask || !mask->defined()) {
    return {};
  }
  const auto seen = mask->to(at::kBool).logical_not();
  return mask_type == kPadding ? seen.unsqueeze(1).unsqueeze(1) : seen;
}

/// (batch, rows, features) as (batch, heads, rows, features of a head).
Tensor split_heads(const Tensor& x, int64_t heads) {
  return x.unflatten(2, {heads, x.size(2) / heads}).transpose(1, 2);
}

struct Projected {
  Tensor query;
  Tensor key;
  Tensor value;
};

Projected project(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    int64_t heads,
    const Tensor& weight,
    const Tensor& bias) {
  const auto weights = weight.chunk(3);
  const auto biases = bias.chunk(3);
  const auto one = [&](const Tensor& x, int64_t i) {
    return split_heads(at::linear(x, weights[i], biases[i]), heads);
  };
  return {one(query, 0), one(key, 1), one(value, 2)};
}

std::tuple<Tensor, Tensor> native_multi_head_attention_function(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    int64_t embed_dim,
    int64_t heads,
    const Tensor& qkv_weight,
    const Tensor& qkv_bias,
    const Tensor& proj_weight,
    const Tensor& proj_bias,
    const OptionalTensor& mask,
    bool need_weights,
    bool average_weights,
    std::optional<int64_t> mask_type) {
  const auto [q, k, v] =
      project(query, key, value, heads, qkv_weight, qkv_bias);
  const auto seen = seen_of(mask, mask_type);
  const auto optional = seen.defined() ? OptionalTensor(seen) : std::nullopt;
  Tensor output;
  Tensor weights;
  if (need_weights) {
    const double features = static_cast<double>(embed_dim) / heads;
    weights = attention_weights(q, k, seen, false, 1 / std::sqrt(features));
    output = at::matmul(weights, v);
    weights = average_weights ? weights.mean(1) : weights;
  } else {
    output = at::scaled_dot_product_attention(q, k, v, optional);
  }
  return {
      at::linear(output.transpose(1, 2).flatten(2), proj_weight, proj_bias),
      weights};
}

Tensor transformer_encoder_layer_function(
    const Tensor& src,
    int64_t embed_dim,
    int64_t heads,
    const Tensor& qkv_weight,
    const Tensor& qkv_bias,
    const Tensor& proj_weight,
    const Tensor& proj_bias,
    bool use_gelu,
    bool norm_first,
    double eps,
    const Tensor& norm_weight_1,
    const Tensor& norm_bias_1,
    const Tensor& norm_weight_2,
    const Tensor& norm_bias_2,
    const Tensor& ffn_weight_1,
    const Tensor& ffn_bias_1,
    const Tensor& ffn_weight_2,
    const Tensor& ffn_bias_2,
    const OptionalTensor& mask,
    std::optional<int64_t> mask_type) {
  const auto norm_1 = [&](const Tensor& x) {
    return at::layer_norm(x, {embed_dim}, norm_weight_1, norm_bias_1, eps);
  };
  const auto norm_2 = [&](const Tensor& x) {
    return at::layer_norm(x, {embed_dim}, norm_weight_2, norm_bias_2, eps);
  };
  const auto attend_to_self = [&](const Tensor& x) {
    return std::get<0>(native_multi_head_attention_function(
        x,
        x,
        x,
        embed_dim,
        heads,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        mask,
        /*need_weights=*/false,
        /*average_weights=*/true,
        mask_type));
  };
  const auto feed_forward = [&](const Tensor& x) {
    const auto hidden = at::linear(x, ffn_weight_1, ffn_bias_1);
    return at::linear(
        use_gelu ? at::gelu(hidden) : at::relu(hidden),
        ffn_weight_2,
        ffn_bias_2);
  };
  if (norm_first) {
    const auto x = src + attend_to_self(norm_1(src));
    return x + feed_forward(norm_2(x));
  }
  const auto x = norm_1(src + attend_to_self(src));
  return norm_2(x + feed_forward(x));
}

/// Whether no row that is seen stands behind one that is padding.
bool left_aligned_function(
    c10::DispatchKeySet keys,
    const Tensor& src,
    const Tensor& seen) {
  const bool fits = src.dim() == 3 && seen.scalar_type() == at::kBool &&
      seen.sizes() == src.sizes().slice(0, 2);
  if (!fits || seen.size(1) == 0) {
    return without_rule<at::_ops::_nested_tensor_from_mask_left_aligned>(
        keys, src, seen);
  }
  const int64_t others = seen.size(1) - 1;
  const auto is_behind = seen.narrow(1, 0, others)
                             .logical_not()
                             .logical_and(seen.narrow(1, 1, others));
  return !is_behind.any().item<bool>();
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "_native_multi_head_attention",
      function_rule<
          at::_ops::_native_multi_head_attention,
          native_multi_head_attention_function>);
  m.impl(
      "_transformer_encoder_layer_fwd",
      function_rule<
          at::_ops::_transformer_encoder_layer_fwd,
          transformer_encoder_layer_function>);
  m.impl(
      "_nested_tensor_from_mask_left_aligned",
      function_rule<
          at::_ops::_nested_tensor_from_mask_left_aligned,
          left_aligned_function>);
}

} // namespace shardtensor::detail
