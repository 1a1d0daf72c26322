#include <array>
#include <string>

#include <ATen/core/List.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/tensor/constant.h"
#include "shardtensor/tensor/keys.h"

// torch.distributed's collectives read and write the memory of this rank, and
// their schemas don't say which arguments are written. A Replicate ShardTensor
// has the memory, a constant gets its own before. Others would be written in
// vain.

namespace shardtensor::detail {
namespace {

at::Tensor memory_of(const at::Tensor& tensor, const std::string& op) {
  if (!is_shard_tensor(tensor)) {
    return tensor;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec(tensor)->is_replicated(),
      op,
      ": expected plain tensors or Replicate ShardTensors, got ",
      to_string(*spec(tensor)),
      "; use full_tensor() for the whole tensor or to_local() for the piece");
  if (constant_view_of(tensor)) {
    begin_write(*impl_of(tensor));
  }
  return impl_of(tensor)->local();
}

bool is_list_of_lists(const c10::IValue& value) {
  return value.isList() &&
      value.toList().elementType()->kind() == c10::TypeKind::ListType;
}

c10::IValue with_memory(const c10::IValue& value, const std::string& op) {
  const auto memory = [&](const at::Tensor& tensor) {
    return memory_of(tensor, op);
  };
  if (!is_list_of_lists(value)) {
    return with_tensors(value, memory);
  }
  const auto given = value.toList();
  c10::impl::GenericList lists(given.elementType());
  for (const c10::IValue& list : given) {
    lists.push_back(with_tensors(list, memory));
  }
  return lists;
}

void collective_function(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  const auto name = c10::toString(op.operator_name());
  const auto base = stack->size() - op.schema().arguments().size();
  for (size_t i = base; i < stack->size(); ++i) {
    (*stack)[i] = with_memory((*stack)[i], name);
  }
  op.callBoxed(stack);
}

constexpr std::array kCollectives{
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
};

} // namespace

TORCH_LIBRARY_IMPL(c10d, SHARDTENSOR_FUNCTION_KEY, m) {
  for (const char* name : kCollectives) {
    m.impl(
        name,
        torch::CppFunction::makeFromBoxedFunction<&collective_function>());
  }
}

} // namespace shardtensor::detail
