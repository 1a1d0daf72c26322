#include <unordered_map>

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <c10/util/hash.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/rules/rule.h"
#include "shardtensor/tensor/redistribute.h"

namespace shardtensor {
namespace {

// ---- decisions are cached by operator, specs and plain arguments ------------

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    size_t hash = key.size();
    for (const int64_t value : key) {
      hash = c10::hash_combine(hash, std::hash<int64_t>()(value));
    }
    return hash;
  }
};

int64_t bits(double value) {
  int64_t result;
  static_assert(sizeof(result) == sizeof(value));
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

/// Appends a plain argument; false when it cannot be part of a key.
bool append(Key& key, const c10::IValue& value) {
  if (value.isNone()) {
    key.push_back(-1);
  } else if (value.isInt()) {
    key.insert(key.end(), {1, value.toInt()});
  } else if (value.isBool()) {
    key.insert(key.end(), {2, value.toBool()});
  } else if (value.isDouble()) {
    key.insert(key.end(), {3, bits(value.toDouble())});
  } else if (value.isIntList()) {
    const auto list = value.toIntList();
    key.insert(key.end(), {4, static_cast<int64_t>(list.size())});
    key.insert(key.end(), list.begin(), list.end());
  } else if (value.isBoolList()) {
    const auto list = value.toBoolList();
    key.insert(key.end(), {5, static_cast<int64_t>(list.size())});
    key.insert(key.end(), list.begin(), list.end());
  } else if (value.isString()) {
    const auto hash = std::hash<std::string>()(value.toStringRef());
    key.insert(key.end(), {6, static_cast<int64_t>(hash)});
  } else if (value.isDevice()) {
    key.insert(
        key.end(),
        {7,
         static_cast<int64_t>(value.toDevice().type()),
         value.toDevice().index()});
  } else {
    return value.isTensor() || value.isTensorList() ||
        value.isOptionalTensorList();
  }
  return true;
}

/// The positions of undefined tensors and of list ends count, too.
bool make_key(const Call& call, Rule rule, Key& key) {
  key.push_back(reinterpret_cast<int64_t>(rule));
  key.push_back(reinterpret_cast<int64_t>(&call.op().schema()));
  key.push_back(reinterpret_cast<int64_t>(call.mesh().get()));
  for (const auto& operand : call.operands()) {
    key.push_back(static_cast<int64_t>(operand.argument));
    key.push_back(reinterpret_cast<int64_t>(operand.spec.get()));
  }
  for (size_t i = 0; i < call.arguments(); ++i) {
    if (!append(key, call.argument(i))) {
      return false;
    }
  }
  return true;
}

struct Cached {
  std::shared_ptr<const Decision> decision;
  std::vector<SpecPtr> alive; // the key's addresses stay taken
  MeshPtr mesh;
};

std::shared_ptr<const Decision> decide(Call& call, Rule rule) {
  constexpr size_t kMaxDecisions = 8192;
  thread_local std::unordered_map<Key, Cached, KeyHash> cache;
  Key key;
  if (!make_key(call, rule, key)) {
    return std::make_shared<const Decision>(rule(call));
  }
  if (auto found = cache.find(key); found != cache.end()) {
    return found->second.decision;
  }
  if (cache.size() >= kMaxDecisions) {
    cache.clear();
  }
  Cached made{std::make_shared<const Decision>(rule(call)), {}, call.mesh()};
  for (const auto& operand : call.operands()) {
    made.alive.push_back(operand.spec);
  }
  auto decision = made.decision;
  cache.emplace(std::move(key), std::move(made));
  return decision;
}

// ---- local arguments --------------------------------------------------------

at::Tensor local_of(const Operand& operand) {
  return is_shard_tensor(operand.tensor) ? impl_of(operand.tensor)->local()
                                         : operand.tensor;
}

at::Tensor local_operand(const Operand& operand, const SpecPtr& wanted) {
  const auto local = local_of(operand);
  if (!operand.spec || !wanted || operand.spec == wanted) {
    return local;
  }
  if (operand.spec->sizes() != wanted->sizes()) {
    // An out= argument of another size: the operator makes it anew.
    TORCH_INTERNAL_ASSERT(operand.written);
    return at::empty({0}, local.options());
  }
  auto moved = redistribute_local(local, operand.spec, wanted);
  return operand.written && moved.is_alias_of(local) ? moved.clone() : moved;
}

/// Puts the local tensors in the place of the operands, list by list.
void replace_operands(
    torch::jit::Stack& stack,
    size_t base,
    const Call& call,
    const std::vector<at::Tensor>& locals) {
  size_t next = 0;
  for (size_t i = 0; i < call.arguments(); ++i) {
    auto& value = stack[base + i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        value = locals[next++];
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(tensor.defined() ? locals[next++] : tensor);
      }
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor :
           value.toOptionalTensorList()) {
        list.push_back(
            tensor && tensor->defined() ? locals[next++] : tensor);
      }
      value = std::move(list);
    }
  }
}

