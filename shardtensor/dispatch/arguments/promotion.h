#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

/// What happens when a plain tensor meets a ShardTensor in an operator. It must
/// be equal on all ranks and is promoted to Replicate: silently (the default),
/// with a warning where it has a dim, or not at all (an error).
enum class TensorPromotionMode { Disabled, Warn, Silent };

void set_promotion_mode(TensorPromotionMode mode);
TensorPromotionMode promotion_mode();

/// "disabled", "warn", "silent".
const char* to_string(TensorPromotionMode mode);
TensorPromotionMode parse_promotion_mode(const std::string& name);
/// 0-d tensors without grad are scalars; all others become ShardTensors, or
/// their gradients would leave the sharded graph.
inline bool must_promote(const at::Tensor& tensor) {
  return !is_shard_tensor(tensor) &&
      (tensor.dim() > 0 || tensor.requires_grad());
}

/// Raises or warns, by the current mode, that a plain tensor meets a
/// ShardTensor in the operator `op`.
void check_promotion(const at::Tensor& tensor, const char* op);

/// The same for each of these that would be promoted: weights, which enter
/// local work as they are.
void check_promotions(c10::ArrayRef<at::Tensor> tensors, const char* op);

/// promote() under the current mode, for the operator `op`; a ShardTensor stays
/// as it is.
at::Tensor promote_operand(
    const at::Tensor& tensor,
    const MeshPtr& mesh,
    const char* op);

} // namespace shardtensor
