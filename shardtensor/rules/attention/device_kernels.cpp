#include "shardtensor/rules/attention/device_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>

#include "shardtensor/rules/attention/shared_heads.h"

namespace shardtensor::detail {
namespace {

using at::SDPBackend;
using at::Tensor;

/// With more columns, so that their number is a multiple of `multiple`.
Tensor padded(const Tensor& x, int64_t multiple, double value = 0) {
  const int64_t missing = (multiple - x.size(-1) % multiple) % multiple;
  return missing ? at::constant_pad_nd(x, {0, missing}, value) : x;
}

Tensor columns(const Tensor& x, int64_t count) {
  return x.narrow(-1, 0, count);
}

std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

/// The state of a generator, which kernels ask for without dropout, too.
Tensor unused_state(const Tensor& like, int64_t dim, at::ScalarType dtype) {
  return at::empty(std::vector<int64_t>(dim, 2), like.options().dtype(dtype));
}

/// A mask of all scores, whose rows begin where kernels can load them.
Tensor aligned_mask(
    const Tensor& mask,
    const Tensor& query,
    const Tensor& key) {
  if (!mask.defined()) {
    return mask;
  }
  const auto rows = mask.expand({-1, -1, -1, key.size(2)}).contiguous();
  return columns(padded(rows, 8), key.size(2))
      .expand({query.size(0), query.size(1), query.size(2), key.size(2)});
}

// ---- flash ------------------------------------------------------------------

// Its features come in eights.
constexpr int64_t kFeatures = 8;

Attended fused_flash(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [key, value] = keys;
  const auto result = at::_scaled_dot_product_flash_attention(
      padded(query, kFeatures),
      padded(key, kFeatures),
      padded(value, kFeatures),
      /*dropout_p=*/0,
      options.causal,
      /*return_debug_mask=*/false,
      options.scale);
  return {columns(std::get<0>(result), value.size(3)), std::get<1>(result)};
}

AttentionGradients fused_flash_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [query, all, grad] = queries;
  const auto& [key, value] = keys;
  const auto [dquery, dkey, dvalue] =
      at::_scaled_dot_product_flash_attention_backward(
          padded(grad, kFeatures),
          padded(query, kFeatures),
          padded(key, kFeatures),
          padded(value, kFeatures),
          padded(all.output, kFeatures),
          all.log_sum.contiguous(),
          /*cum_seq_q=*/{},
          /*cum_seq_k=*/{},
          query.size(2),
          key.size(2),
          /*dropout_p=*/0,
          options.causal,
          unused_state(query, 1, at::kUInt64),
          unused_state(query, 0, at::kUInt64),
          options.scale);
  return {
      columns(dquery, query.size(3)),
      columns(dkey, key.size(3)),
      columns(dvalue, value.size(3)),
      {}};
}

// ---- memory-efficient -------------------------------------------------------

// Its log-sum-exps come in groups of so many, inf where there is no query.
constexpr int64_t kLogSums = 32;

Attended fused_efficient(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [key, value] = keys;
  const auto result = at::_scaled_dot_product_efficient_attention(
      query,
      for_heads(key, query.size(1)),
      for_heads(value, query.size(1)),
      if_defined(aligned_mask(options.mask, query, key)),
      /*compute_log_sumexp=*/true,
      /*dropout_p=*/0,
      options.causal,
      options.scale);
  return {
      std::get<0>(result),
      columns(std::get<1>(result), query.size(2)).contiguous()};
}

AttentionGradients fused_efficient_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [query, all, grad] = queries;
  const auto& [key, value] = keys;
  const auto result = at::_scaled_dot_product_efficient_attention_backward(
      grad,
      query,
      for_heads(key, query.size(1)),
      for_heads(value, query.size(1)),
      aligned_mask(options.mask, query, key),
      all.output,
      padded(all.log_sum, kLogSums, std::numeric_limits<double>::infinity())
          .contiguous(),
      unused_state(query, 0, at::kLong),
      unused_state(query, 0, at::kLong),
      /*dropout_p=*/0,
      {true, true, true, false},
      options.causal,
      options.scale);
  return {
      std::get<0>(result),
      of_shared_heads(std::get<1>(result), key.size(1)),
      of_shared_heads(std::get<2>(result), value.size(1)),
      {}};
}

// ---- cuDNN ------------------------------------------------------------------

Attended fused_cudnn(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [key, value] = keys;
  const auto result = at::_scaled_dot_product_cudnn_attention(
      query,
      for_heads(key, query.size(1)),
      for_heads(value, query.size(1)),
      if_defined(aligned_mask(options.mask, query, key)),
      /*compute_log_sumexp=*/true,
      /*dropout_p=*/0,
      options.causal,
      /*return_debug_mask=*/false,
      options.scale);
  return {std::get<0>(result), std::get<1>(result).squeeze(-1)};
}

