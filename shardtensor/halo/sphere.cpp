#include "shardtensor/halo/sphere.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/roll.h>
#include <torch/library.h>

#include "shardtensor/halo/halo_exchange.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {
namespace {

using at::Tensor;

/// Of one of both dims; not negative.
struct Side {
  int64_t dim;
  int64_t width;
};

std::pair<Side, Side> sides_of(int64_t dims, const SphereHalo& halo) {
  return {
      {at::maybe_wrap_dim(halo.dims[0], dims), halo.width[0]},
      {at::maybe_wrap_dim(halo.dims[1], dims), halo.width[1]}};
}

void check(const Tensor& x, const SphereHalo& halo) {
  const auto [lat, lon] = sides_of(x.dim(), halo);
  TORCH_CHECK_VALUE(
      lat.dim != lon.dim && lat.width >= 0 && lon.width >= 0,
      "pad_sphere: expected two dims and widths of 0 or more, got dims ",
      at::IntArrayRef(halo.dims),
      " and width ",
      at::IntArrayRef(halo.width));
  const int64_t rows = x.size(lat.dim);
  const int64_t columns = x.size(lon.dim);
  TORCH_CHECK_VALUE(
      lat.width <= rows - (halo.pole_rows ? 1 : 0) && lon.width <= columns,
      "pad_sphere: width ",
      at::IntArrayRef(halo.width),
      " is more than the ",
      rows,
      " x ",
      columns,
      " rows of dims ",
      at::IntArrayRef(halo.dims));
  TORCH_CHECK_VALUE(
      lat.width == 0 || columns % 2 == 0,
      "pad_sphere: half a turn of ",
      columns,
      " columns of dim ",
      halo.dims[1],
      ": expected an even number");
}

/// The pieces of `x`, in which the first and the last that have rows of `dim`
/// get `width` more.
ShardSpec::Partitions with_ends(const ShardSpec& spec, const Side& side) {
  ShardSpec::Partitions partitions(spec.sizes().size());
  for (const int64_t dim : spec.sharded_dims()) {
    const auto& partition = spec.partition(dim);
    auto rows = partition.local_extents();
    if (dim == side.dim) {
      const auto has_rows = [](int64_t n) { return n > 0; };
      const auto first = std::find_if(rows.begin(), rows.end(), has_rows);
      const auto last = std::find_if(rows.rbegin(), rows.rend(), has_rows);
      *(first == rows.end() ? rows.begin() : first) += side.width;
      *(last == rows.rend() ? rows.rend() - 1 : last) += side.width;
    }
    partitions[dim] = Partition(rows);
  }
  return partitions;
}

Tensor between(
    const Tensor& before,
    const Tensor& x,
    const Tensor& after,
    const Side& side) {
  auto joined = at::cat({before, x, after}, side.dim);
  if (!is_shard_tensor(x) || !spec(x)->is_sharded()) {
    return joined;
  }
  return redistribute(joined, spec(x)->placements(), with_ends(*spec(x), side));
}

Tensor with_rows_beyond_poles(
    const Tensor& x,
    const Side& lat,
    const Side& lon,
    const SphereHalo& halo) {
  const int64_t skipped = halo.pole_rows ? 1 : 0;
  const auto beyond = [&](int64_t begin) {
    const auto rows = x.narrow(lat.dim, begin, lat.width);
    const auto turned =
        at::roll(at::flip(rows, {lat.dim}), {x.size(lon.dim) / 2}, {lon.dim});
    return halo.vector ? at::neg(turned) : turned;
  };
  const int64_t last = x.size(lat.dim) - skipped - lat.width;
  return between(beyond(skipped), x, beyond(last), lat);
}

Tensor pad_sphere_kernel(
    const Tensor& x,
    c10::IntArrayRef width,
    c10::IntArrayRef dims,
    bool vector,
    bool pole_rows) {
  TORCH_CHECK_VALUE(
      width.size() == 2 && dims.size() == 2,
      "pad_sphere: expected a width and dims of two numbers each, got ",
      width,
      " and ",
      dims);
  return pad_sphere(
      x, {{width[0], width[1]}, {dims[0], dims[1]}, vector, pole_rows});
}

} // namespace

Tensor pad_sphere(const Tensor& x, const SphereHalo& halo) {
  check(x, halo);
  const auto [lat, lon] = sides_of(x.dim(), halo);
  auto padded = lat.width > 0 ? with_rows_beyond_poles(x, lat, lon, halo) : x;
  if (lon.width > 0) {
    const int64_t last = padded.size(lon.dim) - lon.width;
    padded = between(
        padded.narrow(lon.dim, last, lon.width),
        padded,
        padded.narrow(lon.dim, 0, lon.width),
        lon);
  }
  return padded;
}

Tensor halo_exchange_on_sphere(const Tensor& x, const SphereHalo& halo) {
  const auto padded = pad_sphere(x, halo);
  // What lies beyond the ends is there; between shards there are none yet.
  std::vector<Halo> halos;
  for (size_t i = 0; i < 2; ++i) {
    halos.push_back({halo.dims[i], halo.width[i], halo.width[i]});
  }
  return halo_exchange(padded, halos, Boundary::None);
}

Tensor halo_trim_on_sphere(
    const Tensor& local,
    const SpecPtr& like,
    const SphereHalo& halo) {
  TORCH_CHECK_VALUE(like, "halo_trim: no spec, expected one");
  const auto shape = like->local_sizes();
  const auto [lat, lon] = sides_of(local.dim(), halo);
  auto trimmed = local;
  for (const auto& side : {lat, lon}) {
    const int64_t rows = shape.at(side.dim);
    TORCH_CHECK_VALUE(
        rows == 0 || local.size(side.dim) == rows + 2 * side.width,
        "halo_trim: expected ",
        rows + 2 * side.width,
        " rows with ghost cells along dim ",
        side.dim,
        ", got sizes ",
        local.sizes());
    trimmed = trimmed.narrow(side.dim, rows > 0 ? side.width : 0, rows);
  }
  return halo_trim(trimmed, like, {}, Boundary::None);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("pad_sphere", pad_sphere_kernel);
}

} // namespace shardtensor
