#include <cmath>

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/rules/attention/attention.h"
#include "shardtensor/rules/attention/shared_heads.h"
#include "shardtensor/tensor/order_in_memory.h"
#include "shardtensor/tensor/random.h"

// scaled_dot_product_attention as a whole, at the function level: below, it is
// several operators that hold all scores, or one that needs all rows.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kOp = "aten::scaled_dot_product_attention";

/// PyTorch's own decomposition, and its errors.
Tensor below(
    c10::DispatchKeySet keys,
    const AttentionOperands& operands,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool enable_gqa) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kOp, "");
  torch::jit::Stack stack{
      operands.query,
      operands.key,
      operands.value,
      operands.mask.defined() ? OptionalTensor(operands.mask) : std::nullopt,
      dropout,
      causal,
      scale,
      enable_gqa};
  run_below_function_level(op, keys, &stack);
  return stack.back().toTensor();
}

// ---- what this rule takes ---------------------------------------------------

/// Extents of batch dims, or of a mask, that meet by broadcasting.
bool meets(int64_t a, int64_t b) {
  return a == b || a == 1 || b == 1;
}

bool is_float(const Tensor& x) {
  const auto type = x.scalar_type();
  return type == at::kFloat || type == at::kDouble || type == at::kHalf ||
      type == at::kBFloat16;
}

bool takes_tensors(const AttentionOperands& operands) {
  const auto& [query, key, value, mask] = operands;
  const int64_t dims = query.dim();
  return dims >= 2 && key.dim() == dims && value.dim() == dims &&
      is_float(query) && key.scalar_type() == query.scalar_type() &&
      value.scalar_type() == query.scalar_type() &&
      query.device() == key.device() && query.device() == value.device() &&
      query.size(-1) == key.size(-1) && key.size(-2) == value.size(-2) &&
      query.size(-1) > 0 && value.size(-1) > 0;
}

bool takes_batches(const AttentionOperands& operands, bool enable_gqa) {
  const auto& [query, key, value, mask] = operands;
  const int64_t dims = query.dim();
  if (enable_gqa && dims < 3) {
    return false;
  }
  for (int64_t dim = 0; dim < dims - 2; ++dim) {
    if (enable_gqa && dim == dims - 3) {
      const bool groups = key.size(dim) > 0 &&
          key.size(dim) == value.size(dim) &&
          query.size(dim) % key.size(dim) == 0;
      if (!groups) {
        return false;
      }
    } else if (
        !meets(query.size(dim), key.size(dim)) ||
        !meets(query.size(dim), value.size(dim)) ||
        !meets(key.size(dim), value.size(dim))) {
      return false;
    }
  }
  return true;
}

/// Numbers of one device have no blocks: the scores are made then.
bool takes_dropout(double probability) {
  return probability == 0 ||
      (probability > 0 && probability < 1 &&
       random_policy() == RandomPolicy::Counter);
}

/// The mask is of PyTorch's types and dims and doesn't make the scores larger.
bool takes_mask(const AttentionOperands& operands, bool causal) {
  const auto& [query, key, value, mask] = operands;
  if (!mask.defined()) {
    return true;
  }
  const auto type = mask.scalar_type();
  const bool fits_type =
      type == at::kBool || type == at::kFloat || type == query.scalar_type();
  if (causal || !fits_type || mask.dim() < 2 || mask.dim() > query.dim() ||
      mask.device() != query.device()) {
    return false;
  }
  auto sizes = query.sizes().vec();
  for (size_t dim = 0; dim + 2 < sizes.size(); ++dim) {
    sizes[dim] = std::max(sizes[dim], key.size(dim));
  }
  sizes.back() = key.size(-2);
  return at::is_expandable_to(mask.sizes(), sizes);
}

/// As PyTorch's kernel of the CPU leaves the output: dims in the order of the
/// query's memory. What it doesn't take has contiguous outputs.
std::vector<int64_t> output_strides(
    const AttentionOperands& operands,
    double dropout,
    bool enable_gqa) {
  const auto& [query, key, value, mask] = operands;
  const int64_t equal = enable_gqa ? 1 : 2; // batch and heads
  const auto fits = [&, &query = query](const Tensor& x) {
    return x.size(-2) > 0 && (x.stride(-1) == 1 || x.size(-1) == 1) &&
        x.sizes().slice(0, equal) == query.sizes().slice(0, equal);
  };
  const bool by_kernel = query.dim() == 4 && dropout == 0 &&
      at::globalContext().userEnabledFlashSDP() &&
      query.size(-1) == value.size(-1) && fits(query) && fits(key) &&
      fits(value);
  const bool with_mask = !mask.defined() ||
      (!mask.requires_grad() && mask.dim() != 3 &&
       (mask.stride(-1) == 1 || mask.size(-1) == 1));
  return by_kernel && with_mask ? order_in_memory(query)
                                : std::vector<int64_t>();
}

