#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/tensor/terms.h"

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
  /// All ranks' terms as one, see merge_terms.
  Terms merged(Terms own, MergeTerms merge) const;
  at::Tensor merged(
      const at::Tensor& own,
      c10::function_ref<at::Tensor(const at::Tensor& stacked)> merge) const;
  /// The term of a rank without rows.
  at::Tensor neutral(const at::Scalar& value, at::ScalarType dtype) const;

  std::vector<int64_t> dims;
  SpecPtr spec;
  at::Tensor local;
  std::vector<int64_t> axes; // that cut the reduced dims
  SpecPtr result;
};

} // namespace shardtensor::detail
