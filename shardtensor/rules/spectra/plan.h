#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// What a Fourier transform does to its last dim: complex lines as those of the
/// other dims, lines of a real signal to a part of their spectrum, or back.
enum class Lines { Complex, FromReal, ToReal };

struct Transform {
  std::vector<int64_t> dims; // the last one is that of real lines
  Lines lines = Lines::Complex;
  int64_t extent = 0; // of the last dim afterwards
};

/// A transform dim by dim: bring the tensor to `layout`, transform `dims`,
/// which are whole there, have it as `result`. A last step may have no dims.
/// Linear: what is Partial(sum) may stay so.
struct TransformPlan {
  struct Step {
    SpecPtr layout;
    std::vector<int64_t> dims;
    bool real; // one dim, of real lines
    SpecPtr result;
  };
  std::vector<Step> steps;
  // Where there was no other dim to cut, and what became of it; else null.
  SpecPtr before_gather;
  SpecPtr gathered;

  const SpecPtr& result() const {
    return steps.back().result;
  }
  /// Whether terms of a sum are transformed.
  bool keeps_sums() const;
};

/// Whole dims are transformed first, where they are. Then the cut ones are made
/// whole, which cuts others: those that `home` cuts, where there is one, and it
/// ends like that; else a dim that is done, or one that is not transformed, the
/// first (samples) rather than the second (channels).
///
/// Example: (8, 3, 64, 64), Shard(2), dims 2 and 3 from real: dim 3, then an
/// exchange to Shard(3), [17, 16] of 33, then dim 2.
TransformPlan plan_transform(
    const SpecPtr& spec,
    const Transform& transform,
    const SpecPtr& home = nullptr);

} // namespace shardtensor::detail
