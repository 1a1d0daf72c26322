#pragma once

#include "shardtensor/rules/points/neighbours.h"

namespace shardtensor::detail {

/// The boxes of every rank's points and queries, (ranks, 2, D) each: lower and
/// upper corners, infinite the wrong way round where there are none.
struct RankBoxes {
  at::Tensor points;
  at::Tensor queries;
};
/// Communication: one all-gather of 4 D numbers.
RankBoxes gather_boxes(
    const at::Tensor& points,
    const at::Tensor& queries,
    const CloudPieces& cloud);

/// Whether most queries find their neighbours in few pieces, so that it is
/// cheaper to send queries than to search all pieces. The same on all ranks.
/// Communication: one all-reduce of a number.
bool are_apart(
    const RankBoxes& boxes,
    const Wanted& wanted,
    const CloudPieces& cloud);

/// See PointTransport::Boxes.
Neighbours find_by_boxes(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud,
    const RankBoxes& boxes);

} // namespace shardtensor::detail
