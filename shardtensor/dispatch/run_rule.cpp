#include <algorithm>

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "shardtensor/dispatch/arguments/overlap.h"
#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/dispatch/raise_together.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/tensor/redistribute.h"

namespace shardtensor {

using namespace detail;
namespace {

// ---- decisions are cached by operator, specs and plain arguments ------------

/// Appends a plain argument; false when it cannot be part of a key.
bool append(PlanKey& key, const c10::IValue& value) {
  const auto add = [&](int64_t tag) -> PlanKey& { return key.add(tag); };
  if (value.isNone()) {
    add(0);
  } else if (value.isInt()) {
    add(1).add(value.toInt());
  } else if (value.isBool()) {
    add(2).add(static_cast<int64_t>(value.toBool()));
  } else if (value.isDouble()) {
    add(3).add(value.toDouble());
  } else if (value.isIntList()) {
    add(4).add(value.toDimVector());
  } else if (value.isBoolList()) {
    const auto list = value.toBoolList();
    add(5).add(std::vector<int64_t>(list.begin(), list.end()));
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    add(6).add(std::vector<int64_t>(text.begin(), text.end()));
  } else if (value.isDevice()) {
    add(7)
        .add(static_cast<int64_t>(value.toDevice().type()))
        .add(static_cast<int64_t>(value.toDevice().index()));
  } else if (value.isTensor()) {
    add(8).add(static_cast<int64_t>(value.toTensor().defined()));
  } else if (value.isTensorList()) {
    add(9).add(static_cast<int64_t>(value.toTensorList().size()));
  } else if (value.isOptionalTensorList()) {
    // x[i] and x[:, i] differ in what is left out.
    add(10);
    for (const std::optional<at::Tensor> tensor :
         value.toOptionalTensorList()) {
      add(tensor && tensor->defined());
    }
  } else {
    return false;
  }
  return true;
}

/// The positions of undefined tensors and of list ends count, too.
bool make_key(const Call& call, Rule rule, PlanKey& key) {
  key.add(reinterpret_cast<int64_t>(rule))
      .add(reinterpret_cast<int64_t>(&call.op().schema()));
  const bool terms =
      std::ranges::any_of(call.operands(), [](const Operand& operand) {
        return operand.spec && operand.spec->has_partial();
      });
  for (const auto& operand : call.operands()) {
    // Masks and numbers index differently: the dtype counts. So does the
    // device, whose kernels may give other results beside the one that is asked
    // for.
    const auto device = static_cast<int64_t>(operand.tensor.device().type());
    key.add(
           (static_cast<int64_t>(operand.argument) * 64 + device) * 256 +
           static_cast<int64_t>(operand.tensor.scalar_type()))
        .add(operand.spec);
    if (terms && !operand.spec) {
      key.add(static_cast<int64_t>(factor_kind(operand)));
    }
  }
  for (size_t i = 0; i < call.arguments(); ++i) {
    if (!append(key, call.argument(i))) {
      return false;
    }
  }
  return true;
}

std::shared_ptr<const Decision> decide(Call& call, Rule rule) {
  static PlanCache<Decision> decisions;
  PlanKey key;
  if (!make_key(call, rule, key)) {
    return std::make_shared<const Decision>(rule(call));
  }
  return decisions.find(key, [&] { return rule(call); });
}

// ---- local arguments --------------------------------------------------------

at::Tensor local_operand(const Operand& operand, const SpecPtr& wanted) {
  if (operand.written && is_shard_tensor(operand.tensor)) {
    impl_of(operand.tensor)->separate_elements();
  }
  const auto local = is_shard_tensor(operand.tensor)
      ? impl_of(operand.tensor)->local()
      : operand.tensor;
  if (!wanted || operand.spec == wanted) {
    return local;
  }
  if (!operand.spec) {
    return wanted->dim() > 0
        ? local
        : redistribute_local(
              local, make_replicated(wanted->mesh(), {}), wanted);
  }
  if (operand.spec->sizes() != wanted->sizes()) {
    // An out= argument of another size: the operator makes it anew.
    TORCH_INTERNAL_ASSERT(operand.written);
    return at::empty({0}, local.options());
  }
  const auto format = is_shard_tensor(operand.tensor)
      ? operand.tensor.suggest_memory_format()
      : at::MemoryFormat::Contiguous; // ranks may hold it differently
  auto moved = redistribute_local(local, operand.spec, wanted, format);
  return operand.written && moved.is_alias_of(local) ? moved.clone() : moved;
}

/// See Decision::reads_order.
at::Tensor as_shown(const at::Tensor& local, const at::Tensor& tensor) {
  if (local.dim() < 2 || local.is_contiguous() == tensor.is_contiguous()) {
    return local;
  }
  return tensor.is_contiguous() ? local.contiguous()
                                : local.mT().contiguous().mT();
}

/// Puts the local tensors in the place of the operands.
void replace_operands(
    torch::jit::Stack& stack,
    size_t base,
    const std::vector<at::Tensor>& locals) {
  auto next = locals.begin();
  for (size_t i = base; i < stack.size(); ++i) {
    stack[i] =
        with_tensors(stack[i], [&](const at::Tensor&) { return *next++; });
  }
}

// ---- results ----------------------------------------------------------------

/// Brings what the local call wrote back into the wrapper that it was for.
/// `strides_of` a result of other sizes.
void write_back(
    const Operand& operand,
    const at::Tensor& local,
    const SpecPtr& wanted,
    const SpecPtr& output,
    c10::function_ref<std::vector<int64_t>(const ShardSpec&)> strides_of) {
  if (!is_shard_tensor(operand.tensor)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        local.is_same(operand.tensor),
        "cannot write a sharded result into a plain tensor of sizes ",
        operand.tensor.sizes(),
        "; write into a ShardTensor or use full_tensor()");
    return;
  }
  auto* impl = impl_of(operand.tensor);
  auto result = output ? output : wanted ? wanted : impl->spec();
  if (!output && !result->is_sharded() && !result->has_partial() &&
      local.sizes() != at::IntArrayRef(result->sizes())) {
    // An out= argument of another size, which the operator has resized.
    result = make_replicated(result->mesh(), local.sizes().vec());
  }
  const bool keeps_sizes = impl->spec()->sizes() == result->sizes();
  const bool changed_in_place = local.is_same(impl->local()) &&
      (impl->spec() != result ||
       local.sizes() != at::IntArrayRef(result->local_sizes()));
  if (keeps_sizes && !changed_in_place) {
    write_local(operand.tensor, local, result);
    return;
  }
  impl->set(
      local,
      result,
      keeps_sizes ? operand.tensor.strides().vec() : strides_of(*result));
  note_written(operand.tensor);
}

/// The operand that a view operator looks at; null for other operators.
const Operand* viewed_operand(const Call& call) {
  const auto& returns = call.op().schema().returns();
  const auto* returned = returns.empty() ? nullptr : returns[0].alias_info();
  if (!returned || returned->isWrite()) {
    return nullptr;
  }
  for (const auto& operand : call.operands()) {
    const auto& argument = call.op().schema().arguments()[operand.argument];
    if (argument.alias_info() && is_shard_tensor(operand.tensor)) {
      return &operand;
    }
  }
  return nullptr;
}

/// What a call works on: one local tensor per operand.
struct Locals {
  std::vector<at::Tensor> tensors;
  const Operand* viewed = nullptr;
  ViewSource source; // of `viewed`
};

class Outputs {
 public:
  Outputs(const Call& call, const Decision& decision, const Locals& locals)
      : call_(call), decision_(decision), locals_(locals) {}

