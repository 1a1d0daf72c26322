#pragma once

#include <optional>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// Two layouts of one tensor.
struct LayoutPair {
  SpecPtr from;
  SpecPtr to;
};

// Note [Split repeats]
// A plan names the rows of a repeated partition repetition by repetition. With
// the dim split into (repetitions, period) both layouts cut one of these dims
// once, and the plan has a box for each peer, however often a cut is repeated.
// Where the other layout's cuts lie within a period, one that has them at the
// nearest periods stands between: what is left to move is less than a period
// for each cut.
//
// Example: (12) from 4 x [2, 1] to [7, 5] goes by [6, 6]. The first step is
// that of (4, 3), dim 1 cut as [2, 1], to dim 0 cut as [2, 2].

/// The same with repeated dims split so that neither cut is repeated; as they
/// are where no dim is repeated, nothing where a layout must stand between.
std::optional<LayoutPair> split_repeats(const SpecPtr& from, const SpecPtr& to);

/// The layout that stands between these two, for which there is no split.
SpecPtr layout_between(const SpecPtr& from, const SpecPtr& to);

} // namespace shardtensor::detail
