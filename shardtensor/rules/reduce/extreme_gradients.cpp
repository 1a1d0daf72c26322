#include <ATen/ops/arange.h>
#include <ATen/ops/cummaxmin_backward_ops.h>
#include <ATen/ops/value_selecting_reduction_backward_ops.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"

namespace shardtensor::detail {
namespace {

/// 0, 1, ... along `dim` of `dims`, cut like torch.chunk over the mesh axes
/// that `like` leaves whole.
at::Tensor sharded_arange(
    int64_t extent,
    int64_t dim,
    int64_t dims,
    const at::Tensor& like) {
  std::vector<int64_t> sizes(dims, 1);
  sizes[dim] = extent;
  const auto& mesh = spec(like)->mesh();
  auto placements = spec(like)->placements();
  for (auto& placement : placements) {
    placement =
        placement.is_shard() ? Placement::replicate() : Placement::shard(dim);
  }
  const auto layout = make_spec(mesh, sizes, placements);
  const auto rows = layout->interval(dim);
  return from_local(
      at::arange(rows.begin, rows.end, like.options().dtype(at::kLong))
          .view(layout->local_sizes()),
      layout);
}

/// Zeros like `like`, but whole and of another extent along `dim`.
at::Tensor zeros_along(const at::Tensor& like, int64_t dim, int64_t extent) {
  const auto whole = without_shard(without_partial(spec(like)), dim);
  auto sizes = whole->sizes();
  sizes[dim] = extent;
  const auto layout = with_sizes(whole, sizes);
  return from_local(
      at::zeros(layout->local_sizes(), impl_of(like)->local().options()),
      layout);
}

/// The gradient of cummax and cummin: a row may be selected many times.
at::Tensor cummaxmin_backward_function(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& indices,
    int64_t dim) {
  if (input.numel() == 0) {
    return input;
  }
  const auto mesh = common_mesh("cummaxmin_backward", {grad, input, indices});
  const auto like = promote(input, mesh).detach();
  return at::zeros_like(like).scatter_add(
      dim, promote(indices, mesh), promote(grad, mesh));
}

/// The gradient of max, min, median and the like: it goes to the selected row
/// of `dim`. ATen writes it into a tensor of the global sizes; this compares
/// row numbers shard by shard.
at::Tensor value_selecting_reduction_backward_function(
    const at::Tensor& grad,
    int64_t dim,
    const at::Tensor& indices,
    at::IntArrayRef sizes,
    bool keepdim) {
  const auto mesh =
      common_mesh("value_selecting_reduction_backward", {grad, indices});
  const auto dims = static_cast<int64_t>(sizes.size());
  if (dims == 0) {
    return grad;
  }
  dim = dim < 0 ? dim + dims : dim;
  auto values = promote(grad, mesh);
  auto rows = promote(indices, mesh);
  if (!keepdim) {
    values = values.unsqueeze(dim);
    rows = rows.unsqueeze(dim);
  }
  if (rows.size(dim) != 1) { // sort and topk select several rows
    return zeros_along(values, dim, sizes[dim]).scatter(dim, rows, values);
  }
  const auto numbers = sharded_arange(sizes[dim], dim, dims, values);
  return at::where(rows.eq(numbers), values, at::Scalar(0));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "cummaxmin_backward",
      function_rule<at::_ops::cummaxmin_backward, cummaxmin_backward_function>);
  m.impl(
      "value_selecting_reduction_backward",
      function_rule<
          at::_ops::value_selecting_reduction_backward,
          value_selecting_reduction_backward_function>);
}

} // namespace shardtensor::detail
