#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/stencil.h"

namespace shardtensor::detail {

/// Along one dim, a piece's outputs of an interpolation, or of an adaptive
/// average, from the rows that they read: sums of weighted rows. A plan is a
/// few numbers, however many outputs there are: the host's loops find the
/// weights of an output where they need them.
///
/// Example: of Stencil::adaptive(5, 3), outputs [1, 3) are (x1 + x2 + x3) / 3
/// and (x3 + x4) / 2, from the rows [1, 5).
class WeightedRows {
 public:
  static constexpr auto kNodeName = "ShardTensorWeightedRowsBackward";

  enum class Kind {
    Copies, // of one row each
    Sums,
    Averages // of Stencil::adaptive
  };
  WeightedRows(
      Kind kind,
      Stencil stencil,
      int64_t dim,
      const Interval& outputs,
      const Interval& rows)
      : kind(kind), stencil(stencil), dim(dim), outputs(outputs), rows(rows) {}

  /// For operators instead of loops: tap j of output i is row rows[j][i] times
  /// weights[j][i]. An output of fewer rows than another takes its last one
  /// several times, for parts of its weight: zero times infinity would be NaN.
  struct Tables {
    std::vector<std::vector<int64_t>> rows;
    std::vector<std::vector<double>> weights;
  };
  const Tables& tables() const;

  const Kind kind;
  const Stencil stencil;
  const int64_t dim;
  const Interval outputs; // global
  const Interval rows; // global, those of the local tensor

 private:
  mutable std::once_flag once_;
  mutable Tables tables_;
};

/// The outputs, in x's dtype. Differentiable to any order; no communication.
at::Tensor weighted_rows(
    const at::Tensor& x,
    const std::shared_ptr<const WeightedRows>& plan);

} // namespace shardtensor::detail
