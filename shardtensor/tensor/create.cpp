#include "shardtensor/tensor/create.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor {

void detail::check_made(const char* op, const SpecPtr& spec) {
  TORCH_CHECK_VALUE(spec, op, ": no spec, expected one");
  TORCH_CHECK_VALUE(
      !spec->has_partial(),
      op,
      ": expected Shard and Replicate placements, got ",
      *spec);
}

at::Tensor zeros(const SpecPtr& spec, const at::TensorOptions& options) {
  detail::check_made("zeros", spec);
  return wrap(at::zeros(spec->local_sizes(), options), spec);
}

at::Tensor ones(const SpecPtr& spec, const at::TensorOptions& options) {
  detail::check_made("ones", spec);
  return wrap(at::ones(spec->local_sizes(), options), spec);
}

at::Tensor full(
    const SpecPtr& spec,
    const at::Scalar& value,
    const at::TensorOptions& options) {
  detail::check_made("full", spec);
  return wrap(at::full(spec->local_sizes(), value, options), spec);
}

at::Tensor empty(const SpecPtr& spec, const at::TensorOptions& options) {
  detail::check_made("empty", spec);
  return wrap(at::empty(spec->local_sizes(), options), spec);
}

} // namespace shardtensor
