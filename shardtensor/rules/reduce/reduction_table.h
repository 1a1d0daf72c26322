#pragma once

#include <optional>
#include <string>

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/refused_dtype.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/rules/reduce/reduction.h"

// Reductions as lines of a table, their kernels made from the signatures in
// at::_ops. Each rank reduces its rows to a term; the terms, which are small,
// are reduced once more by the same operator, so that NaN, ties and dtypes are
// PyTorch's.

namespace shardtensor::detail {

/// What is particular about an operator among reductions: a kind derives from
/// this and says what differs.
struct ReductionKind {
  /// The term of a rank without rows; nothing: the operator gives it.
  static std::optional<at::Scalar> neutral(at::ScalarType) {
    return {};
  }
  /// The terms add up, whatever made them.
  static constexpr bool adds = false;
  /// Results are rounded: those of fp16 and bf16 once only, at the end.
  static constexpr bool rounds = false;
  /// An empty list of dims stands for none of them, where others take all.
  static constexpr bool takes_no_dims = false;
};

/// A reduction's arguments, told apart by their types.
struct ReductionArguments {
  at::OptionalIntArrayRef dims; // nothing: all
  bool keepdim = false;
  std::optional<at::ScalarType> dtype;
  at::Scalar order = 2; // of a norm

  void read(const int64_t& dim) {
    dims = at::IntArrayRef(&dim, 1);
  }
  void read(const std::optional<int64_t>& dim) {
    if (dim) {
      read(*dim);
    }
  }
  void read(at::OptionalIntArrayRef list) {
    dims = list;
  }
  void read(bool keep) {
    keepdim = keep;
  }
  void read(std::optional<at::ScalarType> type) {
    dtype = type;
  }
  void read(const at::Scalar& value) {
    order = value;
  }
  void read(const std::optional<at::Scalar>& value) {
    order = value.value_or(2);
  }
};

/// The arguments of the call that reduces terms.
struct TermArguments {
  static constexpr int64_t kStacked[] = {0};

  int64_t operator()(int64_t) const {
    return 0;
  }
  at::IntArrayRef operator()(at::IntArrayRef) const {
    return kStacked;
  }
  at::OptionalIntArrayRef operator()(at::OptionalIntArrayRef) const {
    return at::IntArrayRef(kStacked);
  }
  bool operator()(bool) const {
    return false;
  }
  std::optional<at::ScalarType> operator()(
      std::optional<at::ScalarType> dtype) const {
    return dtype;
  }
};

template <class Op, class Kind, class Signature>
struct ReductionKernel;

template <class Op, class Kind, class... Args>
struct ReductionKernel<Op, Kind, at::Tensor(const at::Tensor&, Args...)> {
  static at::Tensor call(const at::Tensor& self, Args... args) {
    ReductionArguments given;
    (given.read(args), ...);
    if (Kind::takes_no_dims && given.dims && given.dims->empty()) {
      const auto x = local_of(self);
      return wrap(Op::call(x.tensor, args...), x.spec);
    }
    const Reduction reduction(Op::name, self, given.dims, given.keepdim);
    check_empty_takes_dtype<Op>(reduction.local, args...);
    if (reduction.axes.empty()) {
      return wrap(Op::call(reduction.local, args...), reduction.result);
    }
    const CommScope scope(Op::name);
    const auto dtype = given.dtype.value_or(self.scalar_type());
    if (Kind::rounds && at::isReducedFloatingType(dtype)) {
      const auto wide = at::toOpMathType(dtype);
      return wrap(
          reduced(reduction, reduction.local.to(wide), as(wide, args)...)
              .to(dtype),
          reduction.result);
    }
    return wrap(reduced(reduction, reduction.local, args...), reduction.result);
  }

 private:
  static at::Tensor reduced(
      const Reduction& reduction,
      const at::Tensor& local,
      Args... args) {
    const auto dtype = local.scalar_type();
    const auto neutral = Kind::neutral(dtype);
    const auto term = !neutral || reduction.has_rows()
        ? Op::call(local, args...)
        : reduction.neutral(*neutral, dtype);
    return reduction.merged(term, [&](const at::Tensor& terms) {
      if constexpr (Kind::adds) {
        return at::sum(terms, at::IntArrayRef{0});
      } else {
        return Op::call(terms, TermArguments()(args)...);
      }
    });
  }

  template <class Arg>
  static Arg as(at::ScalarType, Arg arg) {
    return arg;
  }
  static std::optional<at::ScalarType> as(
      at::ScalarType wide,
      std::optional<at::ScalarType> dtype) {
    return dtype ? wide : dtype;
  }
};

/// "aten::any.dim".
template <class Op>
std::string full_name() {
  return *Op::overload_name ? std::string(Op::name) + "." + Op::overload_name
                            : Op::name;
}

/// A line of the table: `reduction<at::_ops::amax, Largest>(m);`.
template <class Op, class Kind = ReductionKind>
void reduction(torch::Library& m) {
  m.impl(
      full_name<Op>().c_str(),
      &ReductionKernel<Op, Kind, typename Op::schema>::call);
}

} // namespace shardtensor::detail
