#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/rule.h"

namespace shardtensor::detail {
namespace {

/// Fused optimizer steps take one list of parameters and lists of as many
/// gradients and states. Each parameter keeps its layout and the others of its
/// place in the lists follow, in memory, too: kernels go through all as one.
Decision fused_step_rule(Call& call) {
  std::vector<SpecPtr> parameters; // the first operands
  for (const auto& operand : call.operands()) {
    if (operand.argument == 0) {
      parameters.push_back(operand.spec);
    }
  }
  Decision decision;
  size_t argument = 0;
  size_t place = 0;
  for (const auto& operand : call.operands()) {
    place = operand.argument == argument ? place : 0;
    argument = operand.argument;
    const bool listed = call.argument(argument).isTensorList();
    const auto index = place++;
    decision.lies_as.push_back(decision.lies_as.size());
    if (!operand.spec || !listed || index >= parameters.size()) {
      decision.inputs.push_back(operand.spec);
      continue;
    }
    const auto& parameter = parameters[index];
    const bool alike = parameter && parameter->sizes() == operand.spec->sizes();
    decision.inputs.push_back(alike ? parameter : replicated(operand.spec));
    if (alike) {
      decision.lies_as.back() = index;
    }
  }
  return decision;
}

const RegisterRules fused_steps{
    fused_step_rule,
    {
        "aten::_fused_adam_",
        "aten::_fused_adam_.tensor_lr",
        "aten::_fused_adamw_",
        "aten::_fused_adamw_.tensor_lr",
        "aten::_fused_sgd_",
        "aten::_fused_sgd_.tensor_lr",
        "aten::_fused_adagrad_",
    }};

/// What the compiler makes of addcmul_ and addcdiv_ with a value.
const RegisterRules compiled_steps{pointwise_rule, {"prims::fma"}};

} // namespace
} // namespace shardtensor::detail
