#include <limits>
#include <utility>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_safe_softmax_native.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/refused_dtype.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/reduce/softmax_kernels.h"
#include "shardtensor/tensor/terms.h"

// softmax and log_softmax below autograd; ATen's derivative formulas run above.
// Along a sharded dim every rank tells the others its largest value and its sum
// of exponentials relative to that: merge_terms of two numbers per row
// forward, one all-reduce of one number per row backward.

namespace shardtensor::detail {
namespace {

namespace ops = at::_ops;
using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor wide(const Tensor& x) {
  return x.to(at::toOpMathType(x.scalar_type()));
}

/// The operator itself where the dim is whole; along a cut one what `across`
/// makes of the local tensors, narrow types in fp32, as a `dtype`.
template <class Op, class Flag, class Across, class... Tensors>
Tensor run_along(
    const SpecPtr& spec,
    int64_t dim,
    Flag flag,
    at::ScalarType dtype,
    const Across& across,
    const Tensors&... locals) {
  dim = at::maybe_wrap_dim(dim, spec->dim());
  if (spec->is_whole(dim)) {
    return wrap(Op::call(locals..., dim, flag), spec);
  }
  const CommScope scope(Op::name);
  return wrap(across(spec, dim, wide(locals)...).to(dtype), spec);
}

// ---- forward ----------------------------------------------------------------

/// exp(x) summed over a dim is sum * exp(largest).
struct Exponentials {
  Tensor largest;
  Tensor sum;
};

/// Rows of nothing but -inf have no exponentials; NaN only if all ranks do.
Tensor below(const Tensor& x, const Tensor& largest) {
  const auto finite = largest.dtype() == at::kDouble
      ? std::numeric_limits<double>::lowest()
      : std::numeric_limits<float>::lowest();
  return x - largest.clamp_min(finite);
}

Tensor exponentials_below(const Tensor& x, const Tensor& largest) {
  return have_cuda_kernels(x) ? run_cuda_kernel(kExponential, {x, largest})
                              : below(x, largest).exp_();
}

/// This rank's, with the dim kept, and the exponentials themselves.
std::pair<Exponentials, Tensor> local_exponentials(
    const Tensor& x,
    int64_t dim) {
  if (x.size(dim) == 0) {
    auto sizes = x.sizes().vec();
    sizes[dim] = 1;
    return {
        {at::full(sizes, -kInfinity, x.options()),
         at::zeros(sizes, x.options())},
        x};
  }
  const auto largest = at::amax(x, {dim}, true);
  const auto exponentials = exponentials_below(x, largest);
  return {
      {largest, at::sum(exponentials, at::IntArrayRef{dim}, true)},
      exponentials};
}

/// {largest, sum} stacked along dim 0.
Terms merge_exponentials(const Terms& stacked) {
  const auto& [own, sum] = std::tie(stacked[0], stacked[1]);
  const auto largest = at::amax(own, {0}, true);
  const auto shares = have_cuda_kernels(own)
      ? run_cuda_kernel(kShareOfSum, {sum, own, largest})
      : below(own, largest).exp_().mul_(sum);
  return {largest.squeeze(0), at::sum(shares, at::IntArrayRef{0}, false)};
}

/// All ranks'.
Exponentials merged(const Exponentials& own, const SpecPtr& spec, int64_t dim) {
  const auto rows = reduced_spec(spec, {dim}, true, Placement::replicate());
  const auto all = merge_terms(
      {own.largest, own.sum}, rows, spec->axes(dim), merge_exponentials);
  return {all[0], all[1]};
}

Tensor softmax_across(const SpecPtr& spec, int64_t dim, const Tensor& x) {
  auto [own, result] = local_exponentials(x, dim);
  const auto all = merged(own, spec, dim);
  const auto share = have_cuda_kernels(x)
      ? run_cuda_kernel(kShareOfAll, {own.largest, all.largest, all.sum})
      : (own.largest - all.largest).exp_().div_(all.sum);
  return result.mul_(share);
}

Tensor log_softmax_across(const SpecPtr& spec, int64_t dim, const Tensor& x) {
  const auto all = merged(local_exponentials(x, dim).first, spec, dim);
  return (x - all.largest).sub_(at::log(all.sum));
}

template <class Op, auto across>
Tensor forward_kernel(const Tensor& self, int64_t dim, bool half_to_float) {
  const auto x = local_of(self);
  check_takes_dtype<Op>(x.tensor, dim, half_to_float);
  const auto dtype = half_to_float ? at::kFloat : self.scalar_type();
  return run_along<Op>(x.spec, dim, half_to_float, dtype, across, x.tensor);
}

// ---- backward ---------------------------------------------------------------

/// The sum over the cut dim, kept.
Tensor total_along(const SpecPtr& spec, int64_t dim, const Tensor& local) {
  return all_reduce(
      at::sum(local, at::IntArrayRef{dim}, true),
      Reduce::Sum,
      *spec->mesh(),
      spec->axes(dim));
}

Tensor softmax_backward_across(
    const SpecPtr& spec,
    int64_t dim,
    const Tensor& grad,
    const Tensor& y) {
  auto product = grad * y;
  const auto total = total_along(spec, dim, product);
  return product.addcmul_(y, total, -1);
}

Tensor log_softmax_backward_across(
    const SpecPtr& spec,
    int64_t dim,
    const Tensor& grad,
    const Tensor& y) {
  return at::addcmul(grad, at::exp(y), total_along(spec, dim, grad), -1);
}

template <class Op, auto across>
Tensor backward_kernel(
    const Tensor& grad_output,
    const Tensor& output,
    int64_t dim,
    at::ScalarType input_dtype) {
  const auto y = local_of(output);
  const auto grad = local_of(grad_output, y.spec);
  return run_along<Op>(
      y.spec, dim, input_dtype, input_dtype, across, grad.tensor, y.tensor);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  // ATen's own composition, of operators that have kernels here.
  m.impl("_safe_softmax", at::native::_safe_softmax);
  m.impl("_softmax", forward_kernel<ops::_softmax, softmax_across>);
  m.impl("_log_softmax", forward_kernel<ops::_log_softmax, log_softmax_across>);
  m.impl(
      "_softmax_backward_data",
      backward_kernel<ops::_softmax_backward_data, softmax_backward_across>);
  m.impl(
      "_log_softmax_backward_data",
      backward_kernel<
          ops::_log_softmax_backward_data,
          log_softmax_backward_across>);
}

} // namespace shardtensor::detail
