#include "shardtensor/dispatch/arguments/promotion.h"

#include "shardtensor/layout/enum_words.h"
#include "shardtensor/tensor/transformed.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor {
namespace {
Setting<TensorPromotionMode> promotion{
    "promotion_mode",
    TensorPromotionMode::Silent};

constexpr detail::EnumWords<TensorPromotionMode, 3> kPromotionModes{
    "promotion mode",
    {{
        {TensorPromotionMode::Disabled, "disabled"},
        {TensorPromotionMode::Warn, "warn"},
        {TensorPromotionMode::Silent, "silent"},
    }}};
} // namespace

void set_promotion_mode(TensorPromotionMode value) {
  promotion = value;
}

TensorPromotionMode promotion_mode() {
  return promotion;
}

const char* to_string(TensorPromotionMode mode) {
  return kPromotionModes.word(mode);
}

TensorPromotionMode parse_promotion_mode(const std::string& name) {
  return kPromotionModes.parse(name);
}

void check_promotion(const at::Tensor& tensor, const char* op) {
  // Not a TypeError: Python's binary operators would take that for "not
  // implemented" and hide the text.
  TORCH_CHECK_VALUE(
      promotion != TensorPromotionMode::Disabled,
      op,
      ": got a plain tensor of sizes ",
      tensor.sizes(),
      " beside a ShardTensor, and promotion is disabled; make it a "
      "ShardTensor with from_local() or distribute_tensor()");
  if (promotion == TensorPromotionMode::Warn && tensor.dim() > 0) {
    TORCH_WARN(
        op,
        ": auto-promoting a plain ",
        tensor.scalar_type(),
        " tensor of sizes ",
        tensor.sizes(),
        " to Replicate; it must be equal on all ranks");
  }
}

void check_promotions(c10::ArrayRef<at::Tensor> tensors, const char* op) {
  if (promotion == TensorPromotionMode::Silent) {
    return;
  }
  for (const auto& tensor : tensors) {
    if (tensor.defined() && must_promote(tensor)) {
      check_promotion(tensor, op);
    }
  }
}

at::Tensor promote_operand(
    const at::Tensor& tensor,
    const MeshPtr& mesh,
    const char* op) {
  if (detail::layout_of(tensor)) {
    return tensor;
  }
  check_promotion(tensor, op);
  return promote(tensor, mesh);
}

} // namespace shardtensor
