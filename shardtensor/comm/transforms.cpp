#include "shardtensor/comm/transforms.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>
#include <c10/util/Exception.h>

#include "shardtensor/comm/scope.h"

namespace shardtensor::detail {

using at::functorch::maybeGetBatchedImpl;
using at::functorch::maybeGetTensorWrapper;

at::Tensor without_levels(at::Tensor tensor) {
  while (const auto* wrapper = maybeGetTensorWrapper(tensor)) {
    tensor = at::Tensor(wrapper->value());
  }
  return tensor;
}

std::optional<Samples> samples_of(const at::Tensor& tensor) {
  const auto* batched = maybeGetBatchedImpl(tensor);
  return batched ? std::optional<Samples>({batched->value(), batched->bdim()})
                 : std::nullopt;
}

at::Tensor values_inside(at::Tensor tensor) {
  tensor = without_levels(std::move(tensor));
  while (const auto samples = samples_of(tensor)) {
    tensor = without_levels(samples->values);
  }
  return tensor;
}

void check_not_transformed(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      values_inside(tensor).is_same(tensor),
      op,
      ": expected tensors outside of torch.func's transforms, got one inside; "
      "use torch.autograd.grad");
}

at::Tensor value_inside(const at::Tensor& tensor) {
  auto value = without_levels(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !samples_of(value),
      current_comm_scope(),
      ": torch.func.vmap gives each sample values of its own where the host "
      "must read one; call it for each sample");
  return value;
}

} // namespace shardtensor::detail
