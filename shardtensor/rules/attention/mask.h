#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/interval.h"

namespace shardtensor::detail {

// Note [Rows that hide all keys]
// Public code hides a key by adding -1e9 or the lowest number. Where a query's
// keys are all hidden so, its weights follow from what rounding leaves of its
// scores next to such a number: from nothing, or from multiples of 64. But the
// logarithm of their sum is lost next to it, so blocks of keys could not be
// merged, nor weights be found again in backward. So the scores of these rows
// are counted from the mask's largest value in the row: what is subtracted
// after rounding changes no weight. PyTorch's kernels cannot do so: these rows
// are computed from scores, in the place of what kernels say.

/// A mask's rows that hide all keys. Undefined where there are none.
struct HiddenRows {
  /// What scores are counted from, 0 in other rows. Sizes are the mask's, but
  /// for one column.
  at::Tensor origin;
  /// The queries that are hidden in any batch or head.
  at::Tensor queries;
};

/// Those of a mask of 4 dims that is added, with all keys; may be undefined.
HiddenRows hidden_rows(const at::Tensor& mask, const at::Tensor& query);

/// A mask's part; nothing is cut where it broadcasts. May be undefined.
at::Tensor mask_part(const at::Tensor& mask, int64_t dim, const Interval& part);

/// A mask of 4 dims with all keys, bool or added, and where it hides them all.
/// Both may be undefined.
struct Mask {
  at::Tensor added;
  HiddenRows hidden;

  /// That of some batches or heads.
  Mask part(int64_t dim, const Interval& own) const;
};

} // namespace shardtensor::detail
