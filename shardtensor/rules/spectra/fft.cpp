#include <algorithm>
#include <type_traits>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/_fft_c2r.h>
#include <ATen/ops/_fft_r2c.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/rules/spectra/complex_transform.h"
#include "shardtensor/rules/spectra/home.h"
#include "shardtensor/rules/spectra/memory_order.h"
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

/// What a call of one of ATen's three operators asks for: complex transforms
/// along dims, real ones along the last.
struct Work {
  Transform transform;
  int64_t normalization;
  bool forward;
  bool onesided = true;

  bool is_inverse() const {
    return transform.lines == Lines::ToReal ||
        (transform.lines == Lines::Complex && !forward);
  }

  /// A step on a local tensor.
  Tensor operator()(const Tensor& x, const TransformPlan::Step& step) const {
    if (has_no_lines(x, step)) {
      return of_no_lines(x, step);
    }
    if (!step.real) {
      return at::_fft_c2c(x, step.dims, normalization, forward);
    }
    return transform.lines == Lines::FromReal
        ? at::_fft_r2c(x, step.dims, normalization, onesided)
        : at::_fft_c2r(
              x,
              step.dims,
              normalization,
              step.result->size(step.dims.front()));
  }

 private:
  static bool has_no_lines(const Tensor& x, const TransformPlan::Step& step) {
    for (int64_t dim = 0; dim < x.dim(); ++dim) {
      const auto& dims = step.dims;
      if (x.size(dim) == 0 && std::count(dims.begin(), dims.end(), dim) == 0) {
        return true;
      }
    }
    return false;
  }

  /// PyTorch takes no empty tensor. One line, of which nothing is kept, leaves
  /// autograd what others' lines do: an edge to x, or this rank would leave
  /// backward's exchanges to the others, and as many saved tensors, or it would
  /// stop elsewhere in what torch.utils.checkpoint computes again.
  Tensor of_no_lines(const Tensor& x, const TransformPlan::Step& step) const {
    Dims sizes(x.dim(), 1);
    for (const int64_t dim : step.dims) {
      sizes[dim] = x.size(dim);
    }
    auto line = (*this)(at::zeros(sizes, x.options()) + at::sum(x), step);
    for (int64_t dim = 0; dim < x.dim(); ++dim) {
      if (x.size(dim) == 0) {
        line = line.narrow(dim, 0, 0);
      }
    }
    return line.expand(step.result->local_sizes());
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
      const Work& work,
      const TransformPlan::Step& step,
      const SpecPtr& next,
      at::IntArrayRef strides) {
    if (!step.real) {
      return complex_transform(
          x,
          {step.layout, next, step.dims, work.normalization, work.forward},
          strides);
    }
    return from_local_strided(
        work(to_local(moved(x, step.layout)), step), step.result, strides);
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
      const Work& work,
      const TransformPlan::Step& step,
      const SpecPtr&,
      at::IntArrayRef) {
    return {work(moved(x, step.layout).tensor, step), step.result};
  }
};

Dims result_sizes(const SpecPtr& spec, const Transform& transform) {
  auto sizes = spec->sizes();
  if (transform.lines != Lines::Complex) {
    sizes[transform.dims.back()] = transform.extent;
  }
  return sizes;
}

/// Null for a forward transform.
SpecPtr home_of(const SpecPtr& given, const Work& work) {
  const auto& transform = work.transform;
  return work.is_inverse() ? recall_home(
                                 given,
                                 result_sizes(given, transform),
                                 transform.dims,
                                 transform.lines == Lines::ToReal)
                           : nullptr;
}

std::shared_ptr<const TransformPlan> find_plan(
    const SpecPtr& spec,
    const Work& work) {
  static PlanCache<TransformPlan> plans;
  const auto& transform = work.transform;
  const auto home = home_of(spec, work);
  PlanKey key;
  key.add(spec)
      .add(home)
      .add(transform.dims)
      .add(static_cast<int64_t>(transform.lines))
      .add(transform.extent);
  return plans.find(key, [&] { return plan_transform(spec, transform, home); });
}

