#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// The different ones among the keys of all ranks of a group, ascending from
/// rank to rank, so that they stand as on one device.
struct UniqueKeys {
  at::Tensor keys; // (own), int64, ascending, each once
  std::vector<int64_t> sizes; // of each rank's
  /// (keys given), int64: the place of each given key among all different ones.
  at::Tensor inverse;

  int64_t all() const;
};

/// Of keys (n), int64, on any device; "" is a group of this rank alone. Equal
/// keys meet on one rank, and ranks get like numbers of different ones.
/// Communication: all-gathers of up to 64 keys and of two numbers, each
/// different own key to its owner, one number back.
/// Memory: that of the own keys and of those that come here.
///
/// Example: keys {7, 2, 7} here, {2, 9} on rank 1: 2, 7 and 9, this rank's
/// inverse {1, 0, 1}, rank 1's {0, 2}.
UniqueKeys unique_keys(const at::Tensor& keys, const std::string& group);

} // namespace shardtensor::detail
