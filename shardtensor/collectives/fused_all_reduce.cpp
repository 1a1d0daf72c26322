#include "shardtensor/collectives/fused_all_reduce.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/all_reduce.h"

namespace shardtensor {

using namespace detail;

namespace {

bool is_exact(at::ScalarType dtype) {
  return !at::isFloatingType(dtype) && !at::isComplexType(dtype);
}

std::vector<at::Tensor> fused_all_reduce_op(
    at::TensorList tensors,
    std::string reduce,
    std::string group,
    std::optional<at::ScalarType> buffer_dtype,
    std::optional<at::Device> device) {
  return fused_all_reduce(
      tensors.vec(), parse_reduce(reduce), group, buffer_dtype, device);
}

at::Tensor reduce_loss_op(
    const at::Tensor& loss,
    int64_t dst,
    bool mean,
    std::string group) {
  return reduce_loss(loss, dst, mean, group);
}

} // namespace

at::ScalarType fused_dtype(
    const std::vector<at::Tensor>& tensors,
    Reduce reduce) {
  size_t exact = 0;
  for (const auto& tensor : tensors) {
    exact += is_exact(tensor.scalar_type());
  }
  TORCH_CHECK_VALUE(
      exact == 0 || exact == tensors.size(),
      "fused_all_reduce: integer or bool tensors beside floating ones: say the "
      "buffer_dtype, for not every integer is a float");
  if (exact > 0 && reduce == Reduce::Avg) {
    return at::kLong; // their sum may be none of theirs
  }
  auto dtype = exact == 0 ? at::kFloat : at::kBool;
  for (const auto& tensor : tensors) {
    dtype = at::promoteTypes(dtype, tensor.scalar_type());
  }
  return dtype;
}

at::Tensor fuse(
    const std::vector<at::Tensor>& tensors,
    at::ScalarType dtype,
    std::optional<at::Device> device) {
  std::vector<at::Tensor> flat;
  flat.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    flat.push_back(tensor.to(device.value_or(tensors.front().device()), dtype)
                       .reshape({-1}));
  }
  return at::cat(flat);
}

std::vector<at::Tensor> split_like(
    const at::Tensor& buffer,
    const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  c10::SymInt begin = 0;
  for (const auto& tensor : tensors) {
    result.push_back(buffer.narrow_symint(0, begin, tensor.sym_numel())
                         .view_symint(tensor.sym_sizes())
                         .to(tensor.options(),
                             /*non_blocking=*/false,
                             /*copy=*/true));
    begin += tensor.sym_numel();
  }
  return result;
}

at::Tensor average(const at::Tensor& sum, int64_t ranks) {
  return is_exact(sum.scalar_type()) ? at::div(sum, ranks, "trunc")
                                     : at::div(sum, ranks);
}

std::vector<at::Tensor> fused_all_reduce(
    const std::vector<at::Tensor>& tensors,
    Reduce reduce,
    const std::string& group,
    std::optional<at::ScalarType> buffer_dtype,
    std::optional<at::Device> device) {
  TORCH_CHECK_VALUE(
      reduce != Reduce::Prod,
      "fused_all_reduce: expected sum, avg, max or min, got ",
      to_string(reduce));
  if (tensors.empty()) {
    return {};
  }
  const bool averages = reduce == Reduce::Avg;
  const auto dtype =
      buffer_dtype ? *buffer_dtype : fused_dtype(tensors, reduce);
  const auto total = all_reduce(
      fuse(tensors, dtype, device), averages ? Reduce::Sum : reduce, group);
  return split_like(
      averages ? average(total, Group(group).ranks()) : total, tensors);
}

at::Tensor reduce_loss(
    const at::Tensor& loss,
    int64_t dst,
    bool mean,
    const std::string& group_name) {
  const Group group(group_name);
  TORCH_CHECK_VALUE(
      dst >= 0 && dst < group.ranks(),
      "reduce_loss: dst is ",
      dst,
      ", expected one of ",
      group.ranks(),
      " ranks");
  TORCH_CHECK_VALUE(
      loss.sym_numel() == 1,
      "reduce_loss: expected one number, got ",
      loss.sym_sizes());
  const auto total = all_reduce(
      loss.detach().to(at::kFloat).reshape({}),
      mean ? Reduce::Avg : Reduce::Sum,
      group_name);
  return group.rank() == dst ? total : at::zeros_like(total);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("fused_all_reduce", fused_all_reduce_op);
  m.impl("reduce_loss", reduce_loss_op);
}

} // namespace shardtensor
