#include "shardtensor/rules/reduce/reduction.h"

#include <ATen/ops/full.h>

#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/terms.h"

namespace shardtensor {

Reduction::Reduction(
    const char* op,
    const at::Tensor& tensor,
    at::OptionalIntArrayRef dim,
    bool keepdim)
    : dims(reduced_dims(op, tensor.dim(), dim)) {
  const auto& own = shardtensor::spec(tensor);
  spec = without_partial(own);
  local = redistribute_local(impl_of(tensor)->local(), own, spec);
  axes = axes_of_dims(*spec, dims);
  result = reduced_spec(spec, dims, keepdim, Placement::replicate());
}

bool Reduction::has_rows() const {
  for (const int64_t dim : dims) {
    if (local.size(dim) == 0 && spec->size(dim) > 0) {
      return false;
    }
  }
  return true;
}

at::Tensor Reduction::gathered(const at::Tensor& term) const {
  return gather_terms(term, result, axes);
}

at::Tensor Reduction::neutral(const at::Scalar& value, at::ScalarType dtype)
    const {
  return at::full(result->local_sizes(), value, local.options().dtype(dtype));
}

} // namespace shardtensor
