#include "shardtensor/rules/attention/hidden_rows.h"

#include <cmath>
#include <limits>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

namespace shardtensor::detail {
namespace {

using at::Tensor;

constexpr double kNone = std::numeric_limits<double>::infinity();

/// Next to larger numbers what is below 2 rounds away.
double largest_resolved(at::ScalarType type) {
  const int digits = at::toOpMathType(type) == at::kDouble
      ? std::numeric_limits<double>::digits
      : std::numeric_limits<float>::digits;
  return std::ldexp(1.0, digits + 2);
}

bool holds_large_numbers(const Tensor& mask) {
  return mask.is_floating_point() && mask.scalar_type() != at::kHalf;
}

/// Without the column.
Tensor is_hidden(const Tensor& hidden) {
  return hidden.ne(kNone).squeeze(-1);
}

} // namespace

Tensor hidden_rows(const Tensor& mask, at::ScalarType type) {
  if (!mask.defined() || !holds_large_numbers(mask) || mask.numel() == 0) {
    return {};
  }
  const auto largest = mask.amax(-1, /*keepdim=*/true);
  const auto rows =
      largest.lt(-largest_resolved(type)).logical_and_(largest.isfinite());
  if (mask.is_cpu() && !rows.any().item<bool>()) {
    return {};
  }
  return largest.masked_fill(rows.logical_not(), kNone);
}

Tensor with_weights(
    const Tensor& log_sum,
    const Tensor& mask,
    const Tensor& hidden,
    int64_t keys) {
  const auto counts =
      mask.eq(hidden).sum(-1).mul_(mask.size(-1) == keys ? 1 : keys);
  return at::where(
      is_hidden(hidden), counts.to(log_sum.scalar_type()).log_(), log_sum);
}

std::tuple<Tensor, Tensor> for_backward(
    const Tensor& grad,
    const Tensor& log_sum,
    const Tensor& hidden) {
  const auto rows = is_hidden(hidden);
  const auto share = at::where(rows, log_sum.neg().exp_(), 1).unsqueeze(-1);
  return {
      (grad * share).to(grad.scalar_type()),
      at::where(rows, hidden.squeeze(-1).to(log_sum.scalar_type()), log_sum)};
}

} // namespace shardtensor::detail
