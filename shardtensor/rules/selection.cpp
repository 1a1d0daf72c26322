#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "shardtensor/rules/function_level.h"
#include "shardtensor/rules/promotion.h"

namespace shardtensor {
namespace {

/// 0, 1, ... along `dim` of `dims`, cut like torch.chunk over the mesh axes that
/// `like` leaves whole.
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
    placement = placement.is_shard() ? Placement::replicate()
                                     : Placement::shard(dim);
  }
  const auto layout = make_spec(mesh, sizes, placements);
  const auto rows = layout->interval(dim);
  return from_local(
      at::arange(rows.begin, rows.end, like.options().dtype(at::kLong))
          .view(layout->local_sizes()),
      layout);
}

/// The gradient of max, min, median and the like: it goes to the selected row
/// of `dim`. ATen writes it into a tensor of the global sizes; this compares
/// row numbers shard by shard.
at::Tensor value_selecting_reduction_backward_rule(
    const at::Tensor& grad,
    int64_t dim,
    const at::Tensor& indices,
    c10::SymIntArrayRef sizes,
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
  const auto numbers =
      sharded_arange(sizes[dim].expect_int(), dim, dims, values);
  return at::where(rows.eq(numbers), values, at::Scalar(0));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "value_selecting_reduction_backward",
      value_selecting_reduction_backward_rule);
}

} // namespace shardtensor
