#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/all.h>
#include <ATen/ops/any.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/rule.h"
#include "shardtensor/rules/reduce/moments.h"
#include "shardtensor/rules/reduce/reduction.h"
#include "shardtensor/tensor/shard_tensor.h"

// Reductions that are not linear: each rank reduces its shard, the terms are
// gathered (they are small) and reduced once more by the same ATen operator,
// so that NaN, ties and dtypes are PyTorch's. ATen's derivative formulas run
// above.

namespace shardtensor {
namespace {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// ---- logical, product, counts -----------------------------------------------

at::Tensor logical_kernel(
    const char* op,
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    bool keepdim,
    bool all) {
  const Reduction reduction(op, self, dim, keepdim);
  const auto reduce =
      [&](const at::Tensor& tensor, at::OptionalIntArrayRef dims, bool keep) {
        return tensor.dim() == 0 ? tensor.clone()
            : all                ? at::all(tensor, dims, keep)
                                 : at::any(tensor, dims, keep);
      };
  auto local = reduction.local;
  if (local.scalar_type() != at::kByte) {
    local = local.ne(0); // PyTorch keeps uint8 as it is
  }
  const auto term = reduce(local, reduction.dims, keepdim);
  return wrap(
      reduction.axes.empty()
          ? term
          : reduce(reduction.gathered(term), at::IntArrayRef{0}, false),
      reduction.result);
}

at::Tensor any_kernel(const at::Tensor& self) {
  return logical_kernel("any", self, {}, false, false);
}
at::Tensor any_dim_kernel(const at::Tensor& self, int64_t dim, bool keepdim) {
  return logical_kernel("any", self, at::IntArrayRef(&dim, 1), keepdim, false);
}
at::Tensor any_dims_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    bool keepdim) {
  return logical_kernel("any", self, dim, keepdim, false);
}
at::Tensor all_kernel(const at::Tensor& self) {
  return logical_kernel("all", self, {}, false, true);
}
at::Tensor all_dim_kernel(const at::Tensor& self, int64_t dim, bool keepdim) {
  return logical_kernel("all", self, at::IntArrayRef(&dim, 1), keepdim, true);
}
at::Tensor all_dims_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    bool keepdim) {
  return logical_kernel("all", self, dim, keepdim, true);
}

at::Tensor prod_kernel(
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype) {
  const Reduction reduction("prod", self, {}, false);
  const auto term = at::prod(reduction.local, dtype);
  return wrap(at::prod(reduction.gathered(term), 0, false), reduction.result);
}

at::Tensor prod_dim_kernel(
    const at::Tensor& self,
    int64_t dim,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  const Reduction reduction("prod", self, at::IntArrayRef(&dim, 1), keepdim);
  const auto term = at::prod(reduction.local, dim, keepdim, dtype);
  return wrap(at::prod(reduction.gathered(term), 0, false), reduction.result);
}

at::Tensor count_nonzero_kernel(const at::Tensor& self, at::IntArrayRef dim) {
  const Reduction reduction("count_nonzero", self, dim, false);
  const auto term = at::count_nonzero(reduction.local, reduction.dims);
  return wrap(
      at::sum(reduction.gathered(term), at::IntArrayRef{0}, false),
      reduction.result);
}

// ---- moments and norms ------------------------------------------------------

Moments moments(const Reduction& reduction, bool keepdim) {
  const auto dtype = reduction.local.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto local = half ? reduction.local.to(at::kFloat) : reduction.local;
  const auto rows = count_over(local.sizes(), reduction.dims);
  const auto real = at::toRealValueType(local.scalar_type());
  auto mean = at::zeros(reduction.result->local_sizes(), local.options());
  auto squares =
      at::zeros(reduction.result->local_sizes(), local.options().dtype(real));
  if (rows > 0) {
    at::Tensor var;
    std::tie(var, mean) = local.dim() == 0
        ? std::tuple(squares, local)
        : at::var_mean(local, reduction.dims, at::Scalar(0), keepdim);
    squares = var * rows;
  }
  if (reduction.axes.empty()) {
    return {mean, squares};
  }
  const auto count =
      at::full(reduction.result->local_sizes(), rows, squares.options());
  const auto merged = merge_moments(
      {reduction.gathered(mean), reduction.gathered(squares)},
      reduction.gathered(count),
      {0});
  return {merged.mean.squeeze(0), merged.squares.squeeze(0)};
}

