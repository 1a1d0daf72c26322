#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/tensor/terms.h"

// softmax, log_softmax and logsumexp below autograd; ATen's derivative formulas
// run above. Along a sharded dim every rank tells the others its largest value
// and its sum of exponentials relative to that: one exchange of two numbers per
// row forward, one all-reduce of one number per row backward.

namespace shardtensor {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// exp(x) summed over dims is sum * exp(largest).
struct Exponentials {
  Tensor largest;
  Tensor sum;
};

/// This rank's, with dims kept, and the exponentials themselves.
std::pair<Exponentials, Tensor> local_exponentials(
    const Tensor& x,
    const std::vector<int64_t>& dims) {
  auto sizes = x.sizes().vec();
  bool has_rows = true;
  for (const int64_t dim : dims) {
    has_rows &= sizes[dim] > 0;
    sizes[dim] = 1;
  }
  if (!has_rows) {
    return {
        {at::full(sizes, -kInfinity, x.options()),
         at::zeros(sizes, x.options())},
        x};
  }
  const auto largest = at::amax(x, dims, true);
  // Rows of nothing but -inf have no exponentials; NaN only if all ranks do.
  const auto zero = at::zeros({}, x.options());
  const auto exponentials =
      (x - at::where(largest.eq(-kInfinity), zero, largest)).exp_();
  return {{largest, at::sum(exponentials, dims, true)}, exponentials};
}

Exponentials merged(
    const Exponentials& own,
    const SpecPtr& spec,
    const std::vector<int64_t>& dims) {
  const auto rows = reduced_spec(spec, dims, true, Placement::replicate());
  const auto terms =
      gather_terms({own.largest, own.sum}, rows, axes_of_dims(*spec, dims));
  const auto largest = at::amax(terms[0], {0}, true);
  return {
      largest.squeeze(0),
      at::sum(
          terms[1] * at::exp(terms[0] - largest), at::IntArrayRef{0}, false)};
}

Tensor wide(const Tensor& x) {
  const auto dtype = x.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? x.to(at::kFloat) : x;
}

at::ScalarType result_type(const Tensor& x, bool half_to_float) {
  return half_to_float ? at::kFloat : x.scalar_type();
}

Tensor softmax_kernel(const Tensor& self, int64_t dim, bool half_to_float) {
  const auto x = local_of(self);
  dim = at::maybe_wrap_dim(dim, self.dim());
  if (self.dim() == 0 || !x.spec->is_sharded(dim)) {
    return wrap(at::_softmax(x.tensor, dim, half_to_float), x.spec);
  }
  const CommScope scope("aten::_softmax");
  auto [own, result] = local_exponentials(wide(x.tensor), {dim});
  const auto all = merged(own, x.spec, {dim});
  result = result.mul_(at::exp(own.largest - all.largest) / all.sum);
  return wrap(result.to(result_type(x.tensor, half_to_float)), x.spec);
}

Tensor log_softmax_kernel(const Tensor& self, int64_t dim, bool half_to_float) {
  const auto x = local_of(self);
  dim = at::maybe_wrap_dim(dim, self.dim());
  if (self.dim() == 0 || !x.spec->is_sharded(dim)) {
    return wrap(at::_log_softmax(x.tensor, dim, half_to_float), x.spec);
  }
  const CommScope scope("aten::_log_softmax");
  const auto own = local_exponentials(wide(x.tensor), {dim}).first;
  const auto all = merged(own, x.spec, {dim});
  const auto result = (wide(x.tensor) - all.largest).sub_(at::log(all.sum));
  return wrap(result.to(result_type(x.tensor, half_to_float)), x.spec);
}

/// The sum over a sharded dim, kept.
Tensor total_along(const Tensor& local, const ShardSpec& spec, int64_t dim) {
  return all_reduce(
      at::sum(local, at::IntArrayRef{dim}, true),
      Reduce::Sum,
      *spec.mesh(),
      spec.axes(dim));
}

Tensor softmax_backward_kernel(
    const Tensor& grad_output,
    const Tensor& output,
    int64_t dim,
    at::ScalarType input_dtype) {
  const auto y = local_of(output);
  const auto grad = local_of(grad_output, y.spec);
  dim = at::maybe_wrap_dim(dim, output.dim());
  if (output.dim() == 0 || !y.spec->is_sharded(dim)) {
    return wrap(
        at::_softmax_backward_data(grad.tensor, y.tensor, dim, input_dtype),
        y.spec);
  }
  const CommScope scope("aten::_softmax_backward_data");
  auto product = wide(grad.tensor) * wide(y.tensor);
  const auto total = total_along(product, *y.spec, dim);
  product.sub_(wide(y.tensor) * total);
  return wrap(product.to(input_dtype), y.spec);
}

Tensor log_softmax_backward_kernel(
    const Tensor& grad_output,
    const Tensor& output,
    int64_t dim,
    at::ScalarType input_dtype) {
  const auto y = local_of(output);
  const auto grad = local_of(grad_output, y.spec);
  dim = at::maybe_wrap_dim(dim, output.dim());
  if (output.dim() == 0 || !y.spec->is_sharded(dim)) {
    return wrap(
        at::_log_softmax_backward_data(grad.tensor, y.tensor, dim, input_dtype),
        y.spec);
  }
  const CommScope scope("aten::_log_softmax_backward_data");
  const auto total = total_along(wide(grad.tensor), *y.spec, dim);
  const auto result = wide(grad.tensor) - at::exp(wide(y.tensor)).mul_(total);
  return wrap(result.to(input_dtype), y.spec);
}

Tensor logsumexp_kernel(const Tensor& self, at::IntArrayRef dim, bool keepdim) {
  const auto x = local_of(self);
  const auto dims = reduced_dims("logsumexp", self.dim(), dim);
  const auto result =
      reduced_spec(x.spec, dims, keepdim, Placement::replicate());
  const auto axes = axes_of_dims(*x.spec, dims);
  if (axes.empty()) {
    return wrap(at::logsumexp(x.tensor, dim, keepdim), result);
  }
  const CommScope scope("aten::logsumexp");
  const auto dtype = at::isIntegralType(self.scalar_type(), true)
      ? c10::get_default_dtype_as_scalartype()
      : self.scalar_type();
  const auto own = local_exponentials(wide(x.tensor.to(dtype)), dims).first;
  const auto all = merged(own, x.spec, dims);
  // Infinite rows stay infinite: their sum relative to it has no meaning.
  const auto value = at::where(
      all.largest.abs().eq(kInfinity),
      all.largest,
      all.largest + at::log(all.sum));
  return wrap(value.view(result->local_sizes()).to(dtype), result);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("_softmax", softmax_kernel);
  m.impl("_log_softmax", log_softmax_kernel);
  m.impl("_softmax_backward_data", softmax_backward_kernel);
  m.impl("_log_softmax_backward_data", log_softmax_backward_kernel);
  m.impl("logsumexp", logsumexp_kernel);
}

} // namespace shardtensor