// ---- results ----------------------------------------------------------------

/// Brings what the local call wrote back into the wrapper that it was for.
void write_back(
    const Operand& operand,
    const at::Tensor& local,
    const SpecPtr& wanted,
    const SpecPtr& output) {
  if (!is_shard_tensor(operand.tensor)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        local.is_same(operand.tensor),
        "cannot write a sharded result into a plain tensor of sizes ",
        operand.tensor.sizes(),
        "; write into a ShardTensor or use full_tensor()");
    return;
  }
  auto* impl = impl_of(operand.tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !impl->is_view_copy(),
      "cannot write into this view of sizes ",
      operand.tensor.sizes(),
      ": its ShardTensor had to be redistributed to make it, so the two share "
      "no memory; redistribute first, or write into a clone()");
  const auto& result = output ? output : wanted ? wanted : impl->spec();
  if (impl->spec()->sizes() != result->sizes() ||
      (impl->spec()->has_partial() && impl->spec() != result) ||
      (local.is_same(impl->local()) && impl->spec() != result)) {
    impl->set(local, result);
  } else if (!local.is_same(impl->local())) {
    impl->local().copy_(redistribute_local(local, result, impl->spec()));
  } else if (impl->local().sizes() != at::IntArrayRef(result->local_sizes())) {
    impl->set(local, result);
  }
}

class Outputs {
 public:
  Outputs(const Call& call, const Decision& decision)
      : call_(call), decision_(decision) {}

  c10::IValue wrapped(const c10::IValue& value, bool is_view_copy) {
    if (value.isTensor()) {
      return value.toTensor().defined()
          ? wrapped(value.toTensor(), is_view_copy)
          : value;
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(
            tensor.defined() ? wrapped(tensor, is_view_copy) : tensor);
      }
      return list;
    }
    return value;
  }

  /// The spec of the next output, or null.
  SpecPtr take() {
    const auto index = next_++;
    return index < decision_.outputs.size() ? decision_.outputs[index]
                                            : nullptr;
  }

 private:
  at::Tensor wrapped(const at::Tensor& local, bool is_view_copy) {
    auto spec = take();
    if (!spec) {
      spec = make_replicated(call_.mesh(), local.sizes().vec());
    }
    auto result = wrap(local, spec);
    if (is_view_copy) {
      impl_of(result)->set_is_view_copy();
    }
    return result;
  }

  const Call& call_;
  const Decision& decision_;
  size_t next_ = 0;
};

/// True when a view operator's input was moved, so that the result is no view.
bool severs_view(const Call& call, const Decision& decision) {
  const auto& arguments = call.op().schema().arguments();
  for (size_t i = 0; i < decision.inputs.size(); ++i) {
    const auto& operand = call.operand(i);
    const auto* alias = arguments[operand.argument].alias_info();
    if (alias && !alias->isWrite() && decision.inputs[i] &&
        decision.inputs[i] != operand.spec) {
      return true;
    }
  }
  return false;
}

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

void finish(
    const Call& call,
    const Decision& decision,
    const std::vector<at::Tensor>& locals,
    torch::jit::Stack& stack) {
  const auto& returns = call.op().schema().returns();
  const auto first = stack.size() - returns.size();
  Outputs outputs(call, decision);
  const bool severed = severs_view(call, decision);
  std::vector<bool> handled(call.operands().size());
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = stack[first + i];
    const auto* alias = returns[i].alias_info();
    const auto* target =
        alias && alias->isWrite() ? written_operand(call, *alias) : nullptr;
    if (!target || !value.isTensor()) {
      value = outputs.wrapped(value, severed && alias);
      continue;
    }
    const auto index = static_cast<size_t>(target - call.operands().data());
    const auto wanted =
        decision.inputs.empty() ? nullptr : decision.inputs[index];
    write_back(*target, value.toTensor(), wanted, outputs.take());
    handled[index] = true;
    value = target->tensor;
  }
  for (size_t i = 0; i < call.operands().size(); ++i) {
    if (call.operand(i).written && !handled[i]) {
      const auto wanted =
          decision.inputs.empty() ? nullptr : decision.inputs[i];
      write_back(call.operand(i), locals[i], wanted, nullptr);
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
  std::vector<at::Tensor> locals;
  locals.reserve(call.operands().size());
  for (size_t i = 0; i < call.operands().size(); ++i) {
    locals.push_back(local_operand(
        call.operand(i),
        decision->inputs.empty() ? nullptr : decision->inputs[i]));
  }
  replace_operands(*stack, base, call, locals);
  for (const auto& [index, value] : decision->arguments) {
    (*stack)[base + index] = value;
  }
  op.callBoxed(stack);
  finish(call, *decision, locals, *stack);
}

} // namespace shardtensor
