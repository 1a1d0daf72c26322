#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/partition.h"

namespace shardtensor::detail {

/// Rows on their way to the ranks of a group, those for one rank in the order
/// in which they stand here. Planned on the host; rows are where the owners
/// are.
///
/// Example: owners {1, 0, 1} here, {0, 0, 1} on rank 1: rank 0 gets this rank's
/// row 1, then rank 1's rows 0 and 1; rank 1 gets this rank's rows 0 and 2.
class Route {
 public:
  /// `owners`: the rank that gets each row, int64. Communication: one exchange
  /// of a number for each pair of ranks.
  Route(const at::Tensor& owners, std::string group);
  /// Of rows that stand by owner, of which each rank gets `counts[rank]`; they
  /// are on the device of `options`. Communication: the same.
  Route(
      std::vector<int64_t> counts,
      const at::TensorOptions& options,
      std::string group);

  /// The rows of dim 0 that come here, in the order of the ranks that send.
  /// Communication: one message to each rank that gets some.
  at::Tensor send(const at::Tensor& rows) const;
  /// For each row that came here an answer: those to the own rows, as these
  /// stood. Communication: the same way back.
  at::Tensor answer(const at::Tensor& answers) const;

 private:
  std::string group_;
  at::Tensor order_; // of rows, by owner; undefined: they stand so
  std::vector<int64_t> sent_;
  std::vector<int64_t> received_;
};

/// The piece that each row is in.
at::Tensor pieces_of(const at::Tensor& rows, const Partition& partition);

} // namespace shardtensor::detail
