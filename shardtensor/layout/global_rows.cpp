#include "shardtensor/layout/global_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros_like.h>

namespace shardtensor::detail {

at::Tensor global_rows(
    const at::Tensor& local,
    const Partition& partition,
    int64_t piece) {
  const Interval own = partition.interval(piece);
  if (own.empty() || partition.is_contiguous()) {
    return local + own.begin;
  }
  const at::Tensor repetition = at::floor_divide(local, own.extent());
  return local + own.begin + repetition * (partition.period() - own.extent());
}

at::Tensor global_rows(
    const at::Tensor& local,
    const ShardSpec& spec,
    int64_t dim,
    int64_t position) {
  return spec.is_sharded(dim)
      ? global_rows(local, spec.partition(dim), spec.piece(dim, position))
      : local;
}

at::Tensor own_rows(
    const ShardSpec& spec,
    int64_t dim,
    const at::TensorOptions& options) {
  return global_rows(
      at::arange(spec.local_sizes()[dim], options),
      spec,
      dim,
      spec.mesh()->position());
}

at::Tensor flat_indices(
    const at::Tensor& local,
    const std::vector<int64_t>& from,
    const std::vector<int64_t>& to,
    const std::function<at::Tensor(int64_t dim, const at::Tensor& rows)>&
        row_of) {
  at::Tensor rest = local;
  at::Tensor result = at::zeros_like(local);
  int64_t stride = 1;
  for (auto dim = static_cast<int64_t>(from.size()) - 1; dim >= 0; --dim) {
    result = result + row_of(dim, at::remainder(rest, from[dim])) * stride;
    rest = at::floor_divide(rest, from[dim]);
    stride *= to[dim];
  }
  return result;
}

at::Tensor flat_indices(
    const at::Tensor& local,
    const ShardSpec& spec,
    int64_t position) {
  return flat_indices(
      local,
      spec.local_sizes(position),
      spec.sizes(),
      [&](int64_t dim, const at::Tensor& rows) {
        return global_rows(rows, spec, dim, position);
      });
}

} // namespace shardtensor::detail
