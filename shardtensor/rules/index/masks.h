#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {

// Masks stay cut: every rank selects among its own rows, and what the ranks
// select stands in rank order.

/// Whether that holds for x[:, mask], the mask standing at the dim `place` of
/// x, which is laid out as `spec`: of the mask's dims the first alone is cut.
bool keeps_rows(const SpecPtr& spec, int64_t place, const at::Tensor& mask);

/// The rows that a mask chooses.
struct MaskedRows {
  Indices index; // of the own part, which gives this rank's part of x[:, mask]
  SpecPtr result; // the layout of x[:, mask]
};

/// Where keeps_rows(). Communication: one exchange of a number, and of the mask
/// where it lies otherwise.
MaskedRows masked_rows(
    const SpecPtr& spec,
    int64_t place,
    const at::Tensor& mask);

/// How `self` lies where its dims from `place` on are cut as the mask's; null
/// where the mask says nothing of it.
SpecPtr layout_beside(
    const at::Tensor& self,
    int64_t place,
    const at::Tensor& mask);

/// How many rows each piece of a cut has; the same list on every rank.
/// Communication: one exchange of a number.
Partition count_pieces(
    const SpecPtr& spec,
    int64_t dim,
    int64_t count,
    at::Device device);

} // namespace shardtensor::detail
