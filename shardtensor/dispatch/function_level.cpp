#include "shardtensor/dispatch/function_level.h"

#include <torch/library.h>

#include "shardtensor/dispatch/arguments/constants.h"
#include "shardtensor/dispatch/arguments/joined_operands.h"
#include "shardtensor/dispatch/arguments/overlap.h"
#include "shardtensor/dispatch/arguments/plain_writes.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/arguments/sparse_operands.h"
#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/functional_form.h"
#include "shardtensor/dispatch/registry.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {

using namespace detail;
namespace {

/// The mesh of the first ShardTensor in an argument, or null.
MeshPtr mesh_in(const c10::IValue& value) {
  MeshPtr mesh;
  visit_tensors(value, [&](const at::Tensor& tensor) {
    if (!mesh && is_shard_tensor(tensor)) {
      mesh = spec(tensor)->mesh();
    }
  });
  return mesh;
}

void keep_gradient_layouts(const c10::IValue& value) {
  visit_tensors(value, [](const at::Tensor& tensor) {
    if (is_shard_tensor(tensor) && tensor.requires_grad()) {
      keep_gradient_layout(tensor);
    }
  });
}

void promote_value(
    c10::IValue& value,
    const MeshPtr& mesh,
    const c10::OperatorHandle& op) {
  bool needed = false;
  visit_tensors(value, [&](const at::Tensor& tensor) {
    needed = needed || must_promote(tensor);
  });
  if (!needed) {
    return;
  }
  const auto name = c10::toString(op.operator_name());
  value = with_tensors(value, [&](const at::Tensor& tensor) {
    return must_promote(tensor) ? promote_operand(tensor, mesh, name.c_str())
                                : tensor;
  });
}

/// Among the tensors that one call writes, all have to be of one kind.
void check_not_written(const c10::OperatorHandle& op, size_t index) {
  TORCH_CHECK_TYPE(
      !is_written(op, index),
      c10::toString(op.operator_name()),
      ": cannot write the result of an operator on ShardTensors into the "
      "plain tensor '",
      op.schema().arguments()[index].name(),
      "' and into ShardTensors at once; make all of them ShardTensors, or all "
      "plain");
}

void function_fallback(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  run_below_function_level(op, keys, stack);
}

/// The mesh of the first ShardTensor among the arguments, or null.
MeshPtr mesh_of_call(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack) {
  MeshPtr mesh;
  for (const auto& value :
       torch::jit::last(stack, op.schema().arguments().size())) {
    mesh = mesh ? mesh : mesh_in(value);
  }
  return mesh;
}

/// True where the call was run on plain tensors that it writes, or beside
/// sparse ones.
bool run_beside_others(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const bool writes = op.schema().is_mutable();
  if ((writes && run_writing_plain(op, stack)) ||
      run_accumulating_plain(op, stack)) {
    return true;
  }
  if (writes) {
    check_written_once(op, *stack);
    if (run_composite_out(op, stack)) {
      return true;
    }
  }
  return has_sparse(keys) && run_with_sparse(op, keys, stack);
}

void promote_arguments(
    const c10::OperatorHandle& op,
    const MeshPtr& mesh,
    torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[stack->size() - count + i];
    if (value.isTensor() && value.toTensor().defined() &&
        must_promote(value.toTensor())) {
      check_not_written(op, i);
    }
    promote_value(value, mesh, op);
    if (c10::GradMode::is_enabled()) {
      keep_gradient_layouts(value);
    }
  }
}

} // namespace

void run_below_function_level(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  register_late_operators();
  const bool transformed = keys.has_any(kTransformKeys);
  if (!transformed && must_join(op, keys, *stack)) {
    run_joined(op, stack);
    return;
  }
  const auto mesh = transformed ? nullptr : mesh_of_call(op, *stack);
  if (!mesh) {
    const ViewReplay replay;
    op.redispatchBoxed(below_function_level(keys), stack);
    return;
  }
  if (run_beside_others(op, keys, stack)) {
    return;
  }
  promote_arguments(op, mesh, stack);
  const ViewReplay replay;
  const ConstantsOfCall constants(op, *stack);
  op.redispatchBoxed(below_function_level(keys), stack);
  constants.finish(*stack);
}

MeshPtr common_mesh(const char* op, at::ArrayRef<at::Tensor> tensors) {
  MeshPtr mesh;
  for (const auto& tensor : tensors) {
    const auto layout = layout_of(tensor);
    if (!layout) {
      continue;
    }
    TORCH_CHECK_VALUE(
        !mesh || mesh == layout->mesh(),
        op,
        ": expected all ShardTensors on one mesh, got ",
        *mesh,
        " and ",
        *layout->mesh());
    mesh = layout->mesh();
  }
  TORCH_CHECK_TYPE(mesh, op, ": expected at least one ShardTensor");
  return mesh;
}

TORCH_LIBRARY_IMPL(_, SHARDTENSOR_FUNCTION_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&function_fallback>());
}

} // namespace shardtensor
