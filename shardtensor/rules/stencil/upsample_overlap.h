#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/slab.h"
#include "shardtensor/rules/stencil/upsample.h"

namespace shardtensor::detail {

// An interpolation over a dim that is cut, without outputs to drop: the local
// operator runs on the rows that the rank owns and gives all its outputs, while
// the neighbours' rows (the slab) travel; those that read the slab are then
// computed again. Dropping outputs instead costs two passes over the largest
// tensor of the step in backward. There the rows that these outputs reach are
// computed again: what is wrong in them is overwritten, never taken back, for
// inf - inf is NaN.

struct UpsampleOverlap {
  static constexpr auto kNodeName = "ShardTensorUpsampleBackward";
  /// A call of the local operator for some outputs only.
  struct Call {
    Upsample upsample;
    int64_t crop; // drop these first, ...
    int64_t outputs; // ... keep these
  };
  /// Owned rows whose gradient the operator on owned rows gets wrong, for
  /// edges' outputs reach them there; and the outputs beside the edges that
  /// read them.
  struct Redone {
    Interval rows;
    Interval outputs;
    Interval read; // owned rows that these outputs read
    Call call; // the outputs from these rows
  };
  Upsample owned;
  std::vector<int64_t> input_sizes; // of this rank
  Slab slab;
  std::vector<Call> edges; // from all rows that they read; one per slab's edge
  std::vector<Redone> redone;
};

/// A plan for the call that `joined` describes with this local operator, on an
/// input that shows `format`, if one dim is all that gathers, every rank has
/// rows, and its outputs are all that the owned rows give. The same answer on
/// every rank.
std::shared_ptr<const UpsampleOverlap> plan_upsample_overlap(
    const StencilCall& joined,
    at::MemoryFormat format,
    const std::vector<Stencil>& stencils,
    const Upsample& local);

/// The owned outputs of this rank's input, in fp32 or fp64 (the adjoint adds
/// what the local operator would round once). Differentiable to any order.
/// Communication: one exchange, and one in backward.
at::Tensor upsample_overlap(
    const at::Tensor& x,
    const std::shared_ptr<const UpsampleOverlap>& plan);

} // namespace shardtensor::detail
