#include "shardtensor/dispatch/function_level.h"

#include <algorithm>

#include <ATen/core/List.h>
#include <torch/library.h>

#include "shardtensor/dispatch/promotion.h"
#include "shardtensor/dispatch/registry.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {

using namespace detail;
namespace {

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
    const c10::OperatorHandle& op) {
  const auto promoted = [&](const at::Tensor& tensor) {
    return must_promote(tensor)
        ? promote_operand(
              tensor, mesh, c10::toString(op.operator_name()).c_str())
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
void check_not_written(const c10::OperatorHandle& op, size_t index) {
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
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  run_below_function_level(op, keys, stack);
}

} // namespace

void run_below_function_level(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  register_late_operators();
  const auto count = op.schema().arguments().size();
  const auto base = stack->size() - count;
  const bool transformed = keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
      keys.has(c10::DispatchKey::FuncTorchBatched);
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

TORCH_LIBRARY_IMPL(_, SHARDTENSOR_FUNCTION_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&function_fallback>());
}

} // namespace shardtensor
