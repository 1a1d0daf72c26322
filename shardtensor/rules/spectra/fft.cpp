#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/_fft_c2r.h>
#include <ATen/ops/_fft_r2c.h>
#include <ATen/ops/add.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plan_cache.h"
#include "shardtensor/rules/spectra/home.h"
#include "shardtensor/rules/spectra/plan.h"
#include "shardtensor/tensor/redistribute.h"

// Fourier transforms. A plan (plan.h) says which dims are transformed in which
// layout; it is carried out at the function level, where the adjoint of each
// step brings the gradient back the way that the signal came: the backward of
// ATen's real transforms would move and transform twice as much. What belongs
// to torch.func's transforms arrives below autograd and takes the same plan.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

/// One of ATen's three operators on a local tensor: complex along dims, real
/// along one.
struct LocalTransform {
  Lines lines;
  int64_t normalization;
  bool forward;
  bool onesided = true;

  at::ScalarType result_dtype(at::ScalarType given) const {
    return lines == Lines::ToReal ? c10::toRealValueType(given)
                                  : c10::toComplexType(given);
  }
  Tensor operator()(const Tensor& x, const TransformPlan::Step& step) const {
    if (x.numel() == 0) {
      return of_nothing(x, step);
    }
    if (!step.real) {
      return at::_fft_c2c(x, step.dims, normalization, forward);
    }
    return lines == Lines::FromReal
        ? at::_fft_r2c(x, step.dims, normalization, onesided)
        : at::_fft_c2r(
              x,
              step.dims,
              normalization,
              step.result->size(step.dims.front()));
  }

 private:
  /// PyTorch takes no empty tensor. The result depends on x all the same, or
  /// this rank would leave backward's exchanges to the others.
  Tensor of_nothing(const Tensor& x, const TransformPlan::Step& step) const {
    const auto dtype =
        step.real ? result_dtype(x.scalar_type()) : x.scalar_type();
    const auto none =
        at::zeros(step.result->local_sizes(), x.options().dtype(dtype));
    const auto sum = at::sum(x);
    return at::add(none, none.is_complex() ? sum : at::real(sum));
  }
};

/// What a plan is carried out on: a ShardTensor above autograd, ...
struct Differentiable {
  static const SpecPtr& layout(const Tensor& x) {
    return spec(x);
  }
  static Tensor moved(const Tensor& x, const SpecPtr& to) {
    return redistribute(x, to);
  }
  static Tensor transformed(
      const Tensor& x,
      const LocalTransform& transform,
      const TransformPlan::Step& step) {
    return from_local(transform(to_local(x), step), step.result);
  }
};

/// ... its local tensor below.
struct BelowAutograd {
  static const SpecPtr& layout(const Local& x) {
    return x.spec;
  }
  static Local moved(const Local& x, const SpecPtr& to) {
    return {redistribute_local(x.tensor, x.spec, to), to};
  }
  static Local transformed(
      const Local& x,
      const LocalTransform& transform,
      const TransformPlan::Step& step) {
    return {transform(x.tensor, step), step.result};
  }
};

std::shared_ptr<const TransformPlan> find_plan(
    const SpecPtr& spec,
    const Transform& transform,
    const SpecPtr& home) {
  static PlanCache<TransformPlan> plans;
  PlanKey key;
  key.add(spec)
      .add(home)
      .add(transform.dims)
      .add(static_cast<int64_t>(transform.lines))
      .add(transform.extent);
  return plans.find(key, [&] { return plan_transform(spec, transform, home); });
}

Dims result_sizes(const SpecPtr& spec, const Transform& transform) {
  auto sizes = spec->sizes();
  if (transform.lines != Lines::Complex) {
    sizes[transform.dims.back()] = transform.extent;
  }
  return sizes;
}

bool is_inverse(const Transform& transform, const LocalTransform& local) {
  return transform.lines == Lines::ToReal ||
      (transform.lines == Lines::Complex && !local.forward);
}

/// Null for a forward transform.
SpecPtr home_of(
    const SpecPtr& given,
    const Transform& transform,
    const LocalTransform& local) {
  return is_inverse(transform, local) ? recall_home(
                                            given,
                                            result_sizes(given, transform),
                                            transform.dims,
                                            transform.lines == Lines::ToReal)
                                      : nullptr;
}

