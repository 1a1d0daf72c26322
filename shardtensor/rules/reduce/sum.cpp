#include <algorithm>

#include <ATen/ops/div.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/reduce/moments.h"
#include "shardtensor/rules/reduce/sum.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/redistribute.h"

// Note [Sums at the function level]
// ATen's derivative of a sum expands the gradient to the global sizes; what
// follows would be computed in full on every rank. Here the gradient of a sum
// is expanded shard by shard, and the gradient of that expansion is a sum.

namespace shardtensor::detail {

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// What a sum does to shapes: everything its gradient needs.
struct SumGeometry {
  SpecPtr spec; // of the input, without Partial
  std::vector<int64_t> dims;
  bool keepdim;
  at::ScalarType dtype; // of the input
};

at::Tensor expand_sum(const at::Tensor& grad, const SumGeometry& geometry);

struct SumBackward : Node {
  explicit SumBackward(SumGeometry geometry) : geometry_(std::move(geometry)) {}
  std::string name() const override {
    return "ShardTensorSumBackward";
  }
  variable_list apply(variable_list&& grads) override {
    return {grads[0].defined() ? expand_sum(grads[0], geometry_) : grads[0]};
  }
  SumGeometry geometry_;
};

struct ExpandSumBackward : Node {
  explicit ExpandSumBackward(SumGeometry geometry)
      : geometry_(std::move(geometry)) {}
  std::string name() const override {
    return "ShardTensorExpandSumBackward";
  }
  variable_list apply(variable_list&& grads) override {
    return {
        grads[0].defined()
            ? sum_dims(grads[0], geometry_.dims, geometry_.keepdim, {})
            : grads[0]};
  }
  SumGeometry geometry_;
};

/// Of a tensor of `sizes` that is expanded along `dims`.
std::vector<int64_t> expanded_strides(
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& dims) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    const bool expanded =
        std::find(dims.begin(), dims.end(), dim) != dims.end();
    strides[dim] = expanded ? 0 : stride;
    stride *= expanded ? 1 : std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

/// The gradient of a sum, in the layout of the input; each rank expands its own
/// part, without memory.
at::Tensor expand_sum(const at::Tensor& grad, const SumGeometry& geometry) {
  const auto laid_out = reduced_spec(
      geometry.spec, geometry.dims, geometry.keepdim, Placement::replicate());
  const auto source = redistribute(
      promote(grad, geometry.spec->mesh()).to(geometry.dtype), laid_out);
  auto local = impl_of(source)->local();
  if (!geometry.keepdim) {
    for (const int64_t dim : geometry.dims) {
      local = local.unsqueeze(dim);
    }
  }
  const auto& spec = geometry.spec;
  auto result = wrap(
      local.expand(spec->local_sizes()),
      spec,
      expanded_strides(spec->sizes(), geometry.dims));
  connect<ExpandSumBackward>(result, source, geometry);
  carry_tangent(result, source, [&](const auto& tangent) {
    return expand_sum(tangent, geometry);
  });
  return result;
}

/// False where a cast of a sum is not the sum of the casts: of its whole part,
/// and of what is true.
bool cast_is_linear(at::ScalarType from, at::ScalarType to) {
  return from == to ||
      (from != at::kBool && to != at::kBool &&
       (at::isIntegralType(from, false) || !at::isIntegralType(to, false)));
}

/// Sums are linear in Partial(sum) and Partial(avg); other reductions first,
/// and all where terms would be cast.
at::Tensor without_nonlinear_partial(
    const at::Tensor& tensor,
    at::ScalarType dtype) {
  const bool casts = !cast_is_linear(tensor.scalar_type(), dtype);
  auto placements = spec(tensor)->placements();
  bool changed = false;
  for (auto& placement : placements) {
    if (!is_linear(placement) || (casts && placement.is_partial())) {
      placement = Placement::replicate();
      changed = true;
    }
  }
  return changed ? redistribute(tensor, placements) : tensor;
}

at::Tensor local_sum(
    const at::Tensor& local,
    const std::vector<int64_t>& dims,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  return local.dim() == 0 ? at::sum(local, dtype)
                          : at::sum(local, dims, keepdim, dtype);
}

} // namespace

at::Tensor sum_dims(
    const at::Tensor& input,
    const std::vector<int64_t>& dims,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  const auto out_dtype = dtype.value_or(
      at::isIntegralType(input.scalar_type(), true) ? at::kLong
                                                    : input.scalar_type());
  const auto tensor = without_nonlinear_partial(input, out_dtype);
  const auto& from = spec(tensor);
  const auto& local = impl_of(tensor)->local();
  const auto terms = reduced_spec(from, dims, keepdim, Placement::partial());
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    const bool is_narrow = at::isReducedFloatingType(out_dtype);
    if ((is_narrow || out_dtype == at::kBool) && terms->has_partial()) {
      const auto whole = without_partial(terms);
      const auto sum =
          local_sum(local, dims, keepdim, is_narrow ? at::kFloat : out_dtype);
      result = wrap(redistribute_local(sum, terms, whole).to(out_dtype), whole);
    } else {
      result = wrap(local_sum(local, dims, keepdim, out_dtype), terms);
    }
  }
  if (needs_node(tensor) &&
      (result.is_floating_point() || result.is_complex())) {
    connect<SumBackward>(
        result,
        tensor,
        SumGeometry{
            without_partial(from), dims, keepdim, tensor.scalar_type()});
  }
  carry_tangent(result, tensor, [&](const auto& t) {
    return sum_dims(tangent_as(t, from), dims, keepdim, dtype);
  });
  return result;
}

namespace {

/// Autocast on GPUs adds up in fp32, on the CPU it has no such list.
std::optional<at::ScalarType> dtype_of_sum(
    const at::Tensor& self,
    std::optional<at::ScalarType> asked) {
  return !asked && autocast_widens("aten::sum", self) ? at::kFloat : asked;
}

at::Tensor sum_all_function(
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype) {
  return sum_dims(
      self,
      reduced_dims("sum", self.dim(), {}),
      false,
      dtype_of_sum(self, dtype));
}

at::Tensor sum_function(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  return sum_dims(
      self,
      reduced_dims("sum", self.dim(), dim),
      keepdim,
      dtype_of_sum(self, dtype));
}

/// The mean divides by the global count, so uneven shards weigh as they should.
at::Tensor mean_function(
    const at::Tensor& self,
    at::OptionalIntArrayRef dim,
    bool keepdim,
    std::optional<at::ScalarType> dtype) {
  const auto type = dtype.value_or(self.scalar_type());
  TORCH_CHECK(
      at::isFloatingType(type) || at::isComplexType(type),
      "mean: expected a floating point or complex dtype, got ",
      type);
  const auto dims = reduced_dims("mean", self.dim(), dim);
  const auto count = count_over(self.sizes(), dims);
  if (at::isReducedFloatingType(type)) {
    return at::div(
               sum_dims(self, dims, keepdim, at::kFloat),
               at::Scalar(static_cast<double>(count)))
        .to(type);
  }
  return at::div(
      sum_dims(self, dims, keepdim, type),
      at::Scalar(static_cast<double>(count)));
}

at::Tensor mean_all_function(
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype) {
  return mean_function(self, {}, false, dtype);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("sum", function_rule<at::_ops::sum, sum_all_function>);
  m.impl(
      "sum.dim_IntList",
      function_rule<at::_ops::sum_dim_IntList, sum_function>);
  m.impl("mean", function_rule<at::_ops::mean, mean_all_function>);
  m.impl("mean.dim", function_rule<at::_ops::mean_dim, mean_function>);
}

} // namespace shardtensor::detail