// ---- the operands -----------------------------------------------------------

/// All batch dims of the same extents, but for the heads of groups.
void expand_batches(AttentionOperands& operands, bool enable_gqa) {
  auto& [query, key, value, mask] = operands;
  const int64_t dims = query.dim();
  const auto expanded =
      [&, &query = query, &key = key, &value = value](const Tensor& x) {
        auto sizes = x.sizes().vec();
        for (int64_t dim = 0; dim < dims - (enable_gqa ? 3 : 2); ++dim) {
          const auto other = query.size(dim) == 1
              ? (key.size(dim) == 1 ? value.size(dim) : key.size(dim))
              : query.size(dim);
          sizes[dim] = other;
        }
        return x.sizes() == sizes ? x : x.expand(sizes);
      };
  const auto q = expanded(query);
  const auto k = expanded(key);
  value = expanded(value);
  query = q;
  key = k;
  while (mask.defined() && mask.dim() < dims) {
    mask = mask.unsqueeze(0);
  }
}

std::shared_ptr<const AttentionLayouts> find_layouts(
    const AttentionOperands& operands,
    bool causal) {
  static PlanCache<AttentionLayouts> cache;
  const auto mask = operands.mask.defined() ? spec(operands.mask) : nullptr;
  const auto transport = attention_transport();
  PlanKey key;
  key.add(spec(operands.query)).add(spec(operands.key));
  key.add(spec(operands.value));
  if (mask) {
    key.add(mask);
  }
  const auto bytes = static_cast<int64_t>(operands.query.element_size());
  key.add(static_cast<int64_t>(causal)).add(static_cast<int64_t>(transport));
  key.add(bytes);
  return cache.find(key, [&] {
    return plan_attention(
        spec(operands.query),
        spec(operands.key),
        spec(operands.value),
        mask,
        causal,
        bytes,
        transport);
  });
}

Tensor sharded(
    AttentionOperands operands,
    bool causal,
    double scale,
    double dropout,
    at::IntArrayRef strides) {
  auto layouts = find_layouts(operands, causal);
  if (layouts->splits_groups) {
    const int64_t dim = operands.query.dim() - 3;
    const int64_t heads = operands.query.size(dim);
    operands.key = for_heads(operands.key, heads, dim);
    operands.value = for_heads(operands.value, heads, dim);
    layouts = find_layouts(operands, causal);
  }
  operands.query = redistribute(operands.query, layouts->query);
  operands.key = redistribute(operands.key, layouts->key);
  operands.value = redistribute(operands.value, layouts->value);
  if (operands.mask.defined()) {
    operands.mask = redistribute(operands.mask, layouts->mask);
  }
  return redistribute(
      attention(operands, layouts, scale, dropout, strides), layouts->result);
}

Tensor scaled_dot_product_attention_function(
    c10::DispatchKeySet keys,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OptionalTensor& maybe_mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool enable_gqa) {
  AttentionOperands operands{
      autocast_to_lower_precision(query),
      autocast_to_lower_precision(key),
      autocast_to_lower_precision(value),
      autocast_to_lower_precision(value_or_undefined(maybe_mask))};
  if (!takes_dropout(dropout) || !takes_tensors(operands) ||
      !takes_batches(operands, enable_gqa) || !takes_mask(operands, causal)) {
    return below(
        keys,
        {query, key, value, value_or_undefined(maybe_mask)},
        dropout,
        causal,
        scale,
        enable_gqa);
  }
  const auto mesh = common_mesh(kOp, {query, key, value, operands.mask});
  for (auto* x :
       {&operands.query, &operands.key, &operands.value, &operands.mask}) {
    if (x->defined()) {
      *x = promote_operand(*x, mesh, kOp);
      keep_gradient_layout(*x);
    }
  }
  const auto strides = output_strides(operands, dropout, enable_gqa);
  expand_batches(operands, enable_gqa);
  const auto features = static_cast<double>(query.size(-1));
  return sharded(
      operands,
      causal,
      scale ? *scale : 1 / std::sqrt(features),
      dropout,
      strides);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "scaled_dot_product_attention",
      function_rule<
          at::_ops::scaled_dot_product_attention,
          scaled_dot_product_attention_function>);
}

} // namespace shardtensor::detail
