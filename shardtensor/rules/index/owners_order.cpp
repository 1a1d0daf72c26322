#include "shardtensor/rules/index/owners_order.h"

#include <algorithm>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {

using at::Tensor;

OwnersOrder::OwnersOrder(SpecPtr spec, std::vector<int64_t> dims)
    : spec_(std::move(spec)),
      dims_(std::move(dims)),
      axes_(axes_of_dims(*spec_, dims_)) {}

std::vector<int64_t> OwnersOrder::owned() const {
  const auto& mesh = *spec_->mesh();
  std::vector<int64_t> result;
  for (int64_t position = 0; position < mesh.ranks(); ++position) {
    const auto owner = mesh.piece(position, axes_);
    const auto sizes = spec_->local_sizes(position);
    result.resize(std::max<size_t>(result.size(), owner + 1));
    result[owner] = 1;
    for (const auto dim : dims_) {
      result[owner] *= sizes[dim];
    }
  }
  return result;
}

SpecPtr OwnersOrder::layout() const {
  return layout_of_rows(spec_->mesh(), axes_, Partition(owned()));
}

std::vector<int64_t> OwnersOrder::first_rows_by_pieces() const {
  const auto& mesh = *spec_->mesh();
  const auto first = Partition(owned()).offsets();
  std::vector<int64_t> result;
  for (int64_t position = 0; position < mesh.ranks(); ++position) {
    int64_t pieces = 0;
    for (const auto dim : dims_) {
      if (spec_->is_sharded(dim)) {
        pieces = pieces * spec_->partition(dim).pieces() +
            spec_->piece(dim, position);
      }
    }
    result.resize(std::max<size_t>(result.size(), pieces + 1));
    result[pieces] = first[mesh.piece(position, axes_)];
  }
  return result;
}

Tensor OwnersOrder::rows(const std::vector<Tensor>& places) const {
  if (dims_.size() == 1 && spec_->partition(dims_[0]).is_contiguous()) {
    return places.front();
  }
  const auto options = places.front().options();
  auto pieces = at::zeros({}, options);
  auto row = at::zeros({}, options);
  for (size_t i = 0; i < dims_.size(); ++i) {
    const auto dim = dims_[i];
    if (!spec_->is_sharded(dim)) {
      row = row.mul(spec_->size(dim)).add(places[i]);
      continue;
    }
    const auto& partition = spec_->partition(dim);
    const auto offsets = at::tensor(partition.offsets(), options);
    const auto sizes = at::tensor(partition.sizes(), options);
    const auto place = places[i].remainder(partition.period());
    const auto piece = at::searchsorted(
        offsets.slice(0, 1), place, /*out_int32=*/false, /*right=*/true);
    const auto size = sizes.index({piece});
    row = row.mul(partition.repeat())
              .add(places[i].div(partition.period(), "floor"))
              .mul(size)
              .add(place.sub(offsets.index({piece})));
    pieces = pieces.mul(partition.pieces()).add(piece);
  }
  const auto first = at::tensor(first_rows_by_pieces(), options);
  return first.index({pieces}).add(row);
}

std::vector<Tensor> OwnersOrder::places(const Tensor& own_rows) const {
  std::vector<Tensor> result(dims_.size());
  auto rest = own_rows;
  for (size_t i = dims_.size(); i-- > 0;) {
    const auto extent = spec_->local_sizes()[dims_[i]];
    const auto divisor = std::max<int64_t>(extent, 1); // of no rows
    result[i] = rest.remainder(divisor);
    rest = rest.div(divisor, "floor");
  }
  return result;
}

} // namespace shardtensor::detail
