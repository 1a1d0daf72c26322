#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <torch/library.h>

#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/norm/arguments.h"

// Norms of each sample at the function level. Where no covered dim is sharded,
// PyTorch's own norm runs on the shards. Otherwise the ranks merge their
// statistics first.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- group norm -------------------------------------------------------------

/// True when no group is cut.
bool holds_whole_groups(const ShardSpec& spec, int64_t channels_per_group) {
  if (!spec.is_sharded(1)) {
    return true;
  }
  const auto& partition = spec.partition(1);
  for (const int64_t offset : partition.offsets()) {
    if (offset % channels_per_group != 0) {
      return false;
    }
  }
  return partition.is_contiguous();
}

/// The layout of one statistic per sample and group.
SpecPtr group_statistics(
    const SpecPtr& x,
    int64_t groups,
    int64_t channels_per_group) {
  ShardSpec::Partitions partitions(2);
  if (x->is_sharded(1)) {
    auto sizes = x->partition(1).sizes();
    for (auto& size : sizes) {
      size /= channels_per_group;
    }
    partitions[1] = Partition(sizes);
  }
  return with_dims(
      x,
      {x->size(0), groups},
      {0, 1},
      Placement::replicate(),
      std::move(partitions));
}

Tensor sharded_group_norm(
    const Tensor& local,
    const SpecPtr& x,
    int64_t groups,
    const Affine& affine,
    double eps) {
  const auto per_group = x->size(1) / groups;
  const auto local_groups = local.size(1) / per_group;
  auto geometry = geometry_of(x, dims_from(2, x->dim()));
  geometry.count *= per_group;
  geometry.statistics = group_statistics(x, groups, per_group);
  geometry.dims = dims_from(2, x->dim() + 1);
  const auto split = [&](const Tensor& tensor) {
    return tensor.defined()
        ? per_channel(tensor, x->dim()).unflatten(0, {local_groups, per_group})
        : tensor;
  };
  const auto view = local.unflatten(1, {local_groups, per_group});
  return normalize(
             view,
             split(affine.weight),
             split(affine.bias),
             norm_moments(view, geometry),
             eps,
             geometry)
      .flatten(1, 2);
}

/// Where groups are cut: each rank has the statistics of its channels' groups.
Tensor cut_group_norm(
    const Tensor& local,
    const SpecPtr& x,
    int64_t groups,
    const Affine& affine,
    double eps) {
  const auto per_group = x->size(1) / groups;
  auto geometry = geometry_of(x, dims_from(2, x->dim()));
  geometry.count *= per_group;
  geometry.axes = axes_of_dims(*x, dims_from(1, x->dim()));
  geometry.statistics = with_dims(x, {x->size(0), groups}, {0, -1});
  const auto channels =
      at::arange(x->size(1), local.options().dtype(at::kLong));
  geometry.groups = cut_like(channels, *x, 1).div(per_group, "floor");
  return normalize(
      local,
      per_channel(affine.weight, x->dim()),
      per_channel(affine.bias, x->dim()),
      norm_moments(local, geometry),
      eps,
      geometry);
}

/// Of a tensor without elements, the same on all ranks: PyTorch has no norm of
/// no groups. Weight and bias get gradients, too.
Tensor empty_group_norm(const Tensor& local, const Affine& affine) {
  auto result = local.clone();
  if (affine.weight.defined()) {
    result = result * per_channel(affine.weight, local.dim());
  }
  if (affine.bias.defined()) {
    result = result + per_channel(affine.bias, local.dim());
  }
  return result.to(local.scalar_type());
}

/// As PyTorch: its kernels for devices write rows.
at::MemoryFormat format_of_group_norm(const Tensor& x) {
  return x.is_cpu() || x.is_privateuseone() ? x.suggest_memory_format()
                                            : at::MemoryFormat::Contiguous;
}

Tensor group_norm_function(
    const Tensor& input,
    int64_t groups,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    double eps,
    bool cudnn_enabled) {
  constexpr auto op = "aten::group_norm";
  const auto x = norm_input(op, input, {weight, bias});
  TORCH_CHECK(
      x.dim() >= 2,
      "group_norm: expected an input of at least 2 dims, got sizes ",
      x.sizes());
  TORCH_CHECK(
      groups > 0 && x.size(1) % groups == 0,
      "group_norm: expected a number of groups that divides the ",
      x.size(1),
      " channels, got ",
      groups);
  check_channels("group_norm", "weight", weight, x.size(1));
  check_channels("group_norm", "bias", bias, x.size(1));
  check_types(op, x, {weight, bias});
  const auto layout = spec(x);
  const auto local = to_local(x);
  if (x.numel() == 0) { // refused or not, as PyTorch's version has it
    const auto like = at::empty(x.sizes(), local.options().device(at::kCPU));
    at::group_norm(like, groups, {}, {}, eps);
  }
  if (x.size(1) == 0) {
    return x.clone(); // no channel: nothing to share out to groups
  }
  const auto affine = local_affine(op, weight, bias, *layout, 1);
  const auto per_group = x.size(1) / groups;
  if (x.numel() == 0) {
    return from_local(empty_group_norm(local, affine), layout);
  }
  // All ranks go one way: which derivatives there are the ways say differently.
  const bool is_local = axes_of_dims(*layout, dims_from(2, x.dim())).empty() &&
      !layout->has_empty_piece();
  const auto result = [&] {
    if (!holds_whole_groups(*layout, per_group)) {
      return cut_group_norm(local, layout, groups, affine, eps);
    }
    return is_local ? at::group_norm(
                          local,
                          local.size(1) / per_group,
                          affine.weight,
                          affine.bias,
                          eps,
                          cudnn_enabled)
                    : sharded_group_norm(local, layout, groups, affine, eps);
  }();
  return from_local(result, layout, format_of_group_norm(x));
}