  c10::IValue wrapped(const c10::IValue& value) {
    if (value.isTensor()) {
      return value.toTensor().defined() ? wrapped(value.toTensor()) : value;
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(tensor.defined() ? wrapped(tensor) : tensor);
      }
      return list;
    }
    return value;
  }

  /// Of an output that is a new tensor.
  std::vector<int64_t> strides(size_t index, const ShardSpec& spec) const {
    return index < decision_.strides.size()
        ? decision_.strides[index]
        : nominal_strides(call_, decision_.strides_of, spec.sizes());
  }
  /// The spec of the next output, or null.
  SpecPtr take() {
    const auto index = next_++;
    return index < decision_.outputs.size() ? decision_.outputs[index]
                                            : nullptr;
  }

 private:
  at::Tensor wrapped(const at::Tensor& local) {
    const auto index = next_;
    auto spec = take();
    if (!spec) {
      spec = make_replicated(call_.mesh(), local.sizes().vec());
    }
    if (!locals_.viewed) {
      return wrap(local, spec, strides(index, *spec));
    }
    const auto& tensor = locals_.viewed->tensor;
    const auto strides = tensor.sizes() == at::IntArrayRef(spec->sizes())
        ? tensor.strides()
        : at::IntArrayRef();
    return wrap_view(local, spec, strides, tensor, locals_.source);
  }

  const Call& call_;
  const Decision& decision_;
  const Locals& locals_;
  size_t next_ = 0;
};

/// The operand that a written return value stands for.
const Operand* written_operand(
    const Call& call,
    const c10::AliasInfo& returned) {
  const auto& arguments = call.op().schema().arguments();
  for (const auto& operand : call.operands()) {
    const auto* alias = arguments[operand.argument].alias_info();
    if (alias && alias->isWrite() &&
        alias->beforeSets() == returned.beforeSets()) {
      return &operand;
    }
  }
  return nullptr;
}

