#include "shardtensor/dispatch/handlers.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "shardtensor/dispatch/registry.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {

using namespace detail;
namespace {

using c10::DispatchKeySet;
using c10::OperatorHandle;
using c10::OperatorName;

/// The kernel that takes the place of the operator's own for as long as it is
/// registered.
class HandlerKernel : public c10::OperatorKernel {
 public:
  HandlerKernel(Handler handler, c10::SafeKernelFunction built_in)
      : handler_(std::move(handler)), built_in_(std::move(built_in)) {}

  void operator()(
      const OperatorHandle& op,
      DispatchKeySet keys,
      torch::jit::Stack* stack) {
    if (is_running()) {
      built_in_.callBoxed(op, keys, stack);
      return;
    }
    const Running guard(this);
    const at::NoGradGuard no_grad; // autograd is above
    handler_(op, stack);
  }

 private:
  /// The handlers that this thread is in, one inside the other.
  struct Running {
    explicit Running(const HandlerKernel* kernel)
        : kernel(kernel), outer(std::exchange(innermost, this)) {}
    ~Running() {
      innermost = outer;
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    const HandlerKernel* kernel;
    const Running* outer;
  };
  static thread_local const Running* innermost;

  bool is_running() const {
    for (const auto* at = innermost; at; at = at->outer) {
      if (at->kernel == this) {
        return true;
      }
    }
    return false;
  }

  Handler handler_;
  c10::SafeKernelFunction built_in_;
};

thread_local const HandlerKernel::Running* HandlerKernel::innermost = nullptr;

struct Handlers {
  std::mutex mutex;
  std::unordered_map<OperatorName, c10::RegistrationHandleRAII> by_op;
};

/// Kept until the process ends: handlers may hold Python objects.
Handlers& handlers() {
  static auto* instance = new Handlers();
  return *instance;
}

OperatorHandle find_operator(const std::string& op) {
  const auto found =
      c10::Dispatcher::singleton().findSchema(parse_operator_name(op));
  TORCH_CHECK_VALUE(
      found, "register_dispatch_handler: there is no operator ", op);
  TORCH_CHECK_VALUE(
      !found->hasKernelForDispatchKey(
          c10::DispatchKey::CompositeImplicitAutograd),
      "register_dispatch_handler: ",
      op,
      " is decomposed into other operators before the dispatch level; use "
      "register_function_handler, or register for the operators it calls");
  TORCH_CHECK_VALUE(
      !found->hasKernelForDispatchKey(kFunctionKey) ||
          has_unboxed_kernel(found->operator_name()),
      "register_dispatch_handler: ",
      op,
      " has a rule at the function level and never reaches the dispatch "
      "level; use register_function_handler");
  return *found;
}

/// PyTorch warns when a kernel is replaced; here that is the purpose.
class Quiet : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

c10::RegistrationHandleRAII register_kernel(
    const OperatorHandle& op,
    Handler handler) {
  auto kernel = std::make_unique<HandlerKernel>(
      std::move(handler), op.getComputedKernelForDispatchKey(kDispatchKey));
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  return c10::Dispatcher::singleton().registerImpl(
      op.operator_name(),
      kDispatchKey,
      c10::KernelFunction::makeFromBoxedFunctor<HandlerKernel>(
          std::move(kernel)),
      std::nullopt,
      nullptr,
      "shardtensor dispatch handler");
}

/// Takes the registration out; it ends, and with it perhaps a Python function,
/// after the lock.
bool drop(const OperatorName& name) {
  auto& state = handlers();
  std::unique_lock<std::mutex> lock(state.mutex);
  const auto held = state.by_op.extract(name);
  lock.unlock();
  return !held.empty();
}

} // namespace

void set_handler(const std::string& op, Handler handler) {
  const auto found = find_operator(op);
  drop(found.operator_name());
  auto registration = register_kernel(found, std::move(handler));
  auto& state = handlers();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.by_op.emplace(found.operator_name(), std::move(registration));
}

void remove_handler(const std::string& op) {
  TORCH_CHECK_VALUE(
      drop(parse_operator_name(op)), "there is no dispatch handler for ", op);
}

} // namespace shardtensor
