#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Counter numbers]
// Under the "counter" policy a number is a function of a key and of where its
// element stands in the whole, row-major tensor. Philox turns a counter into
// 128 bits: those of four neighbours, or of two where numbers take 64 bits, so
// element i reads block i / 4 or i / 2. A call's key is one number drawn from
// the generator, alike on all ranks: seeds, saved states and checkpoints rule
// the numbers, and generators advance by the same whatever the layout. A rank
// draws for its own piece alone, and nothing is sent.
//
// On the CPU a loop of ours makes the numbers: each lane does the same
// arithmetic, so the same element gets the same bits in any piece. Elsewhere
// the same steps are ATen's operators (counter_tensors.cpp).

/// What is drawn. `a` and `b` are PyTorch's parameters in its order.
struct Distribution {
  enum class Kind {
    Uniform, // in [a, b)
    Normal, // mean a, deviation b
    LogNormal, // of a normal of mean a, deviation b
    Cauchy, // median a, width b
    Exponential, // rate a
    Geometric, // trials until a success of probability a
    Bernoulli, // 1 with probability a
    Integer, // in [from, from + range); range 0: 64 bits
  };
  Kind kind;
  double a = 0;
  double b = 1;
  int64_t from = 0;
  uint64_t range = 0;
};

/// Where a piece's elements stand in the whole tensor: element (i, j, ...) of a
/// tensor of `sizes` is number offset + i * strides[0] + j * strides[1] + ...
/// Dims of repeated partitions are two here.
///
/// Example: columns [2, 5) of a 4 x 6 tensor: sizes (4, 3), strides (6, 1),
/// offset 2.
struct GlobalIndex {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;

  int64_t numel() const;
};

/// This rank's part of a tensor laid out as `spec`, in its logical order.
GlobalIndex global_index(const ShardSpec& spec);
/// Of a tensor with the first `dims` dims alone.
GlobalIndex global_index(const ShardSpec& spec, int64_t dims);
/// Each element becomes `count` neighbours: the two parts of a complex number.
GlobalIndex with_inner(GlobalIndex index, int64_t count);

/// A call's key, a tensor of one number on the generator's device.
at::Tensor draw_key(
    const at::Tensor& like,
    const std::optional<at::Generator>& generator);

/// Overwrites `local`, whose elements stand where `index` says.
void fill_counter_numbers(
    at::Tensor local,
    const at::Tensor& key,
    const Distribution& distribution,
    const GlobalIndex& index);

/// The same as a new tensor on the key's device; one node while traced.
at::Tensor counter_numbers(
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    const at::Tensor& key,
    const Distribution& distribution,
    const GlobalIndex& index);

/// Overwrites this rank's part of a ShardTensor. A Partial becomes what it was
/// drawn as.
void fill_own_part(
    const at::Tensor& self,
    const at::Tensor& key,
    const Distribution& distribution);

/// What takes as many numbers for an element as it needs.
enum class Sample {
  Poisson, // rates a
  Gamma, // shapes a
  Binomial, // counts a, probabilities b
};

/// Samples of these parameters, of their dtype; on the host, whatever the
/// device. `b` is read by Binomial alone: for others `a` again.
at::Tensor counter_samples(
    Sample sample,
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& key,
    const GlobalIndex& index);

// How the numbers are made: loops over a contiguous CPU tensor, or ATen's
// operators on any device.

void fill_by_loops(
    const at::Tensor& result,
    uint64_t key,
    const Distribution& distribution,
    const GlobalIndex& index);
at::Tensor numbers_by_tensors(
    at::ScalarType dtype,
    const at::Tensor& key,
    const Distribution& distribution,
    const GlobalIndex& index);
at::Tensor samples_by_loops(
    Sample sample,
    const at::Tensor& a,
    const at::Tensor& b,
    uint64_t key,
    const GlobalIndex& index);

} // namespace shardtensor::detail
