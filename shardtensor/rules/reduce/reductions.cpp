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
#include <ATen/ops/std_mean.h>
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

// Note [Squares of large numbers]
// PyTorch's kernels on the CPU take the root of a variance in fp64: the
// deviation of numbers whose squares are beyond fp32 is finite there. So a
// rank's term is its deviation, squared in fp64.

enum class Spread { Variance, Deviation };

Moments moments(const Reduction& reduction, bool keepdim, Spread spread) {
  const auto local =
      reduction.local.to(at::toOpMathType(reduction.local.scalar_type()));
  const auto rows = count_over(local.sizes(), reduction.dims);
  const auto real = at::toRealValueType(local.scalar_type());
  auto mean = at::zeros(reduction.result->local_sizes(), local.options());
  auto squares =
      at::zeros(reduction.result->local_sizes(), local.options().dtype(real));
  const bool wide = local.is_cpu() && spread == Spread::Deviation;
  if (rows > 0 && local.dim() > 0) {
    const auto& dims = reduction.dims;
    const auto both = wide ? at::std_mean(local, dims, at::Scalar(0), keepdim)
                           : at::var_mean(local, dims, at::Scalar(0), keepdim);
    mean = std::get<1>(both);
    squares = wide ? std::get<0>(both).to(at::kDouble).square() * rows
                   : std::get<0>(both) * rows;
  } else if (rows > 0) {
    mean = local;
    squares = (local - local).abs(); // NaN of an infinity
  }
  if (wide) { // of ranks without rows, too
    mean = mean.to(at::promoteTypes(mean.scalar_type(), at::kDouble));
    squares = squares.to(at::kDouble);
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

template <class Op, Spread spread>
TwoTensors spread_and_mean(
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
  const auto both = moments(reduction, keepdim, spread);
  const double rows =
      static_cast<double>(count_over(reduction.spec->sizes(), reduction.dims));
  const double free = std::max(rows - correction.value_or(1).toDouble(), 0.0);
  const auto real = at::toRealValueType(self.scalar_type());
  const auto var = both.squares / free;
  const auto mean = both.mean.to(self.scalar_type());
  return {
      wrap(
          (spread == Spread::Deviation ? var.sqrt() : var).to(real),
          reduction.result),
      wrap(rows > 0 ? mean : mean.fill_(NAN), reduction.result)};
}

template <class Op, Spread spread>
at::Tensor spread_only(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    const std::optional<at::Scalar>& correction,
    bool keepdim) {
  return std::get<0>(
      spread_and_mean<Op, spread>(self, dim, correction, keepdim));
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
  constexpr auto kVariance = Spread::Variance;
  constexpr auto kDeviation = Spread::Deviation;
  m.impl("var.correction", spread_only<ops::var_correction, kVariance>);
  m.impl(
      "var_mean.correction",
      spread_and_mean<ops::var_mean_correction, kVariance>);
  m.impl("std.correction", spread_only<ops::std_correction, kDeviation>);
  m.impl(
      "std_mean.correction",
      spread_and_mean<ops::std_mean_correction, kDeviation>);
  norm<ops::linalg_vector_norm>(m);
  norm<ops::norm_Scalar>(m);
  norm<ops::norm_ScalarOpt_dim>(m);
  norm<ops::norm_ScalarOpt_dtype>(m);
  norm<ops::norm_ScalarOpt_dim_dtype>(m);
}

} // namespace shardtensor::detail
