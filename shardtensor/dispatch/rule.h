#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "shardtensor/dispatch/call.h"

namespace shardtensor {

// A dispatch-level rule says, from layouts alone, in which layout an operator's
// local call needs its inputs and in which layout its outputs are then. It is
// a pure function, its answer is cached. ATen's own derivative formulas run
// above it, so rules have no backward of their own.

/// The strides of a new tensor of `sizes` that `call` makes, none for a
/// contiguous one: see Note [Nominal strides].
using StridesOf = std::vector<int64_t> (*)(
    const Call& call,
    const std::vector<int64_t>& sizes);

/// What a rule decides.
struct Decision {
  /// One per operand: the layout the local call needs it in; null leaves it as
  /// it is.
  std::vector<SpecPtr> inputs;
  /// One per output tensor, one after the other. None at all: Replicate, of the
  /// sizes that the local call gives.
  std::vector<SpecPtr> outputs;
  /// Arguments to replace in the local call: global sizes made local, say.
  std::vector<std::pair<size_t, c10::IValue>> arguments;
  /// One per output tensor, or none at all: strides_of tells.
  std::vector<std::vector<int64_t>> strides = {};
  /// How outputs lie in memory (dispatch/nominal_strides.h). Null: channels
  /// last if a ShardTensor among the operands does.
  StridesOf strides_of = nullptr;
  /// What the outputs are, and what a derivative makes of them, depends on
  /// whether an input is contiguous: local matrices lie in memory as it shows.
  bool reads_order = false;
  /// Per operand the one by whose strides its local tensor must lie, or itself;
  /// empty: the kernel takes any.
  std::vector<size_t> lies_as = {};
  /// The inputs move because the operator cannot work in their layout: counted
  /// and said as a fallback is.
  bool is_repair = false;
  /// Null, or the layout of the values that the local call may refuse: see
  /// Note [Errors by value].
  SpecPtr refuses_values = nullptr;
  /// The call looks at values that lie on other devices, too.
  bool refuses_on_devices = false;
};

using Rule = Decision (*)(Call& call);

struct RuleEntry {
  const char* op; // "aten::add.Tensor"
  Rule rule;
};

/// The twin of TORCH_LIBRARY_IMPL for these rules. At namespace scope:
///   const RegisterRules products{{"aten::mm", mm_rule}, ...};
///   const RegisterRules scans{along_dim_rule, {"aten::cumsum", ...}};
/// An ATen operator that this version of PyTorch doesn't have is left out; one
/// of "prims", which PyTorch's compiler defines, gets its rule when it comes.
struct RegisterRules {
  RegisterRules(std::initializer_list<RuleEntry> entries);
  RegisterRules(Rule rule, std::initializer_list<const char*> operators);
};

/// Gives an operator a dispatch-level rule: pointwise_rule (labels.h),
/// index_rule (rules/index/rules.h), or your own. For operators outside this
/// library, at any time. Raises for an operator that does not exist or has a
/// rule already.
/// Function-level rules need no call of ours: TORCH_LIBRARY_IMPL(my_library,
/// SHARDTENSOR_FUNCTION_KEY, m) { m.impl("op", rule); }
void register_rule(const std::string& op, Rule rule);

/// Runs a call on the stack by a rule: redistributes the inputs, calls the
/// operator on local tensors, wraps what comes back.
void run_rule(
    const c10::OperatorHandle& op,
    Rule rule,
    torch::jit::Stack* stack);

} // namespace shardtensor
