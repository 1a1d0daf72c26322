#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_set>

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/rules/fallback.h"
#include "shardtensor/rules/families.h"
#include "shardtensor/rules/function_level.h"
#include "shardtensor/rules/promotion.h"
#include "shardtensor/rules/unboxed.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;

/// Explicit composite operators whose own kernel is written in terms of other
/// operators on tensors: better than gathering.
bool decomposes(const c10::OperatorName& name) {
  return name.name.rfind("aten::_foreach_", 0) == 0;
}

// ---- dispatch level ---------------------------------------------------------

void dispatch_fallback(
    const OperatorHandle& op,
    DispatchKeySet,
    torch::jit::Stack* stack) {
  run_fallback(op, stack);
}

/// The kernel of an operator with a rule.
class RuleKernel : public c10::OperatorKernel {
 public:
  explicit RuleKernel(Rule rule) : rule_(rule) {}
  void operator()(
      const OperatorHandle& op,
      DispatchKeySet,
      torch::jit::Stack* stack) {
    run_rule(op, rule_, stack);
  }

 private:
  Rule rule_;
};

/// Everything that we registered operator by operator, kept for the life of
/// the process.
class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry();
    return *registry;
  }

  void add_rule(const std::string& op, Rule rule) {
    const auto dot = op.find('.');
    const c10::OperatorName name(
        op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1));
    TORCH_CHECK_VALUE(
        c10::Dispatcher::singleton().findSchema(name),
        "register_rule: there is no operator ",
        op);
    const auto* unboxed = find_unboxed(name);
    add(name,
        kDispatchKey,
        unboxed && unboxed->dispatch_level
            ? unboxed->dispatch_level(rule)
            : c10::KernelFunction::makeFromBoxedFunctor<RuleKernel>(
                  std::make_unique<RuleKernel>(rule)));
  }

  void add_unboxed_function_levels() {
    for (const auto& unboxed : unboxed_operators()) {
      add(unboxed.name, kFunctionKey, unboxed.function_level());
    }
  }

  /// A composite kernel that is explicit about autograd hides the backend
  /// fallback. Where it is implicit we must not register: its decomposition is
  /// what reaches us.
  void add_fallback_if_hidden(const c10::OperatorName& name) {
    if (known_.count(name)) {
      return;
    }
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    const auto has = [&](DispatchKey key) {
      return op->hasKernelForDispatchKey(key);
    };
    if (!op || has(kDispatchKey) || decomposes(name) ||
        has(DispatchKey::CompositeImplicitAutograd) ||
        !(has(DispatchKey::CompositeExplicitAutograd) ||
          has(DispatchKey::CompositeExplicitAutogradNonFunctional))) {
      return;
    }
    add(name,
        kDispatchKey,
        c10::KernelFunction::makeFromBoxedFunction<&dispatch_fallback>());
  }

 private:
  void add(
      const c10::OperatorName& name,
      DispatchKey key,
      c10::KernelFunction kernel) {
    if (key == kDispatchKey) {
      known_.insert(name);
    }
    handles_.push_back(
        c10::Dispatcher::singleton().registerImpl(
            name,
            key,
            std::move(kernel),
            std::nullopt,
            nullptr,
            "shardtensor"));
  }

  std::unordered_set<c10::OperatorName> known_;
  std::vector<c10::RegistrationHandleRAII> handles_;
};

// Note [Operators registered later]
// An operator that another library defines after us may have an explicit
// composite kernel. The listener notes its name; the function level, which
// every call passes first, registers what is pending.
std::mutex pending_mutex;
std::vector<c10::OperatorName> pending_names;
std::atomic<bool> has_pending{false};

class LateOperators : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const OperatorHandle& op) override {
    std::lock_guard<std::mutex> lock(pending_mutex);
    pending_names.push_back(op.operator_name());
    has_pending = true;
  }
  void onOperatorDeregistered(const OperatorHandle&) override {}
};

void register_pending() {
  std::vector<c10::OperatorName> names;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    names.swap(pending_names);
    has_pending = false;
  }
  for (const auto& name : names) {
    if (c10::Dispatcher::singleton().findSchema(name)) {
      Registry::instance().add_fallback_if_hidden(name);
    }
  }
}

void install() {
  RuleTable table;
  add_pointwise_rules(table);
  add_factory_rules(table);
  add_reduction_rules(table);
  add_matmul_rules(table);
  add_optimizer_rules(table);
  add_join_rules(table);
  add_along_dim_rules(table);
  add_indexing_rules(table);
  add_loss_rules(table);
  for (const auto& entry : table) {
    Registry::instance().add_rule(entry.op, entry.rule);
  }
  Registry::instance().add_unboxed_function_levels();
  // Existing operators are told to the listener at once; they are registered at
  // the first call, when every rule file has registered its own kernels.
  static const auto handle =
      c10::Dispatcher::singleton().addRegistrationListener(
          std::make_unique<LateOperators>());
}

