#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/points/search.h"
#include "shardtensor/rules/points/layouts.h"
#include "shardtensor/rules/points/transport.h"

namespace shardtensor::detail {

/// What is looked for: the `most` nearest (all where it is not given), within
/// `radius` where it is.
struct Wanted {
  std::optional<int64_t> most;
  std::optional<double> radius;
};

/// What each query of this rank finds in the whole cloud, nearest first.
struct Neighbours {
  Nearest nearest; // (B, M, most), where there is a most
  std::vector<Pairs> pairs; // else, one for each batch entry
};

/// Of this rank's points (B, N, D) and queries (B, M, D), contiguous, on one
/// device. Seen neither by autograd nor by a compiler. Communication: none
/// where one rank has all points; Ring, and on devices always: one message each
/// way per other rank of the cloud's group; Boxes: an all-gather of boxes, a
/// few numbers for each pair of ranks, then queries and answers between ranks
/// whose points are near the other's queries; Auto: the all-gather, a reduction
/// of a number, and one of these.
Neighbours find_neighbours(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud,
    PointTransport transport);

} // namespace shardtensor::detail
