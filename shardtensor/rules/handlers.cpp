#include "shardtensor/rules/handlers.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

namespace shardtensor {

std::atomic<bool> any_handler{false};

namespace {

struct Handlers {
  std::mutex mutex;
  std::unordered_map<c10::OperatorName, std::shared_ptr<const Handler>> by_op;
};

/// Kept until the process ends: handlers may hold Python objects.
Handlers& handlers() {
  static auto* instance = new Handlers();
  return *instance;
}

/// The operators whose handlers are running on this thread.
thread_local std::vector<c10::OperatorName> running;

class Running {
 public:
  explicit Running(const c10::OperatorName& op) {
    running.push_back(op);
  }
  ~Running() {
    running.pop_back();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

c10::OperatorName parse_name(const std::string& op) {
  const auto dot = op.find('.');
  return {
      op.substr(0, dot), dot == std::string::npos ? "" : op.substr(dot + 1)};
}

std::shared_ptr<const Handler> find_handler(const c10::OperatorName& op) {
  auto& state = handlers();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.by_op.find(op);
  return found == state.by_op.end() ? nullptr : found->second;
}

} // namespace

void set_handler(const std::string& op, Handler handler) {
  const auto name = parse_name(op);
  const auto schema = c10::Dispatcher::singleton().findSchema(name);
  TORCH_CHECK_VALUE(
      schema, "register_dispatch_handler: there is no operator ", op);
  TORCH_CHECK_VALUE(
      !schema->hasKernelForDispatchKey(
          c10::DispatchKey::CompositeImplicitAutograd),
      "register_dispatch_handler: ",
      op,
      " is decomposed into other operators before the dispatch level; use "
      "register_function_handler, or register for the operators it calls");
  auto held = std::make_shared<const Handler>(std::move(handler));
  auto& state = handlers();
  const std::lock_guard<std::mutex> lock(state.mutex);
  // The old handler is dropped after the lock: it may need the GIL.
  std::swap(state.by_op[name], held);
  any_handler = true;
}

void remove_handler(const std::string& op) {
  std::shared_ptr<const Handler> dropped; // after the lock, see above
  auto& state = handlers();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.by_op.find(parse_name(op));
  TORCH_CHECK_VALUE(
      found != state.by_op.end(), "there is no dispatch handler for ", op);
  dropped = std::move(found->second);
  state.by_op.erase(found);
  any_handler = !state.by_op.empty();
}

bool run_handler(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name();
  if (std::find(running.begin(), running.end(), name) != running.end()) {
    return false;
  }
  const auto handler = find_handler(name);
  if (!handler) {
    return false;
  }
  const Running guard(name);
  const at::NoGradGuard no_grad; // autograd is above
  (*handler)(op, stack);
  return true;
}

} // namespace shardtensor
