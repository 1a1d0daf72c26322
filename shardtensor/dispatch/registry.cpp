#include "shardtensor/dispatch/registry.h"

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/constants.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/functional_form.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/dispatch/unboxed.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {

using namespace detail;
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using c10::OperatorName;

/// Explicit composite operators whose own kernel is written in terms of other
/// operators on tensors: better than gathering.
bool decomposes(const OperatorName& name) {
  return name.name.rfind("aten::_foreach_", 0) == 0;
}

// ---- dispatch level ---------------------------------------------------------

/// Note [Function level left out]
/// Calls from __torch_dispatch__ (DTensor's, on local tensors that are
/// ShardTensors) come with all keys above Python's excluded: straight to the
/// dispatch level. An operator that only the function level knows is sent up
/// there, and those that its rule is made of begin there, too.
bool is_left_out(const OperatorHandle& op) {
  return function_level_is_left_out() &&
      op.hasKernelForDispatchKey(kFunctionKey);
}

class OnFunctionLevel {
 public:
  OnFunctionLevel() {
    c10::impl::tls_set_dispatch_key_excluded(kFunctionKey, false);
  }
  ~OnFunctionLevel() {
    c10::impl::tls_set_dispatch_key_excluded(kFunctionKey, true);
  }
  OnFunctionLevel(const OnFunctionLevel&) = delete;
  OnFunctionLevel& operator=(const OnFunctionLevel&) = delete;
};

void run_on_function_level(const OperatorHandle& op, torch::jit::Stack* stack) {
  const OnFunctionLevel guard;
  const at::NoGradGuard no_grad; // autograd is above
  op.redispatchBoxed(DispatchKeySet({kFunctionKey, kDispatchKey}), stack);
}

void dispatch_fallback(
    const OperatorHandle& op,
    DispatchKeySet,
    torch::jit::Stack* stack) {
  register_late_operators(); // where the function level was left out ever since
  if (is_left_out(op)) {
    run_on_function_level(op, stack);
    return;
  }
  if (!run_functional_form(op, stack)) {
    run_fallback(op, stack);
  }
}

/// The kernel of an operator with a rule.
class RuleKernel : public c10::OperatorKernel {
 public:
  explicit RuleKernel(Rule rule) : rule_(rule) {}
  void operator()(
      const OperatorHandle& op,
      DispatchKeySet,
      torch::jit::Stack* stack) {
    if (writes_constant(op, *stack) && run_functional_form(op, stack)) {
      return;
    }
    run_rule(op, rule_, stack);
  }

 private:
  Rule rule_;
};

/// Everything that we registered operator by operator, kept for the life of
/// the process.
class Registry {
  using Lock = std::lock_guard<std::mutex>;

 public:
  static Registry& instance() {
    static auto* registry = new Registry();
    return *registry;
  }

  void add_rule(const std::string& op, Rule rule) {
    const auto name = parse_operator_name(op);
    const Lock lock(mutex_);
    TORCH_CHECK_VALUE(
        c10::Dispatcher::singleton().findSchema(name),
        "register_rule: there is no operator ",
        op);
    TORCH_CHECK_VALUE(
        rules_.emplace(name, rule).second,
        "register_rule: ",
        op,
        " has a rule already");
    place_rule(name);
  }

  void add_table_rule(const std::string& op, Rule rule) {
    const auto name = parse_operator_name(op);
    const bool absent = !c10::Dispatcher::singleton().findSchema(name);
    if (absent && name.getNamespace() == "aten") {
      absent_.insert(op);
    } else if (absent && name.getNamespace() == "prims") {
      late_rules_.emplace(name, rule);
    } else {
      add_rule(op, rule);
    }
  }

  void add_elementwise(const OperatorName& name) {
    const Lock lock(mutex_);
    elementwise_.insert(name);
  }

  bool is_elementwise(const OperatorName& name) const {
    const Lock lock(mutex_);
    return elementwise_.count(name) > 0;
  }

  const std::set<std::string>& absent() const {
    return absent_;
  }

  void add_unboxed(const UnboxedOperator& unboxed) {
    const Lock lock(mutex_);
    function_level_.emplace_back(
        registered(unboxed.name, kFunctionKey, unboxed.function_level()));
    unboxed_.emplace(unboxed.name, unboxed);
    if (rules_.count(unboxed.name)) {
      place_rule(unboxed.name);
    }
  }

  bool has_unboxed(const OperatorName& name) const {
    const Lock lock(mutex_);
    return unboxed_.count(name) > 0;
  }

  bool is_gathered(const OperatorName& name) const {
    const Lock lock(mutex_);
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    const auto has = [&](DispatchKey key) {
      return op->hasKernelForDispatchKey(key);
    };
    const bool hidden = dispatch_level_.count(name) && !rules_.count(name);
    return op && !has(kFunctionKey) && (hidden || !has(kDispatchKey)) &&
        !has(DispatchKey::CompositeImplicitAutograd) && !decomposes(name);
  }

  /// A rule that waits for its operator.
  void add_late_rule(const OperatorName& name) {
    const Lock lock(mutex_);
    const auto late = late_rules_.find(name);
    if (late != late_rules_.end() && rules_.insert(*late).second) {
      place_rule(name);
    }
  }

  /// A composite kernel that is explicit about autograd hides the backend
  /// fallback. Where it is implicit we must not register: its decomposition is
  /// what reaches us.
  void add_fallback_if_hidden(const OperatorName& name) {
    const Lock lock(mutex_);
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
    dispatch_level_.emplace(
        name,
        registered(
            name,
            kDispatchKey,
            c10::KernelFunction::makeFromBoxedFunction<&dispatch_fallback>()));
  }

 private:
  /// Rule and typed kernel come in any order; the second to come replaces what
  /// the first put here.
  void place_rule(const OperatorName& name) {
    const auto rule = rules_.at(name);
    const auto unboxed = unboxed_.find(name);
    const bool typed =
        unboxed != unboxed_.end() && unboxed->second.dispatch_level;
    dispatch_level_.erase(name);
    dispatch_level_.emplace(
        name,
        registered(
            name,
            kDispatchKey,
            typed ? unboxed->second.dispatch_level(rule)
                  : c10::KernelFunction::makeFromBoxedFunctor<RuleKernel>(
                        std::make_unique<RuleKernel>(rule))));
  }

  static c10::RegistrationHandleRAII registered(
      const OperatorName& name,
      DispatchKey key,
      c10::KernelFunction kernel) {
    return c10::Dispatcher::singleton().registerImpl(
        name, key, std::move(kernel), std::nullopt, nullptr, "shardtensor");
  }

  mutable std::mutex mutex_; // rules come at any time
  std::unordered_map<OperatorName, Rule> rules_;
  std::unordered_map<OperatorName, Rule> late_rules_;
  std::unordered_set<OperatorName> elementwise_;
  std::set<std::string> absent_;
  std::unordered_map<OperatorName, UnboxedOperator> unboxed_;
  std::unordered_map<OperatorName, c10::RegistrationHandleRAII> dispatch_level_;
  std::vector<c10::RegistrationHandleRAII> function_level_;
};

std::mutex pending_mutex;
std::vector<OperatorName> pending_names;
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
  // Other calls wait here until all are registered. Not for pending_mutex: the
  // dispatcher tells of new operators under its own lock, which registering
  // takes.
  static std::mutex registering;
  const std::lock_guard<std::mutex> others_wait(registering);
  std::vector<OperatorName> names;
  {
    const std::lock_guard<std::mutex> lock(pending_mutex);
    names.swap(pending_names);
  }
  for (const auto& name : names) {
    Registry::instance().add_late_rule(name);
    Registry::instance().add_fallback_if_hidden(name);
  }
  const std::lock_guard<std::mutex> lock(pending_mutex);
  has_pending = !pending_names.empty();
}

