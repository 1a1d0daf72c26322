#include "shardtensor/rules/reduce/reduction.h"

#include <ATen/ops/full.h>

#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/reduce/moments.h"

namespace shardtensor::detail {

Reduction::Reduction(
    const char* op,
    const at::Tensor& tensor,
    at::OptionalIntArrayRef dim,
    bool keepdim)
    : dims(reduced_dims(op, tensor.dim(), dim)) {
  // Checked where no rank is without rows to check.
  TORCH_CHECK(
      tensor.dim() <= 64,
      op,
      ": only tensors with up to 64 dims are supported, got ",
      tensor.dim());
  const auto x = local_of(tensor);
  spec = x.spec;
  local = x.tensor;
  axes = axes_of_dims(*spec, dims);
  result = reduced_spec(spec, dims, keepdim, Placement::replicate());
}

bool Reduction::has_rows() const {
  return count_over(local.sizes(), dims) > 0 ||
      count_over(spec->sizes(), dims) == 0;
}

Terms Reduction::merged(Terms own, MergeTerms merge) const {
  return merge_terms(std::move(own), result, axes, merge);
}

at::Tensor Reduction::merged(
    const at::Tensor& own,
    c10::function_ref<at::Tensor(const at::Tensor& stacked)> merge) const {
  return merge_terms(own, result, axes, merge);
}

at::Tensor Reduction::neutral(const at::Scalar& value, at::ScalarType dtype)
    const {
  return at::full(result->local_sizes(), value, local.options().dtype(dtype));
}

} // namespace shardtensor::detail
