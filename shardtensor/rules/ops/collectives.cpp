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

/// Of the others schemas don't say that they are written.
bool is_read(const std::string& op, const std::string& argument) {
  return op == "c10d::send" || argument.rfind("input", 0) == 0;
}

at::Tensor memory_of(
    const at::Tensor& tensor,
    const std::string& op,
    bool written) {
  if (!is_shard_tensor(tensor)) {
    return tensor;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec(tensor)->is_replicated(),
      op,
      ": expected plain tensors or Replicate ShardTensors, got ",
      to_string(*spec(tensor)),
      "; use full_tensor() for the whole tensor or to_local() for the piece");
  auto* impl = impl_of(tensor);
  if (constant_view_of(tensor)) {
    begin_write(*impl);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !written || !impl->moved_view(),
      op,
      ": cannot write into a view (sizes ",
      tensor.sizes(),
      ") of a ShardTensor that is cut, which is a copy; use clone()");
  return impl->local();
}

bool is_list_of_lists(const c10::IValue& value) {
  return value.isList() &&
      value.toList().elementType()->kind() == c10::TypeKind::ListType;
}

c10::IValue with_memory(
    const c10::IValue& value,
    const std::string& op,
    bool written) {
  const auto memory = [&](const at::Tensor& tensor) {
    return memory_of(tensor, op, written);
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
  const auto& arguments = op.schema().arguments();
  const auto base = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[base + i];
    value = with_memory(value, name, !is_read(name, arguments[i].name()));
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
