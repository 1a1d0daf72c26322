#include "shardtensor/dispatch/arguments/sparse_operands.h"

#include <string>
#include <unordered_map>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/function_level.h"

namespace shardtensor::detail {
namespace {

std::unordered_map<std::string, c10::KernelFunction>& sparse_functions() {
  static std::unordered_map<std::string, c10::KernelFunction> instance;
  return instance;
}

} // namespace

RegisterSparse::RegisterSparse(std::initializer_list<Entry> entries) {
  for (const auto& entry : entries) {
    sparse_functions().emplace(entry.op, entry.function);
  }
}

bool run_with_sparse(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto name = c10::toString(op.operator_name());
  const auto found = sparse_functions().find(name);
  if (found != sparse_functions().end()) {
    const CommScope scope(name);
    found->second.callBoxed(op, keys, stack);
    return true;
  }
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    op.redispatchBoxed(below_function_level(keys), stack);
    return true;
  }
  return false;
}

} // namespace shardtensor::detail
