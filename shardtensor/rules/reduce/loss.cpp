#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/joined_operands.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/labels.h"

// Losses that are a pointwise function and then a reduction. The function level
// takes them apart, so that the mean is the mean over the global count; the
// pointwise part has a dispatch-level rule.

namespace shardtensor::detail {
namespace {

/// Not reduced, a loss is pointwise, and so is its backward. Reduced it comes
/// here only from inside a torch.func transform.
Decision elementwise_loss_rule(Call& call) {
  if (call.argument("reduction").toInt() == at::Reduction::None) {
    return pointwise_rule(call);
  }
  Decision decision;
  for (const auto& operand : call.operands()) {
    decision.inputs.push_back(
        operand.spec ? replicated(operand.spec) : nullptr);
    if (operand.spec && operand.spec->is_sharded()) {
      note_fallback(call.name(), operand.spec, decision.inputs.back());
    }
  }
  return decision;
}

/// Its kernel wants numbers between 0 and 1.
Decision binary_cross_entropy_rule(Call& call) {
  auto decision = elementwise_loss_rule(call);
  if (!decision.outputs.empty() && decision.outputs[0]->is_sharded()) {
    decision.refuses_values = decision.outputs[0];
  }
  return decision;
}

/// A copy of operand `copied` is written: it is not broadcast against others.
template <size_t copied>
Decision written_loss_rule(Call& call) {
  const auto written = call.operand(copied).tensor.sizes();
  for (const auto& operand : call.operands()) {
    const auto sizes = operand.tensor.sizes();
    TORCH_CHECK(
        at::is_expandable_to(sizes, written),
        call.name(),
        ": output with shape ",
        written,
        " doesn't match the broadcast shape ",
        at::IntArrayRef(at::infer_size(written, sizes)));
  }
  return elementwise_loss_rule(call);
}

bool any_transformed(const torch::jit::Stack& stack, size_t arguments) {
  for (const auto& value : torch::jit::last(stack, arguments)) {
    if (value.isTensor() && is_transformed(value.toTensor())) {
      return true;
    }
  }
  return false;
}

void loss_function(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto arguments = op.schema().arguments().size();
  auto& argument = (*stack)
      [stack->size() - arguments +
       *op.schema().argumentIndexWithName("reduction")];
  const auto reduction = argument.toInt();
  if (reduction == at::Reduction::None || any_transformed(*stack, arguments) ||
      must_join(op, keys, *stack)) {
    run_below_function_level(op, keys, stack);
    return;
  }
  argument = static_cast<int64_t>(at::Reduction::None);
  op.callBoxed(stack); // here again, and from here to autocast and autograd
  auto& result = stack->back();
  result = reduction == at::Reduction::Mean ? at::mean(result.toTensor())
                                            : at::sum(result.toTensor());
}

const RegisterRules elementwise_losses{
    {"aten::mse_loss", elementwise_loss_rule},
    {"aten::mse_loss_backward", elementwise_loss_rule},
    {"aten::smooth_l1_loss", elementwise_loss_rule},
    {"aten::smooth_l1_loss_backward", elementwise_loss_rule},
    {"aten::huber_loss", elementwise_loss_rule},
    {"aten::huber_loss_backward", elementwise_loss_rule},
    {"aten::soft_margin_loss", written_loss_rule<0>},
    {"aten::soft_margin_loss_backward", elementwise_loss_rule},
    {"aten::binary_cross_entropy", binary_cross_entropy_rule},
    {"aten::binary_cross_entropy_backward", elementwise_loss_rule},
    {"aten::binary_cross_entropy_with_logits", written_loss_rule<1>},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  for (const char* op :
       {"mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&loss_function>());
  }
}

} // namespace shardtensor::detail
