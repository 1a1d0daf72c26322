#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/halo/stencil.h"

// What stencils are tested with.

namespace shardtensor {

inline const auto kDouble = at::TensorOptions().dtype(at::kDouble);

// Even, uneven, empty at either end and in the middle, one piece.
inline std::vector<Partition> partitions(int64_t extent) {
  std::vector<Partition> all{
      Partition({extent}),
      Partition::chunked(extent, 2),
      Partition::chunked(extent, 4),
      Partition({0, extent}),
      Partition({extent, 0, 0})};
  for (int64_t first = 1; first < extent; first += 3) {
    all.emplace_back(Partition({first, 0, extent - first}));
    all.emplace_back(Partition({0, extent - first, first, 0}));
  }
  if (extent > 4) {
    all.emplace_back(Partition({1, 1, extent - 4, 2}));
  }
  return all;
}

// A signal of distinct values, and negative ones only: zero padding of a
// maximum would show.
inline at::Tensor signal(int64_t extent) {
  return at::arange(1, extent + 1, kDouble).sqrt().neg().view({1, 1, extent});
}

// Row i is row rows[i] of x along the last dim, or zero.
inline at::Tensor gather(const at::Tensor& x, const RowSource& rows) {
  const at::Tensor padded = at::cat({x, at::zeros({1, 1, 1}, x.options())}, 2);
  std::vector<int64_t> at;
  for (const auto& [begin, extent] : rows.runs()) {
    for (int64_t i = 0; i < extent; ++i) {
      at.push_back(begin < 0 ? x.size(2) : begin + i);
    }
  }
  return padded.index_select(2, at::tensor(at, at::kLong));
}

// All windows with these bounds that fit into an input of this extent.
inline void for_each_window(
    int64_t largest_padding,
    int64_t largest_dilation,
    const std::function<void(int64_t extent, const Window&)>& visit) {
  for (int64_t kernel = 1; kernel <= 5; ++kernel) {
    for (int64_t stride = 1; stride <= 4; ++stride) {
      for (int64_t padding = 0; padding <= largest_padding; ++padding) {
        for (int64_t dilation = 1; dilation <= largest_dilation; ++dilation) {
          for (int64_t extent = 1; extent <= 13; ++extent) {
            visit(extent, {kernel, stride, padding, dilation});
          }
        }
      }
    }
  }
}

} // namespace shardtensor
