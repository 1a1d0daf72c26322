#include "shardtensor/rules/points/voxels.h"

#include <cmath>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/rules/points/finite.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

namespace {

using at::Tensor;
using Doubles = at::ArrayRef<double>;
using Extents = std::vector<int64_t>;

constexpr auto kVoxelizeOp = "voxelize";
constexpr auto kDevoxelizeOp = "devoxelize";

// ---- the box ----------------------------------------------------------------

void check_box(
    const char* op,
    const Tensor& points,
    Doubles low,
    Doubles high,
    at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(
      points.dim() == 2 || points.dim() == 3,
      op,
      ": expected points ([B,] N, D), got ",
      points.sizes());
  TORCH_CHECK_TYPE(
      points.is_floating_point(),
      op,
      ": expected points of floating point, got ",
      points.scalar_type());
  const auto dims = static_cast<size_t>(points.size(-1));
  TORCH_CHECK_VALUE(
      dims > 0 && low.size() == dims && high.size() == dims &&
          shape.size() == dims,
      op,
      ": expected low, high and shape for the ",
      dims,
      " dims of the points, got ",
      low,
      ", ",
      high,
      " and ",
      shape);
  for (size_t dim = 0; dim < dims; ++dim) {
    TORCH_CHECK_VALUE(
        std::isfinite(low[dim]) && std::isfinite(high[dim]) &&
            low[dim] < high[dim] && shape[dim] > 0,
        op,
        ": expected low < high, finite, and shape > 0 in each dim, got ",
        low,
        ", ",
        high,
        " and ",
        shape);
  }
}

/// Where points are along a dim, in voxels.
Tensor along(
    const Tensor& points,
    int64_t dim,
    Doubles low,
    Doubles high,
    at::IntArrayRef shape) {
  const double scale = static_cast<double>(shape[dim]) / (high[dim] - low[dim]);
  return points.select(-1, dim).sub(low[dim]).mul(scale);
}

int64_t voxels_of(at::IntArrayRef shape) {
  return std::accumulate(
      shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// ---- to voxels --------------------------------------------------------------

/// Numbers of voxels ([B,] N), row-major, 0 outside the box; and whether points
/// are inside, which their coordinates decide: a place may be rounded.
struct Places {
  Tensor voxels;
  Tensor inside;
};
Places places_in(
    const Tensor& points,
    Doubles low,
    Doubles high,
    at::IntArrayRef shape) {
  Places found;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const auto at = static_cast<int64_t>(dim);
    const auto own = points.detach().select(-1, at);
    const auto inside = own.ge(low[dim]).logical_and(own.lt(high[dim]));
    const auto row = along(points.detach(), at, low, high, shape)
                         .masked_fill(inside.logical_not(), 0)
                         .floor()
                         .clamp(0, shape[dim] - 1)
                         .to(at::kLong);
    found.voxels = dim == 0 ? row : found.voxels.mul(shape[dim]).add(row);
    found.inside = dim == 0 ? inside : found.inside.logical_and(inside);
  }
  return {found.voxels.mul(found.inside), found.inside};
}

void check_values(
    const Tensor& points,
    const Tensor& values,
    const std::string& reduce) {
  TORCH_CHECK_VALUE(
      values.dim() == points.dim() &&
          values.sizes().slice(0, values.dim() - 1) ==
              points.sizes().slice(0, points.dim() - 1),
      "voxelize: expected values ([B,] N, C) of points ([B,] N, D), got ",
      values.sizes(),
      " and ",
      points.sizes());
  TORCH_CHECK_VALUE(
      reduce == "mean" || reduce == "sum",
      "voxelize: expected reduce 'mean' or 'sum', got '",
      reduce,
      "'");
}

/// Points and values cut alike, in rows and batch only.
std::pair<Tensor, Tensor> cut_alike(
    const Tensor& points,
    const Tensor& values) {
  if (!layout_of(points) && !layout_of(values)) {
    return {points, values};
  }
  const auto mesh = common_mesh(kVoxelizeOp, {points, values});
  const auto cloud = promote_operand(points, mesh, kVoxelizeOp);
  const auto given = promote_operand(values, mesh, kVoxelizeOp);
  const int64_t last = points.dim() - 1;
  const auto rows = [&](const Tensor& x) {
    return without_shard(without_partial(spec_inside(x)), last);
  };
  const auto from = rows(cloud)->is_sharded() ? rows(cloud) : rows(given);
  const auto like = [&](const Tensor& x) {
    Extents dims(last + 1);
    std::iota(dims.begin(), dims.end(), 0);
    return redistribute(x, with_dims(from, x.sizes().vec(), dims));
  };
  return {like(cloud), like(given)};
}

/// ([B,] voxels, C) of zeros; the axes that cut the rows of `values` cut the
/// voxels, between two of the first dim.
Tensor empty_voxels(const Tensor& values, at::IntArrayRef shape) {
  const int64_t rows = values.dim() - 2;
  auto sizes = values.sizes().vec();
  sizes[rows] = voxels_of(shape);
  if (!layout_of(values)) {
    return at::zeros(sizes, values.options());
  }
  const auto given = spec_inside(values);
  const bool is_cut = given->is_sharded(rows);
  ShardSpec::Partitions partitions(values.dim());
  if (is_cut) {
    const auto pieces = given->partition(rows).pieces();
    const auto slabs = Partition::chunked(shape[0], pieces);
    Extents extents;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      extents.push_back(
          slabs.interval(piece).extent() * (sizes[rows] / shape[0]));
    }
    partitions[rows] = Partition(extents);
  }
  Extents from(values.dim());
  std::iota(from.begin(), from.end(), 0);
  const auto layout =
      with_dims(given, sizes, from, Placement::replicate(), partitions);
  return from_local(
      at::zeros(layout->local_sizes(), to_local(values).options()), layout);
}

/// The sum of the rows (.., N, C) in each voxel.
Tensor sum_in_voxels(
    const Tensor& rows,
    const Tensor& voxels,
    at::IntArrayRef shape) {
  return empty_voxels(rows, shape)
      .scatter_add(-2, voxels.unsqueeze(-1).expand_as(rows), rows);
}

// ---- from voxels ------------------------------------------------------------

/// The voxels that a point reads, one below the other along a dim, and the
/// weight of the upper one; undefined where it reads one only.
struct Reads {
  Tensor lower;
  Tensor upper;
  Tensor weight;
};

Reads nearest_reads(const Tensor& place, int64_t extent) {
  const auto row =
      place.detach().floor().nan_to_num().clamp(0, extent - 1).to(at::kLong);
  return {row, {}, {}};
}

Reads linear_reads(const Tensor& place, int64_t extent) {
  const auto centers = place.sub(0.5).clamp(0, extent - 1);
  const auto lower = centers.detach().floor();
  const auto row = lower.nan_to_num().to(at::kLong);
  return {row, row.add(1).clamp_max(extent - 1), centers.sub(lower)};
}

/// All voxels that points read, ([B,] N, K), and their weights, alike.
struct Corners {
  Tensor voxels;
  Tensor weights;
};
Corners corners_of(const std::vector<Reads>& dims, at::IntArrayRef shape) {
  std::vector<Tensor> voxels{dims[0].lower.mul(0)};
  std::vector<Tensor> weights(1);
  const auto times = [](const Tensor& a, const Tensor& b) {
    return a.defined() ? a.mul(b) : b;
  };
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    const auto& reads = dims[dim];
    std::vector<Tensor> next;
    std::vector<Tensor> next_weights;
    for (size_t i = 0; i < voxels.size(); ++i) {
      const auto first = voxels[i].mul(shape[dim]);
      next.push_back(first.add(reads.lower));
      next_weights.push_back(
          reads.weight.defined() ? times(weights[i], reads.weight.neg().add(1))
                                 : weights[i]);
      if (reads.upper.defined()) {
        next.push_back(first.add(reads.upper));
        next_weights.push_back(times(weights[i], reads.weight));
      }
    }
    voxels = std::move(next);
    weights = std::move(next_weights);
  }
  return {
      at::stack(voxels, -1),
      weights[0].defined() ? at::stack(weights, -1) : Tensor()};
}

