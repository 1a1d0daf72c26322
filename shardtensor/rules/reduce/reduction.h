#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// A reduction under way: the input without Partial, and what it loses. The
/// constructor communicates where the input is Partial.
struct Reduction {
  Reduction(
      const char* op,
      const at::Tensor& tensor,
      at::OptionalIntArrayRef dim,
      bool keepdim);

  /// This rank has rows to reduce, or no rank has.
  bool has_rows() const;
  /// The ranks' terms stacked along a new dim 0. Communication: one exchange.
  at::Tensor gathered(const at::Tensor& term) const;
  /// The term of a rank without rows.
  at::Tensor neutral(const at::Scalar& value, at::ScalarType dtype) const;

  std::vector<int64_t> dims;
  SpecPtr spec;
  at::Tensor local;
  std::vector<int64_t> axes; // that cut the reduced dims
  SpecPtr result;
};

} // namespace shardtensor::detail
