#include "shardtensor/tensor/node.h"

namespace shardtensor {

void check_no_tangent(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::isFwGradDefined(tensor),
      "a ShardTensor operator that communicates does not support forward-mode "
      "differentiation (got a tensor of sizes ",
      tensor.sizes(),
      " with a tangent); use reverse mode");
}

} // namespace shardtensor
