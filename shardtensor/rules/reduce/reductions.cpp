#include <cmath>
#include <limits>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_is_all_true_ops.h>
#include <ATen/ops/_is_any_true_ops.h>
#include <ATen/ops/all_ops.h>
#include <ATen/ops/any_ops.h>
#include <ATen/ops/count_nonzero_ops.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/logsumexp_ops.h>
#include <ATen/ops/nansum_ops.h>
#include <ATen/ops/norm_ops.h>
#include <ATen/ops/prod_ops.h>
#include <ATen/ops/std_mean_ops.h>
#include <ATen/ops/std_ops.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/var_mean_ops.h>
#include <ATen/ops/var_ops.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/labels.h"
#include "shardtensor/rules/reduce/moments.h"
#include "shardtensor/rules/reduce/reduction_table.h"

// Reductions that are not linear. ATen's derivative formulas run above.

namespace shardtensor::detail {
namespace {

namespace ops = at::_ops;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// ---- the table's kinds ------------------------------------------------------

struct Logical : ReductionKind {
  static constexpr bool takes_no_dims = true;
};
struct Rounded : ReductionKind {
  static constexpr bool rounds = true;
};
struct Count : ReductionKind {
  static constexpr bool adds = true;
};
struct Sum : Rounded {
  static constexpr bool adds = true;
};

// ---- moments and norms ------------------------------------------------------

Moments moments(const Reduction& reduction, bool keepdim) {
  const auto local =
      reduction.local.to(at::toOpMathType(reduction.local.scalar_type()));
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
  const auto all =
      reduction.merged({mean, squares, count}, merge_stacked_moments);
  return {all[0], all[1]};
}

template <class Op>
TwoTensors var_mean_of(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  const Reduction reduction(Op::name, self, dim, keepdim);
  check_takes_dtype<Op>(
      reduction.local,
      at::OptionalIntArrayRef(reduction.dims),
      at::Scalar(0),
      keepdim);
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
  return std::get<0>(
      var_mean_of<ops::var_correction>(self, dim, correction, keepdim));
}

TwoTensors var_mean_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return var_mean_of<ops::var_mean_correction>(self, dim, correction, keepdim);
}

at::Tensor std_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return std::get<0>(
             var_mean_of<ops::std_correction>(self, dim, correction, keepdim))
      .sqrt();
}

TwoTensors std_mean_kernel(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  auto [var, mean] =
      var_mean_of<ops::std_mean_correction>(self, dim, correction, keepdim);
  return {var.sqrt(), mean};
}

/// A norm of the ranks' norms is the norm of the whole, for every order; order
/// 0 counts, and counts add up.
at::Tensor norm(
    const char* op,
    const at::Tensor& self,
    const ReductionArguments& given) {
  const Reduction reduction(op, self, given.dims, given.keepdim);
  const double order = given.order.toDouble();
  const auto in =
      given.dtype ? reduction.local.to(*given.dtype) : reduction.local;
  const auto out = at::toRealValueType(in.scalar_type());
  const auto wide = in.to(at::toOpMathType(in.scalar_type()));
  TORCH_CHECK(
      (order >= 0 && !std::isinf(order)) ||
          count_over(reduction.spec->sizes(), reduction.dims) > 0,
      op,
      ": order ",
      order,
      " has no value for a tensor without elements, of sizes ",
      self.sizes());
  const auto term = reduction.has_rows()
      ? at::linalg_vector_norm(wide, given.order, reduction.dims, given.keepdim)
      : reduction.neutral(
            order < 0 ? std::numeric_limits<double>::infinity() : 0.0,
            at::toRealValueType(wide.scalar_type()));
  if (reduction.axes.empty()) {
    return wrap(term.to(out), reduction.result);
  }
  const auto whole = reduction.merged(term, [&](const at::Tensor& terms) {
    return order == 0
        ? at::sum(terms, at::IntArrayRef{0})
        : at::linalg_vector_norm(terms, given.order, at::IntArrayRef{0}, false);
  });
  return wrap(whole.to(out), reduction.result);
}

template <class Op, class Signature>
struct NormKernel;

template <class Op, class... Args>
struct NormKernel<Op, at::Tensor(const at::Tensor&, Args...)> {
  static at::Tensor call(const at::Tensor& self, Args... args) {
    ReductionArguments given;
    (given.read(args), ...);
    check_takes_dtype<Op>(impl_of(self)->local(), args...);
    return norm(Op::name, self, given);
  }
};

/// A line of the table.
template <class Op>
void norm(torch::Library& m) {
  m.impl(full_name<Op>().c_str(), &NormKernel<Op, typename Op::schema>::call);
}

const RegisterRules whole_numbers{
    replicate_rule,
    {
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
    }};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  reduction<ops::any, Logical>(m);
  reduction<ops::any_dim, Logical>(m);
  reduction<ops::any_dims, Logical>(m);
  reduction<ops::_is_any_true, Logical>(m);
  reduction<ops::all, Logical>(m);
  reduction<ops::all_dim, Logical>(m);
  reduction<ops::all_dims, Logical>(m);
  reduction<ops::_is_all_true, Logical>(m);
  reduction<ops::prod, Rounded>(m);
  reduction<ops::prod_dim_int, Rounded>(m);
  reduction<ops::count_nonzero, Count>(m);
  reduction<ops::count_nonzero_dim_IntList, Count>(m);
  reduction<ops::logsumexp, Rounded>(m);
  reduction<ops::nansum, Sum>(m);
  m.impl("var.correction", var_kernel);
  m.impl("var_mean.correction", var_mean_kernel);
  m.impl("std.correction", std_kernel);
  m.impl("std_mean.correction", std_mean_kernel);
  norm<ops::linalg_vector_norm>(m);
  norm<ops::norm_Scalar>(m);
  norm<ops::norm_ScalarOpt_dim>(m);
  norm<ops::norm_ScalarOpt_dtype>(m);
  norm<ops::norm_ScalarOpt_dim_dtype>(m);
}

} // namespace shardtensor::detail
