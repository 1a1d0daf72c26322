#include "shardtensor/rules/attention/by_scores.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>

#include "shardtensor/layout/global_rows.h"
#include "shardtensor/rules/attention/merge.h"
#include "shardtensor/rules/attention/shared_heads.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

Tensor in_sum_type(const Tensor& x) {
  return x.to(at::toOpMathType(x.scalar_type()));
}

/// Two dims have no heads.
Tensor for_query_heads(const Tensor& key, const Tensor& query) {
  return key.dim() < 3 ? key : for_heads(key, query.size(-3), key.dim() - 3);
}

Tensor of_key_heads(const Tensor& grad, const Tensor& key) {
  return key.dim() < 3 ? grad
                       : of_shared_heads(grad, key.size(-3), key.dim() - 3);
}

/// (queries, keys), true where the key comes after the query: cut as the scores
/// are, so that no rank makes the others' part.
Tensor later_keys(const Tensor& scores) {
  const auto dims = scores.dim();
  const auto layout = with_dims(
      without_partial(spec(scores)),
      {scores.size(dims - 2), scores.size(dims - 1)},
      {dims - 2, dims - 1});
  const auto own = layout->local_sizes();
  const auto rows = [&](int64_t dim) {
    const auto local = at::arange(own[dim], scores.options().dtype(at::kLong));
    return own[dim] == 0
        ? local
        : global_rows(local, *layout, dim, layout->mesh()->position());
  };
  return from_local(rows(1).gt(rows(0).unsqueeze(1)), layout);
}

} // namespace

Tensor attention_weights(
    const Tensor& query,
    const Tensor& key,
    const Tensor& mask,
    bool causal,
    double scale) {
  auto scores = at::matmul(query, key.mT()) * scale;
  if (mask.defined()) {
    scores = mask.scalar_type() == at::kBool
        ? scores.masked_fill(mask.logical_not(), kUnseen)
        : scores + mask;
  }
  if (causal) {
    scores = scores.masked_fill(later_keys(scores), kUnseen);
  }
  const auto sees_nothing = scores.detach().isneginf().all(-1, true);
  // Before, too: no NaN, which 0 times a gradient would stay.
  return at::softmax(scores.masked_fill(sees_nothing, 0), -1)
      .masked_fill(sees_nothing, 0);
}

Tensor attention_by_scores(
    const AttentionOperands& operands,
    bool causal,
    double scale,
    const AttentionDropout& dropout) {
  const auto weights = attention_weights(
      in_sum_type(operands.query),
      in_sum_type(for_query_heads(operands.key, operands.query)),
      operands.mask,
      causal,
      scale);
  return at::matmul(
             dropout ? weights * kept_in_all(weights, dropout) : weights,
             in_sum_type(for_query_heads(operands.value, operands.query)))
      .to(operands.query.scalar_type());
}

AttentionOperands attention_gradients_by_scores(
    const Tensor& grad,
    const AttentionOperands& operands,
    bool wants_mask,
    bool causal,
    double scale,
    const AttentionDropout& dropout) {
  const auto query = in_sum_type(operands.query);
  const auto key = in_sum_type(for_query_heads(operands.key, operands.query));
  const auto value =
      in_sum_type(for_query_heads(operands.value, operands.query));
  const auto g = in_sum_type(grad);
  const auto weights =
      attention_weights(query, key, operands.mask, causal, scale);
  auto dweights = at::matmul(g, value.mT());
  auto left = weights; // after dropout
  if (dropout) {
    const auto kept = kept_in_all(weights, dropout);
    dweights = dweights * kept;
    left = weights * kept;
  }
  const auto mean = (weights * dweights).sum(-1, /*keepdim=*/true);
  const auto dscores = weights * (dweights - mean);
  const auto dtype = grad.scalar_type();
  const auto of_key = [&](const Tensor& x) {
    return of_key_heads(x, operands.key).to(dtype);
  };
  AttentionOperands result;
  result.query = (at::matmul(dscores, key) * scale).to(dtype);
  result.key = of_key(at::matmul(dscores.mT(), query) * scale);
  result.value = of_key(at::matmul(left.mT(), g));
  if (wants_mask) {
    result.mask = dscores.sum_to_size(operands.mask.sizes())
                      .to(operands.mask.scalar_type());
  }
  return result;
}

} // namespace shardtensor::detail
