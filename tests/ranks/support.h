#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "shardtensor/shardtensor.h"

namespace shardtensor::testing {

inline DistributedManager& manager() {
  return DistributedManager::get();
}

/// All ranks in one line, or in a grid with `rows` rows.
inline MeshPtr line() {
  return manager().initialize_mesh({-1}, {"domain"});
}
inline MeshPtr grid(int64_t rows) {
  return manager().initialize_mesh({rows, -1}, {"rows", "columns"});
}

/// Cuts of an extent: torch.chunk's, all of it on the last rank, and one that
/// shrinks by half from rank to rank.
inline std::vector<Partition> cuts(int64_t extent, int64_t ranks) {
  std::vector<int64_t> last(ranks, 0);
  last.back() = extent;
  std::vector<int64_t> halves;
  int64_t left = extent;
  for (int64_t rank = 0; rank + 1 < ranks; ++rank) {
    halves.push_back(left / 2);
    left -= halves.back();
  }
  halves.push_back(left);
  return {
      Partition::chunked(extent, ranks), Partition(last), Partition(halves)};
}

/// Different numbers everywhere, the same on every rank.
inline at::Tensor numbered(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const auto size : sizes) {
    count *= size;
  }
  return at::arange(count, at::kDouble).sin().reshape(sizes);
}

/// What this rank owns of a whole tensor.
inline at::Tensor piece(const at::Tensor& whole, const SpecPtr& spec) {
  auto result = whole;
  for (const int64_t dim : spec->sharded_dims()) {
    const auto rows = spec->interval(dim);
    result = result.narrow(dim, rows.begin, rows.extent());
  }
  return result.contiguous();
}

inline at::Tensor shard(const at::Tensor& whole, const SpecPtr& spec) {
  return from_local(piece(whole, spec), spec);
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(at::allclose(actual, expected, 1e-9, 1e-9))
      << (actual - expected).abs().max();
}

/// The text of the error that `call` raises on this rank.
template <typename Error, typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

} // namespace shardtensor::testing
