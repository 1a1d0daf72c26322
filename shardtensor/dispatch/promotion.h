#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"

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

/// promote() under the current mode, for the operator `op`; a ShardTensor stays
/// as it is.
at::Tensor promote_operand(
    const at::Tensor& tensor,
    const MeshPtr& mesh,
    const char* op);

} // namespace shardtensor