/// Cut in batch and first dim of space only, so that voxels are rows.
Tensor voxels_as_rows(const Tensor& voxels, int64_t channels) {
  if (!layout_of(voxels)) {
    return voxels;
  }
  auto layout = without_partial(spec_inside(voxels));
  for (int64_t dim = channels; dim < voxels.dim(); ++dim) {
    if (dim != channels + 1) {
      layout = without_shard(layout, dim);
    }
  }
  return redistribute(voxels, layout);
}

/// Rows of the table ([B,] V, C) at the index ([B,] n, 1), cut as that is.
Tensor table_rows(const Tensor& table, const Tensor& index) {
  auto sizes = index.sizes().vec();
  sizes.back() = table.size(-1);
  const auto found = table.gather(-2, index.expand(sizes));
  if (!layout_of(index)) {
    return found;
  }
  std::vector<int64_t> from(sizes.size());
  std::iota(from.begin(), from.end(), 0);
  return redistribute(found, with_dims(spec_inside(index), sizes, from));
}

void check_voxels(
    const Tensor& voxels,
    const Tensor& points,
    const std::string& mode) {
  TORCH_CHECK_VALUE(
      (points.dim() == 2 || points.dim() == 3) &&
          voxels.dim() == points.dim() - 1 + points.size(-1) &&
          (points.dim() == 2 || voxels.size(0) == points.size(0)),
      "devoxelize: expected voxels ([B,] C, *shape) and points ([B,] N, D), got ",
      voxels.sizes(),
      " and ",
      points.sizes());
  TORCH_CHECK_VALUE(
      mode == "linear" || mode == "nearest",
      "devoxelize: expected mode 'linear' or 'nearest', got '",
      mode,
      "'");
}

} // namespace