TwoTensors var_mean_of(
    const char* op,
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  const Reduction reduction(op, self, dim, keepdim);
  const auto both = moments(reduction, keepdim);
  const double rows =
      static_cast<double>(count_over(reduction.spec->sizes(), reduction.dims));
  const double free = std::max(rows - correction.value_or(1).toDouble(), 0.0);
  const auto real = at::toRealValueType(self.scalar_type());
  return {
      wrap((both.squares / free).to(real), reduction.result),
      wrap(
          rows > 0 ? both.mean.to(self.scalar_type())
                   : both.mean.to(self.scalar_type()).fill_(NAN),
          reduction.result)};
}

at::Tensor var_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return std::get<0>(var_mean_of("var", self, dim, correction, keepdim));
}

TwoTensors var_mean_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return var_mean_of("var_mean", self, dim, correction, keepdim);
}

at::Tensor std_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return std::get<0>(var_mean_of("std", self, dim, correction, keepdim)).sqrt();
}

TwoTensors std_mean_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  auto [var, mean] = var_mean_of("std_mean", self, dim, correction, keepdim);
  return {var.sqrt(), mean};
}

/// A norm of the ranks' norms is the norm of the whole, for every order; order
/// 0 counts, and counts add up.
at::Tensor vector_norm_kernel(
    const at::Tensor& self,
    const at::Scalar& ord,
    at::OptionalIntArrayRef dim,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  const Reduction reduction("linalg_vector_norm", self, dim, keepdim);
  const double order = ord.toDouble();
  const auto in = dtype ? reduction.local.to(*dtype) : reduction.local;
  const bool half =
      in.scalar_type() == at::kHalf || in.scalar_type() == at::kBFloat16;
  const auto out = at::toRealValueType(in.scalar_type());
  const auto wide = half ? in.to(at::kFloat) : in;
  const auto real = at::toRealValueType(wide.scalar_type());
  TORCH_CHECK(
      (order >= 0 && !std::isinf(order)) ||
          count_over(reduction.spec->sizes(), reduction.dims) > 0,
      "linalg_vector_norm: order ",
      order,
      " has no value for a tensor without elements, of sizes ",
      self.sizes());
  const bool smallest = order < 0;
  const auto term = reduction.has_rows()
      ? at::linalg_vector_norm(wide, ord, reduction.dims, keepdim)
      : reduction.neutral(
            smallest ? std::numeric_limits<double>::infinity() : 0.0, real);
  if (reduction.axes.empty()) {
    return wrap(term.to(out), reduction.result);
  }
  const auto terms = reduction.gathered(term);
  const auto whole = order == 0
      ? at::sum(terms, at::IntArrayRef{0}, false)
      : at::linalg_vector_norm(terms, ord, at::IntArrayRef{0}, false);
  return wrap(whole.to(out), reduction.result);
}

/// item(): the one element, wherever it is.
Decision whole_rule(Call& call) {
  Decision decision;
  for (const auto& operand : call.operands()) {
    decision.inputs.push_back(
        operand.spec ? replicated(operand.spec) : nullptr);
  }
  return decision;
}

const RegisterRules whole_numbers{
    {"aten::_local_scalar_dense", whole_rule},
    {"aten::is_nonzero", whole_rule},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("any", any_kernel);
  m.impl("any.dim", any_dim_kernel);
  m.impl("any.dims", any_dims_kernel);
  m.impl("all", all_kernel);
  m.impl("all.dim", all_dim_kernel);
  m.impl("all.dims", all_dims_kernel);
  m.impl("prod", prod_kernel);
  m.impl("prod.dim_int", prod_dim_kernel);
  m.impl("count_nonzero.dim_IntList", count_nonzero_kernel);
  m.impl("var.correction", var_kernel);
  m.impl("var_mean.correction", var_mean_kernel);
  m.impl("std.correction", std_kernel);
  m.impl("std_mean.correction", std_mean_kernel);
  m.impl("linalg_vector_norm", vector_norm_kernel);
}

} // namespace shardtensor
