#include "shardtensor/tensor/random.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {
namespace {

at::Tensor empty(
    const char* op,
    const SpecPtr& spec,
    const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(
      !spec->has_partial(),
      op,
      ": expected Shard and Replicate placements, got ",
      *spec);
  return wrap(at::empty(spec->local_sizes(), options), spec);
}

} // namespace

at::Tensor rand(const SpecPtr& spec, const at::TensorOptions& options) {
  const at::NoGradGuard no_grad;
  return empty("rand", spec, options).uniform_(0, 1);
}

at::Tensor randn(const SpecPtr& spec, const at::TensorOptions& options) {
  const at::NoGradGuard no_grad;
  return empty("randn", spec, options).normal_(0, 1);
}

} // namespace shardtensor