Tensor voxelize(
    const Tensor& points,
    const Tensor& values,
    Doubles low,
    Doubles high,
    at::IntArrayRef shape,
    const std::string& reduce) {
  const CommScope scope("shardtensor::voxelize");
  check_box(kVoxelizeOp, points, low, high, shape);
  check_values(points, values, reduce);
  const auto [cloud, given] = cut_alike(points, values);
  check_finite(kVoxelizeOp, cloud);
  const auto places = places_in(cloud, low, high, shape);
  const auto inside = places.inside.unsqueeze(-1);
  auto result =
      sum_in_voxels(at::where(inside, given, 0), places.voxels, shape);
  if (reduce == "mean") {
    const auto counts = sum_in_voxels(
        inside.to(c10::toRealValueType(given.scalar_type())),
        places.voxels,
        shape);
    result = result.div(counts.clamp_min(1));
  }
  return result.unflatten(-2, shape).movedim(-1, points.dim() - 2);
}

Tensor devoxelize(
    const Tensor& voxels,
    const Tensor& points,
    Doubles low,
    Doubles high,
    const std::string& mode) {
  const CommScope scope("shardtensor::devoxelize");
  check_voxels(voxels, points, mode);
  const int64_t channels = points.dim() - 2;
  const auto shape = voxels.sizes().slice(channels + 1);
  check_box(kDevoxelizeOp, points, low, high, shape);
  check_finite(kDevoxelizeOp, points);
  std::vector<Reads> reads;
  for (int64_t dim = 0; dim < points.size(-1); ++dim) {
    const auto place = along(points, dim, low, high, shape);
    reads.push_back(
        mode == "linear" ? linear_reads(place, shape[dim])
                         : nearest_reads(place, shape[dim]));
  }
  const auto corners = corners_of(reads, shape);
  const auto table = voxels_as_rows(voxels, channels)
                         .movedim(channels, -1)
                         .flatten(channels, -2);
  const auto index = corners.voxels.flatten(-2, -1).unsqueeze(-1);
  const auto found =
      table_rows(table, index).unflatten(-2, {-1, corners.voxels.size(-1)});
  return corners.weights.defined()
      ? found.mul(corners.weights.unsqueeze(-1)).sum(-2)
      : found.squeeze(-2);
}

namespace {

Tensor voxelize_kernel(
    const Tensor& points,
    const Tensor& values,
    Doubles low,
    Doubles high,
    at::IntArrayRef shape,
    std::string reduce) {
  return voxelize(points, values, low, high, shape, reduce);
}
Tensor devoxelize_kernel(
    const Tensor& voxels,
    const Tensor& points,
    Doubles low,
    Doubles high,
    std::string mode) {
  return devoxelize(voxels, points, low, high, mode);
}

void register_voxel_kernels(torch::Library& m) {
  m.impl("voxelize", voxelize_kernel);
  m.impl("devoxelize", devoxelize_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  register_voxel_kernels(m);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  register_voxel_kernels(m);
}

} // namespace

} // namespace shardtensor
