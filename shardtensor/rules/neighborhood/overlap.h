#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/rules/neighborhood/windows.h"

namespace shardtensor::detail {

/// Neighbourhood attention of a piece on the CPU, cut along the first of its
/// dims, that copies nothing of the piece's size: queries that see own rows
/// only are computed while the rows that the others see, the slab, travel, keys
/// and values side by side. Backward sends the slab's gradient first.
struct NeighborhoodOverlap {
  std::vector<NeighborhoodDim> dims; // with this rank's queries
  std::vector<NeighborhoodPart> parts; // along the first dim
  std::vector<int64_t> sent; // own rows that other ranks see
  EncodedExchange bring; // these rows, to the slab
  EncodedExchange bring_back; // its adjoint
  // All rows that the queries see, for double backward.
  std::vector<EncodedExchange> joined;
};

/// `keys` are the keys' layout, with the features of keys and values; its first
/// domain dim is cut and no other.
std::shared_ptr<const NeighborhoodOverlap> plan_neighborhood_overlap(
    const SpecPtr& keys,
    const std::vector<NeighborhoodDim>& dims,
    std::vector<EncodedExchange> joined);

/// Of local tensors. Communication: one exchange, and one in backward.
at::Tensor attend_overlapped(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::shared_ptr<const NeighborhoodOverlap>& plan,
    double scale);

/// Keys and values by the exchanges of `joined`: one for both side by side, or
/// one for each. Differentiable.
std::pair<at::Tensor, at::Tensor> join_rows(
    const at::Tensor& key,
    const at::Tensor& value,
    const std::vector<EncodedExchange>& joined);

} // namespace shardtensor::detail
