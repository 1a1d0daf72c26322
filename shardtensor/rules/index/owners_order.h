#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Rows in the order of owners]
// The elements of several dims are the rows of one when each owner's are
// numbered side by side: those of the first owner, in the order of its memory,
// then those of the next. So they stay where they are, however many of the dims
// are cut, and one exchange knows them.

/// Dims of a layout, numbered so.
class OwnersOrder {
 public:
  OwnersOrder(SpecPtr spec, std::vector<int64_t> dims);

  /// Of the mesh: those that cut one of the dims.
  const std::vector<int64_t>& axes() const {
    return axes_;
  }
  /// The rows as a layout of one dim.
  SpecPtr layout() const;
  /// The rows of elements, given their place in each of the dims.
  at::Tensor rows(const std::vector<at::Tensor>& places) const;
  /// The places of own rows in each of the dims, in the own part.
  std::vector<at::Tensor> places(const at::Tensor& own_rows) const;

 private:
  /// How many rows each owner has.
  std::vector<int64_t> owned() const;
  /// The first row of each owner, by its pieces of the cut dims, row-major.
  std::vector<int64_t> first_rows_by_pieces() const;

  SpecPtr spec_;
  std::vector<int64_t> dims_;
  std::vector<int64_t> axes_;
};

} // namespace shardtensor::detail