template <class Level, class Signal>
Signal run(const char* op, Signal x, const Work& work, const Dims& strides) {
  const auto given = Level::layout(x);
  const auto plan = find_plan(given, work);
  if (plan->gathered) {
    note_fallback(op, plan->before_gather, plan->gathered);
  }
  for (size_t i = 0; i < plan->steps.size(); ++i) {
    const auto& step = plan->steps[i];
    if (step.dims.empty()) {
      x = Level::moved(x, step.layout);
      continue;
    }
    const auto& next =
        i + 1 < plan->steps.size() ? plan->steps[i + 1].layout : step.result;
    const bool has_all_sizes = step.result->sizes() == plan->result()->sizes();
    x = Level::transformed(
        x, work, step, next, has_all_sizes ? strides : at::IntArrayRef());
  }
  if (!work.is_inverse()) {
    remember_home(given, plan->result(), work.transform.dims);
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

/// Single or double precision, which all backends transform.
bool is_common(at::ScalarType dtype) {
  const auto real = at::toRealValueType(dtype);
  return real == at::kFloat || real == at::kDouble;
}

/// PyTorch's error of a dtype that it does not take, also on a rank without
/// rows, which calls no transform.
Work checked(const Tensor& self, const Work& work) {
  const auto dtype = self.scalar_type();
  const bool wants_complex = work.transform.lines != Lines::FromReal;
  if (is_common(dtype) && at::isComplexType(dtype) == wants_complex) {
    return work;
  }
  const auto one = at::zeros({1}, at::dtype(dtype).device(self.device()));
  switch (work.transform.lines) {
    case Lines::FromReal:
      at::_fft_r2c(one, {0}, 0, true);
      break;
    case Lines::ToReal:
      at::_fft_c2r(one, {0}, 0, 1);
      break;
    case Lines::Complex:
      at::_fft_c2c(one, {0}, 0, true);
      break;
  }
  return work;
}

Work c2c_work(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool forward) {
  return checked(
      self, {transform_of(self, dim, Lines::Complex), normalization, forward});
}

Work r2c_work(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool onesided) {
  return checked(
      self,
      {transform_of(self, dim, Lines::FromReal, onesided),
       normalization,
       /*forward=*/true,
       onesided});
}

Work c2r_work(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    int64_t last_dim_size) {
  return checked(
      self,
      {transform_of(self, dim, Lines::ToReal, last_dim_size),
       normalization,
       /*forward=*/false});
}

template <class To, class From>
To symbolic(From argument) {
  if constexpr (std::is_same_v<To, c10::SymIntArrayRef>) {
    return c10::fromIntArrayRefSlow(argument);
  } else {
    return To(argument);
  }
}

/// An operator whose arguments are read by `work_of`.
template <class Op, auto work_of, class Signature = typename Op::schema>
struct Entry;

template <class Op, auto work_of, class... Args>
struct Entry<Op, work_of, Tensor(const Tensor&, Args...)> {
  /// Above autograd, unless sums are left that are still to be done: ranks then
  /// use one gradient for the same work, which only ATen's formulas know.
  static Tensor function(
      c10::DispatchKeySet keys,
      const Tensor& self,
      typename c10::remove_symint<Args>::type... args) {
    const auto x = self.resolve_conj().resolve_neg();
    const auto work = work_of(x, args...);
    if (work.transform.dims.empty()) {
      return x.clone();
    }
    if (spec(x)->has_partial() && find_plan(spec(x), work)->keeps_sums()) {
      return Op::redispatch(
          below_function_level(keys), x, symbolic<Args>(args)...);
    }
    return run<Differentiable>(
        Op::name, x, work, transformed_strides(x, work.transform));
  }

  static Tensor kernel(
      const Tensor& self,
      typename c10::remove_symint<Args>::type... args) {
    const CommScope scope(Op::name);
    const auto work = work_of(self, args...);
    if (work.transform.dims.empty()) {
      return self.clone();
    }
    const auto strides = transformed_strides(self, work.transform);
    const auto result =
        run<BelowAutograd>(Op::name, local_of(self, spec(self)), work, strides);
    return wrap(result.tensor, result.spec, strides);
  }
};

using C2C = Entry<at::_ops::_fft_c2c, c2c_work>;
using R2C = Entry<at::_ops::_fft_r2c, r2c_work>;
using C2R = Entry<at::_ops::_fft_c2r, c2r_work>;

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("_fft_c2c", function_rule<at::_ops::_fft_c2c, C2C::function>);
  m.impl("_fft_r2c", function_rule<at::_ops::_fft_r2c, R2C::function>);
  m.impl("_fft_c2r", function_rule<at::_ops::_fft_c2r, C2R::function>);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("_fft_c2c", C2C::kernel);
  m.impl("_fft_r2c", R2C::kernel);
  m.impl("_fft_c2r", C2R::kernel);
}

} // namespace shardtensor::detail
