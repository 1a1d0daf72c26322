#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/ForeachUtils.h>
#include <torch/library.h>

#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"

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

/// The host reads the factors of a list, one for each place, from a tensor.
void read_factors(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto factors = torch::jit::pop(*stack).toTensor();
  const auto places = (*stack)[stack->size() - 3].toTensorList().size();
  const auto numbers = at::native::convert_tensor_to_scalar_list(
      is_shard_tensor(factors) ? full_tensor(factors) : factors,
      static_cast<int64_t>(places));
  stack->emplace_back(c10::List<at::Scalar>(at::ArrayRef<at::Scalar>(numbers)));
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(op.schema().name().c_str(), "ScalarList")
      .callBoxed(stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  for (const auto* op :
       {"_foreach_addcdiv.Tensor",
        "_foreach_addcdiv_.Tensor",
        "_foreach_addcmul.Tensor",
        "_foreach_addcmul_.Tensor"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&read_factors>());
  }
}

} // namespace shardtensor::detail