// ---- layer norm and root mean square norm -----------------------------------

/// The number of dims that stay, after checking what the norm covers.
int64_t check_normalized_shape(
    const char* op,
    const Tensor& x,
    at::IntArrayRef shape,
    const OptionalTensor& weight,
    const OptionalTensor& bias) {
  const auto covered = static_cast<int64_t>(shape.size());
  TORCH_CHECK(
      covered > 0 && covered <= x.dim() &&
          x.sizes().slice(x.dim() - covered) == shape,
      op,
      ": expected an input whose last dims are normalized_shape ",
      shape,
      ", got sizes ",
      x.sizes());
  for (const auto* affine : {&weight, &bias}) {
    TORCH_CHECK(
        !*affine || !(*affine)->defined() || (*affine)->sizes() == shape,
        op,
        ": expected weight and bias of normalized_shape ",
        shape,
        ", got sizes ",
        (*affine)->sizes());
  }
  return x.dim() - covered;
}

Tensor layer_norm_function(
    const Tensor& input,
    at::IntArrayRef normalized_shape,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    double eps,
    bool cudnn_enable) {
  constexpr auto op = "aten::layer_norm";
  const auto x = norm_input(op, input, {weight, bias});
  const auto first =
      check_normalized_shape("layer_norm", x, normalized_shape, weight, bias);
  check_types(op, x, {weight, bias});
  const auto layout = spec(x);
  const auto geometry = geometry_of(layout, dims_from(first, x.dim()));
  const auto affine = local_affine(op, weight, bias, *layout, first);
  const auto local = to_local(x);
  return from_local(
      geometry.axes.empty() || x.numel() == 0
          ? at::layer_norm(
                local,
                local.sizes().slice(first),
                affine.weight,
                affine.bias,
                eps,
                cudnn_enable)
          : normalize(
                local,
                affine.weight,
                affine.bias,
                norm_moments(local, geometry),
                eps,
                geometry),
      layout);
}

/// rms_norm tells an absent weight from an undefined one.
OptionalTensor optional_of(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

double default_eps(at::ScalarType dtype) {
  return dtype == at::kDouble ? std::numeric_limits<double>::epsilon()
                              : std::numeric_limits<float>::epsilon();
}

/// Complex numbers have no sharded path: the covered dims are gathered.
Tensor without_sharded_complex(const char* op, const Tensor& x, int64_t first) {
  auto wanted = spec(x);
  for (int64_t dim = first; x.is_complex() && dim < x.dim(); ++dim) {
    wanted = wanted->is_sharded(dim) ? without_shard(wanted, dim) : wanted;
  }
  if (wanted != spec(x)) {
    note_fallback(op, spec(x), wanted);
  }
  return redistribute(x, wanted);
}

Tensor rms_norm_function(
    const Tensor& input,
    at::IntArrayRef normalized_shape,
    const OptionalTensor& weight,
    std::optional<double> eps) {
  constexpr auto op = "aten::rms_norm";
  auto x = norm_input(op, input, {weight});
  const auto first =
      check_normalized_shape("rms_norm", x, normalized_shape, weight, {});
  x = without_sharded_complex(op, x, first);
  const auto layout = spec(x);
  auto geometry = geometry_of(layout, dims_from(first, x.dim()));
  geometry.centered = false;
  const auto affine = local_affine(op, weight, {}, *layout, first);
  const auto local = to_local(x);
  return from_local(
      geometry.axes.empty() || x.numel() == 0
          ? at::rms_norm(
                local,
                local.sizes().slice(first),
                optional_of(affine.weight),
                eps)
          : normalize(
                local,
                affine.weight,
                {},
                norm_moments(local, geometry),
                eps.value_or(default_eps(x.scalar_type())),
                geometry),
      layout,
      x.suggest_memory_format());
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "group_norm", function_rule<at::_ops::group_norm, group_norm_function>);
  m.impl(
      "layer_norm", function_rule<at::_ops::layer_norm, layer_norm_function>);
  m.impl("rms_norm", function_rule<at::_ops::rms_norm, rms_norm_function>);
}

} // namespace shardtensor::detail
