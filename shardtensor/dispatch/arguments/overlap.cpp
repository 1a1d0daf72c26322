#include "shardtensor/dispatch/arguments/overlap.h"

#include <string>
#include <unordered_set>

#include <ATen/MemoryOverlap.h>

#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

/// Those that PyTorch lets write into expanded tensors.
bool may_write_twice(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names{
      "aten::fill_.Scalar",
      "aten::zero_",
      "aten::masked_fill_",
      "aten::index_fill_",
      "aten::index_put_",
      "aten::_index_put_impl_",
      "aten::conj_physical_",
      "aten::threshold_",
      "aten::tril_",
      "aten::triu_"};
  return op.hasTag(at::Tag::inplace_view) ||
      names.contains(op.operator_name().name) ||
      names.contains(c10::toString(op.operator_name()));
}

} // namespace

void check_places_apart(const std::string& op, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.is_non_overlapping_and_dense() ||
          at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
      op,
      ": unsupported operation: more than one element of the written-to tensor "
      "refers to a single memory location (sizes ",
      tensor.sizes(),
      ", strides ",
      tensor.strides(),
      "). Please clone() the tensor before performing the operation.");
}

void check_written_once(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack) {
  const auto count = op.schema().arguments().size();
  const auto arguments =
      at::ArrayRef<c10::IValue>(stack).slice(stack.size() - count);
  for (size_t i = 0; i < count; ++i) {
    if (!is_written(op, i)) {
      continue;
    }
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (is_shard_tensor(tensor) && !tensor.is_non_overlapping_and_dense() &&
          !may_write_twice(op)) {
        check_places_apart(c10::toString(op.operator_name()), tensor);
      }
    });
  }
}

at::Tensor readable_beside(const at::Tensor& source, const at::Tensor& target) {
  return !is_traced(source) && source.is_alias_of(target) &&
          at::get_overlap_status(target, source) ==
              at::MemOverlapStatus::Partial
      ? source.clone()
      : source;
}

} // namespace shardtensor::detail
