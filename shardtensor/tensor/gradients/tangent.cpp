#include "shardtensor/tensor/gradients/tangent.h"

namespace shardtensor::detail {

bool has_tangent(std::initializer_list<at::Tensor> tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && torch::autograd::isFwGradDefined(tensor)) {
      return true;
    }
  }
  return false;
}

void check_no_tangent(const char* what, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::isFwGradDefined(tensor),
      what,
      ": expected no forward-mode tangent (got a tensor of ",
      tensor.dim(), // sizes of pieces differ between ranks
      " dims with a tangent); use reverse mode");
}

} // namespace shardtensor::detail