AttentionGradients fused_cudnn_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [query, all, grad] = queries;
  const auto& [key, value] = keys;
  const auto [dquery, dkey, dvalue] =
      at::_scaled_dot_product_cudnn_attention_backward(
          grad,
          query,
          for_heads(key, query.size(1)),
          for_heads(value, query.size(1)),
          all.output,
          all.log_sum.contiguous().unsqueeze(-1),
          unused_state(query, 0, at::kLong),
          unused_state(query, 0, at::kLong),
          aligned_mask(options.mask, query, key),
          /*cum_seq_q=*/{},
          /*cum_seq_k=*/{},
          query.size(2),
          key.size(2),
          /*dropout_p=*/0,
          options.causal,
          options.scale);
  return {
      dquery,
      of_shared_heads(dkey, key.size(1)),
      of_shared_heads(dvalue, value.size(1)),
      {}};
}

// ---- queries without weights ------------------------------------------------

// Note [Queries without weights]
// A block may have no weight for a query: the mask hides all its keys, or their
// scores overflow to -inf. Kernels say 0 as the output then, and as log_sum inf
// (flash, of NaN, too), 0 (memory-efficient) or -inf (cuDNN, which promises no
// output). Merged with other blocks each of them would be a weight. A mask's
// part says which rows it hides; the others are found without asking the host.

// Kernels multiply masks by log2(e), which makes lower ones -inf.
constexpr double kLowestInKernels = -2e38;

void hide(Attended& result, const Tensor& rows) {
  result.log_sum = result.log_sum.masked_fill(rows, kUnseen);
  result.output = result.output.masked_fill(rows.unsqueeze(-1), 0);
}

/// A number on the device: no score of these is -inf, but for the mask.
Tensor has_finite_scores(const Tensor& query, const Tensor& key, double scale) {
  constexpr double kLargest = 1e38;
  const auto largest = [](const Tensor& x) {
    return at::linalg_vector_norm(
        x,
        std::numeric_limits<double>::infinity(),
        std::nullopt,
        /*keepdim=*/false,
        at::kFloat);
  };
  const auto terms = static_cast<double>(query.size(3));
  return largest(query)
      .mul_(largest(key))
      .lt_(kLargest / (terms * std::max(std::abs(scale), 1.)));
}

void mark_unseen(
    SDPBackend kernel,
    Attended& result,
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  auto& [output, log_sum] = result;
  if (kernel == SDPBackend::flash_attention) {
    log_sum = log_sum.masked_fill(log_sum.isposinf(), kUnseen);
  } else if (kernel == SDPBackend::cudnn_attention) {
    hide(result, log_sum.isneginf());
  } else {
    const auto seen =
        output.any(-1)
            .logical_or_(log_sum.ne(0))
            .logical_or_(has_finite_scores(query, keys.key, options.scale));
    log_sum = log_sum.masked_fill(seen.logical_not(), kUnseen);
  }
}

// ---- the choice -------------------------------------------------------------

/// What PyTorch would take for these sizes.
SDPBackend fused_choice(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [key, value] = keys;
  return static_cast<SDPBackend>(at::_fused_sdp_choice(
      query,
      key,
      value,
      if_defined(options.mask),
      /*dropout_p=*/0,
      options.causal,
      options.scale,
      /*enable_gqa=*/key.size(1) != query.size(1)));
}

/// The copies that for_heads makes, without making them.
Tensor as_for_heads(const Tensor& key, int64_t heads) {
  return key.narrow(1, 0, 1).expand({-1, heads, -1, -1});
}

} // namespace

SDPBackend choose_kernel(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options,
    bool for_backward) {
  if (query.is_cpu()) {
    return SDPBackend::math;
  }
  auto asking = query.detach(); // some kernels have no backward of wide heads
  asking.set_requires_grad(for_backward);
  const int64_t heads = query.size(1);
  auto choice = fused_choice(asking, keys, options);
  if (choice != SDPBackend::flash_attention && keys.key.size(1) != heads) {
    // Flash alone takes shared heads as they are.
    choice = fused_choice(
        asking,
        {as_for_heads(keys.key, heads), as_for_heads(keys.value, heads)},
        options);
  }
  const bool is_known = choice == SDPBackend::flash_attention ||
      choice == SDPBackend::efficient_attention ||
      choice == SDPBackend::cudnn_attention;
  return is_known ? choice : SDPBackend::math;
}

Attended attend_with(
    SDPBackend kernel,
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto attend_fused = kernel == SDPBackend::flash_attention ? fused_flash
      : kernel == SDPBackend::cudnn_attention                     ? fused_cudnn
                                              : fused_efficient;
  auto result = attend_fused(query, keys, options);
  if (options.mask.defined()) {
    hide(result, options.mask.le(kLowestInKernels).all(-1));
  }
  if (!options.all_keys) {
    mark_unseen(kernel, result, query, keys, options);
  }
  return result;
}

AttentionGradients attend_backward_with(
    SDPBackend kernel,
    const AttendedQueries& queries,
    const Keys& keys,
    const BlockOptions& options) {
  const auto backward = kernel == SDPBackend::flash_attention
      ? fused_flash_backward
      : kernel == SDPBackend::cudnn_attention ? fused_cudnn_backward
                                              : fused_efficient_backward;
  return backward(queries, keys, options);
}

} // namespace shardtensor::detail
