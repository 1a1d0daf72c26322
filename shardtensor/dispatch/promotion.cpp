#include "shardtensor/dispatch/promotion.h"

#include <atomic>

#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {
namespace {
std::atomic<TensorPromotionMode> mode{TensorPromotionMode::Silent};
} // namespace

void set_promotion_mode(TensorPromotionMode value) {
  mode = value;
}

TensorPromotionMode promotion_mode() {
  return mode;
}

at::Tensor promote_operand(
    const at::Tensor& tensor,
    const MeshPtr& mesh,
    const char* op) {
  if (is_shard_tensor(tensor)) {
    return tensor;
  }
  // Not a TypeError: Python's binary operators would take that for "not
  // implemented" and hide the text.
  TORCH_CHECK_VALUE(
      mode != TensorPromotionMode::Disabled,
      op,
      ": got a plain tensor of sizes ",
      tensor.sizes(),
      " beside a ShardTensor, and promotion is disabled; make it a "
      "ShardTensor with from_local() or distribute_tensor()");
  if (mode == TensorPromotionMode::Warn) {
    TORCH_WARN(
        op,
        ": promoting a plain tensor of sizes ",
        tensor.sizes(),
        " to Replicate; it must be equal on all ranks");
  }
  return promote(tensor, mesh);
}

} // namespace shardtensor