SpecPtr wanted_of(const Decision& decision, size_t operand) {
  return decision.inputs.empty() ? nullptr : decision.inputs[operand];
}

void finish(
    const Call& call,
    const Decision& decision,
    const Locals& locals,
    torch::jit::Stack& stack) {
  const auto& returns = call.op().schema().returns();
  const auto first = stack.size() - returns.size();
  Outputs outputs(call, decision, locals);
  std::vector<bool> handled(call.operands().size());
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = stack[first + i];
    const auto* alias = returns[i].alias_info();
    const auto* target =
        alias && alias->isWrite() ? written_operand(call, *alias) : nullptr;
    if (!target || !value.isTensor()) {
      value = outputs.wrapped(value);
      continue;
    }
    const auto index = static_cast<size_t>(target - call.operands().data());
    write_back(
        *target,
        value.toTensor(),
        wanted_of(decision, index),
        outputs.take(),
        [&](const ShardSpec& spec) { return outputs.strides(i, spec); });
    handled[index] = true;
    value = target->tensor;
  }
  for (size_t i = 0; i < call.operands().size(); ++i) {
    if (call.operand(i).written && !handled[i]) {
      write_back(
          call.operand(i),
          locals.tensors[i],
          wanted_of(decision, i),
          nullptr,
          [](const ShardSpec&) { return std::vector<int64_t>(); });
    }
  }
}

/// See Note [Overlap].
void keep_apart(const Call& call, Locals& locals) {
  if (!call.op().schema().is_mutable()) {
    return;
  }
  for (size_t i = 0; i < locals.tensors.size(); ++i) {
    for (size_t j = 0; j < locals.tensors.size(); ++j) {
      if (call.operand(i).written && !call.operand(j).written) {
        locals.tensors[j] =
            readable_beside(locals.tensors[j], locals.tensors[i]);
      }
    }
  }
}

/// See Decision::lies_as. What is written comes back as what was moved does.
void lay_alike(const Decision& decision, Locals& locals) {
  for (size_t i = 0; i < decision.lies_as.size(); ++i) {
    auto& local = locals.tensors[i];
    const auto strides = locals.tensors[decision.lies_as[i]].strides();
    if (local.strides() != strides) {
      local = at::empty_strided(local.sizes(), strides, local.options())
                  .copy_(local);
    }
  }
}

Locals local_operands(const Call& call, const Decision& decision) {
  Locals locals;
  locals.viewed = viewed_operand(call);
  locals.tensors.reserve(call.operands().size());
  for (size_t i = 0; i < call.operands().size(); ++i) {
    const auto& operand = call.operand(i);
    const auto wanted = wanted_of(decision, i);
    if (&operand == locals.viewed) {
      locals.source = view_source(operand.tensor, wanted);
      locals.tensors.push_back(locals.source.local);
    } else {
      const auto local = local_operand(operand, wanted);
      locals.tensors.push_back(
          decision.reads_order ? as_shown(local, operand.tensor) : local);
    }
  }
  keep_apart(call, locals);
  lay_alike(decision, locals);
  return locals;
}

/// Kernels look at values where the host can, and some wherever they are.
bool sees_values(const Locals& locals, const Decision& decision) {
  return std::all_of(
      locals.tensors.begin(), locals.tensors.end(), [&](const auto& local) {
        return (local.is_cpu() || decision.refuses_on_devices) &&
            !has_no_values(local);
      });
}

void note_repairs(const Call& call, const Decision& decision) {
  for (size_t i = 0; i < decision.inputs.size(); ++i) {
    const auto& operand = call.operand(i);
    if (operand.spec && decision.inputs[i] &&
        decision.inputs[i] != operand.spec && operand.spec->is_sharded()) {
      note_fallback(call.name(), operand.spec, decision.inputs[i]);
    }
  }
}

} // namespace

void run_rule(
    const c10::OperatorHandle& op,
    Rule rule,
    torch::jit::Stack* stack) {
  const auto base = stack->size() - op.schema().arguments().size();
  // The call keeps its own view of the arguments while the stack changes.
  const torch::jit::Stack arguments(
      stack->begin() + static_cast<int64_t>(base), stack->end());
  Call call(op, arguments);
  const auto decision = decide(call, rule);
  if (decision->is_repair) {
    note_repairs(call, *decision);
  }
  const auto locals = local_operands(call, *decision);
  replace_operands(*stack, base, locals.tensors);
  for (const auto& [index, value] : decision->arguments) {
    (*stack)[base + index] = value;
  }
  if (decision->refuses_values && sees_values(locals, *decision)) {
    raise_together(
        call.name(),
        decision->refuses_values,
        [&] { op.callBoxed(stack); },
        locals.tensors.front().device());
  } else {
    op.callBoxed(stack);
  }
  finish(call, *decision, locals, *stack);
}

} // namespace shardtensor