template <class Level, class Signal>
Signal run(
    const char* op,
    Signal x,
    const Transform& transform,
    const LocalTransform& local) {
  if (transform.dims.empty()) {
    return x;
  }
  const auto given = Level::layout(x);
  const auto plan =
      find_plan(given, transform, home_of(given, transform, local));
  if (plan->gathered) {
    note_fallback(op, plan->before_gather, plan->gathered);
  }
  for (const auto& step : plan->steps) {
    x = Level::moved(x, step.layout);
    if (!step.dims.empty()) {
      x = Level::transformed(x, local, step);
    }
  }
  if (!is_inverse(transform, local)) {
    remember_home(given, plan->result(), transform.dims);
  }
  return x;
}

Transform transform_of(
    const Tensor& self,
    at::IntArrayRef dim,
    Lines lines,
    int64_t extent = 0) {
  Transform transform{{}, lines, extent};
  for (const int64_t each : dim) {
    transform.dims.push_back(at::maybe_wrap_dim(each, self.dim()));
  }
  if (lines == Lines::FromReal) {
    const auto lines_extent = self.size(transform.dims.back());
    transform.extent = extent ? lines_extent / 2 + 1 : lines_extent;
  }
  return transform;
}

Tensor resolved(const Tensor& self) {
  return self.resolve_conj().resolve_neg();
}

/// Above autograd, unless sums are left that are still to be done: ranks then
/// use one gradient for the same work, which only ATen's formulas know.
template <class Op, class... Args>
Tensor run_above(
    c10::DispatchKeySet keys,
    const Tensor& self,
    const Transform& transform,
    const LocalTransform& local,
    Args... args) {
  const auto x = resolved(self);
  if (spec(x)->has_partial() && !transform.dims.empty() &&
      find_plan(spec(x), transform, home_of(spec(x), transform, local))
          ->keeps_sums()) {
    return Op::redispatch(below_function_level(keys), x, args...);
  }
  return run<Differentiable>(Op::name, x, transform, local);
}

Tensor fft_c2c_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool forward) {
  return run_above<at::_ops::_fft_c2c>(
      keys,
      self,
      transform_of(self, dim, Lines::Complex),
      {Lines::Complex, normalization, forward},
      c10::fromIntArrayRefSlow(dim),
      normalization,
      forward);
}

Tensor fft_r2c_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool onesided) {
  return run_above<at::_ops::_fft_r2c>(
      keys,
      self,
      transform_of(self, dim, Lines::FromReal, onesided),
      {Lines::FromReal, normalization, true, onesided},
      dim,
      normalization,
      onesided);
}

Tensor fft_c2r_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    int64_t last_dim_size) {
  return run_above<at::_ops::_fft_c2r>(
      keys,
      self,
      transform_of(self, dim, Lines::ToReal, last_dim_size),
      {Lines::ToReal, normalization, false},
      dim,
      normalization,
      c10::SymInt(last_dim_size));
}

Local terms_of(const Tensor& self) {
  return local_of(self, spec(self));
}

Tensor wrapped(const Local& result) {
  return wrap(result.tensor, result.spec);
}

Tensor fft_c2c_kernel(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool forward) {
  constexpr auto op = "aten::_fft_c2c";
  const CommScope scope(op);
  return wrapped(
      run<BelowAutograd>(
          op,
          terms_of(self),
          transform_of(self, dim, Lines::Complex),
          {Lines::Complex, normalization, forward}));
}

Tensor fft_r2c_kernel(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool onesided) {
  constexpr auto op = "aten::_fft_r2c";
  const CommScope scope(op);
  return wrapped(
      run<BelowAutograd>(
          op,
          terms_of(self),
          transform_of(self, dim, Lines::FromReal, onesided),
          {Lines::FromReal, normalization, true, onesided}));
}

Tensor fft_c2r_kernel(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    int64_t last_dim_size) {
  constexpr auto op = "aten::_fft_c2r";
  const CommScope scope(op);
  return wrapped(
      run<BelowAutograd>(
          op,
          terms_of(self),
          transform_of(self, dim, Lines::ToReal, last_dim_size),
          {Lines::ToReal, normalization, false}));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("_fft_c2c", function_rule<at::_ops::_fft_c2c, fft_c2c_function>);
  m.impl("_fft_r2c", function_rule<at::_ops::_fft_r2c, fft_r2c_function>);
  m.impl("_fft_c2r", function_rule<at::_ops::_fft_c2r, fft_c2r_function>);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("_fft_c2c", fft_c2c_kernel);
  m.impl("_fft_r2c", fft_r2c_kernel);
  m.impl("_fft_c2r", fft_c2r_kernel);
}

} // namespace shardtensor::detail