// Existing operators are told to the listener at once; they are registered at
// the first call, when every file has registered its own kernels.
const auto listening = c10::Dispatcher::singleton().addRegistrationListener(
    std::make_unique<LateOperators>());

} // namespace

OperatorName detail::parse_operator_name(const std::string& op) {
  const auto dot = op.find('.');
  return {
      op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1)};
}

bool detail::has_unboxed_kernel(const OperatorName& name) {
  return Registry::instance().has_unboxed(name);
}

bool detail::is_gathered(const OperatorName& name) {
  return Registry::instance().is_gathered(name);
}

void detail::note_elementwise(const std::string& op) {
  Registry::instance().add_elementwise(parse_operator_name(op));
}

bool detail::is_elementwise(const OperatorName& name) {
  return Registry::instance().is_elementwise(name);
}

const std::set<std::string>& detail::absent_operators() {
  return Registry::instance().absent();
}

void detail::register_late_operators() {
  if (has_pending) {
    register_pending();
  }
}

void register_rule(const std::string& op, Rule rule) {
  Registry::instance().add_rule(op, rule);
}

RegisterRules::RegisterRules(std::initializer_list<RuleEntry> entries) {
  for (const auto& entry : entries) {
    Registry::instance().add_table_rule(entry.op, entry.rule);
  }
}

RegisterRules::RegisterRules(
    Rule rule,
    std::initializer_list<const char*> operators) {
  for (const char* op : operators) {
    Registry::instance().add_table_rule(op, rule);
  }
}

detail::RegisterUnboxed::RegisterUnboxed(
    std::initializer_list<UnboxedOperator> operators) {
  for (const auto& unboxed : operators) {
    Registry::instance().add_unboxed(unboxed);
  }
}

TORCH_LIBRARY_IMPL(_, SHARDTENSOR_DISPATCH_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch_fallback>());
}

} // namespace shardtensor
