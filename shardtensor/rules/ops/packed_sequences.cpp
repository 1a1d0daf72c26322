#include <array>
#include <string>

#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/joined_operands.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/tensor/keys.h"

// Packed sequences, rows of all steps one after the other, and the recurrent
// layers that take them. PyTorch reads how many rows a step has from the memory
// of a tensor, which stays plain: it is the same on all ranks. Steps follow
// each other, so all ranks compute on the whole sequences, as a fallback does.

namespace shardtensor::detail {
namespace {

/// Tensors that PyTorch reads on the host.
bool is_read(const std::string& name) {
  return name == "batch_sizes" || name == "lengths";
}

/// Of the two results of packing and padding, the second is a tensor to read.
bool gives_read(const c10::OperatorHandle& op, size_t output) {
  return output == 1 &&
      op.operator_name().name.find("_sequence") != std::string::npos;
}

at::Tensor whole_local(
    const at::Tensor& given,
    const MeshPtr& mesh,
    const std::string& name) {
  const auto tensor = promote_operand(given, mesh, name.c_str());
  const auto layout = replicated(spec(tensor));
  if (spec(tensor)->is_sharded()) {
    note_fallback(name, spec(tensor), layout);
  }
  return to_local(redistribute(tensor, layout));
}

void packed_function(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  if (keys.has_any(kTransformKeys) || must_join(op, keys, *stack)) {
    run_below_function_level(op, keys, stack);
    return;
  }
  const auto name = c10::toString(op.operator_name());
  const CommScope scope(name.c_str());
  const auto& schema = op.schema();
  const auto base = stack->size() - schema.arguments().size();
  MeshPtr mesh;
  for (size_t i = base; i < stack->size(); ++i) {
    visit_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      mesh = !mesh && is_shard_tensor(tensor) ? spec(tensor)->mesh() : mesh;
    });
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const bool read = is_read(schema.arguments()[i].name());
    auto& value = (*stack)[base + i];
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      if (!read) {
        return whole_local(tensor, mesh, name);
      }
      return is_shard_tensor(tensor) ? full_tensor(tensor).cpu() : tensor;
    });
  }
  op.callBoxed(stack);
  const auto results = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto& result = (*stack)[results + i].toTensor();
    if (!gives_read(op, i)) {
      (*stack)[results + i] =
          from_local(result, make_replicated(mesh, result.sizes().vec()));
    }
  }
}

constexpr std::array kPacked{
    "_pack_padded_sequence",
    "_pad_packed_sequence",
    "gru.data",
    "lstm.data",
    "rnn_relu.data",
    "rnn_tanh.data",
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  for (const char* name : kPacked) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&packed_function>());
  }
}

} // namespace shardtensor::detail