// ---- function level ---------------------------------------------------------

MeshPtr mesh_in(const c10::IValue& value) {
  const auto mesh_of = [](const at::Tensor& tensor) -> MeshPtr {
    return is_shard_tensor(tensor) ? spec(tensor)->mesh() : nullptr;
  };
  if (value.isTensor()) {
    return mesh_of(value.toTensor());
  }
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (auto mesh = mesh_of(tensor)) {
        return mesh;
      }
    }
  }
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor :
         value.toOptionalTensorList()) {
      if (auto mesh = tensor ? mesh_of(*tensor) : nullptr) {
        return mesh;
      }
    }
  }
  return nullptr;
}

/// 0-d tensors without grad are scalars; all others become ShardTensors, or
/// their gradients would leave the sharded graph.
bool must_promote(const at::Tensor& tensor) {
  return tensor.defined() && !is_shard_tensor(tensor) &&
      (tensor.dim() > 0 || tensor.requires_grad());
}

void keep_gradient_layouts(const c10::IValue& value) {
  const auto visit = [](const at::Tensor& tensor) {
    if (is_shard_tensor(tensor) && tensor.requires_grad()) {
      keep_gradient_layout(tensor);
    }
  };
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  }
}

void promote_value(
    c10::IValue& value,
    const MeshPtr& mesh,
    const OperatorHandle& op) {
  const auto promoted = [&](const at::Tensor& tensor) {
    return must_promote(tensor)
        ? promote_operand(tensor, mesh, c10::toString(op.operator_name()))
        : tensor;
  };
  if (value.isTensor()) {
    if (must_promote(value.toTensor())) {
      value = promoted(value.toTensor());
    }
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    if (std::any_of(tensors.begin(), tensors.end(), must_promote)) {
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), promoted);
      value = c10::List<at::Tensor>(tensors);
    }
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor :
         value.toOptionalTensorList()) {
      list.push_back(tensor ? std::make_optional(promoted(*tensor)) : tensor);
    }
    value = std::move(list);
  }
}

/// In-place and out= arguments must not be promoted: what is written into the
/// wrapper would be lost to the plain tensor.
void check_not_written(const OperatorHandle& op, size_t index) {
  const auto& argument = op.schema().arguments()[index];
  TORCH_CHECK_TYPE(
      !(argument.alias_info() && argument.alias_info()->isWrite()),
      c10::toString(op.operator_name()),
      ": cannot write the result of an operator on ShardTensors into the "
      "plain tensor '",
      argument.name(),
      "'; make it a ShardTensor, or use full_tensor() or to_local()");
}

void function_fallback(
    const OperatorHandle& op,
    DispatchKeySet keys,
    torch::jit::Stack* stack) {
  run_below_function_level(op, keys, stack);
}

} // namespace

void run_below_function_level(
    const OperatorHandle& op,
    DispatchKeySet keys,
    torch::jit::Stack* stack) {
  if (has_pending) {
    register_pending();
  }
  const auto count = op.schema().arguments().size();
  const auto base = stack->size() - count;
  const bool transformed = keys.has(DispatchKey::FuncTorchGradWrapper) ||
      keys.has(DispatchKey::FuncTorchBatched);
  MeshPtr mesh;
  for (size_t i = base; i < stack->size() && !mesh && !transformed; ++i) {
    mesh = mesh_in((*stack)[i]);
  }
  for (size_t i = 0; i < count && mesh; ++i) {
    auto& value = (*stack)[base + i];
    if (value.isTensor() && must_promote(value.toTensor())) {
      check_not_written(op, i);
    }
    promote_value(value, mesh, op);
    if (c10::GradMode::is_enabled()) {
      keep_gradient_layouts(value);
    }
  }
  ViewReplay replay;
  op.redispatchBoxed(below_function_level(keys), stack);
}

void register_rule(const std::string& op, Rule rule) {
  Registry::instance().add_rule(op, rule);
}

MeshPtr common_mesh(const char* op, at::ArrayRef<at::Tensor> tensors) {
  MeshPtr mesh;
  for (const auto& tensor : tensors) {
    if (!is_shard_tensor(tensor)) {
      continue;
    }
    TORCH_CHECK_VALUE(
        !mesh || mesh == spec(tensor)->mesh(),
        op,
        ": expected all ShardTensors on one mesh, got ",
        *mesh,
        " and ",
        *spec(tensor)->mesh());
    mesh = spec(tensor)->mesh();
  }
  TORCH_CHECK_TYPE(mesh, op, ": expected at least one ShardTensor");
  return mesh;
}

TORCH_LIBRARY_IMPL(_, SHARDTENSOR_DISPATCH_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch_fallback>());
}

TORCH_LIBRARY_IMPL(_, SHARDTENSOR_FUNCTION_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&function_fallback>());
}

namespace {
const bool installed = (install(), true);
} // namespace

} // namespace shardtensor
