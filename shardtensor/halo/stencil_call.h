#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/halo/stencil.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// An operator with one stencil per trailing dim, planned for this rank: bring
/// the input to `input`, gather rows, call the local operator on them, keep
/// the owned outputs. The same decisions on every rank.
struct StencilCall {
  SpecPtr input; // the layout that it needs
  SpecPtr output;
  bool gathers = false; // some rank needs rows that another one owns
  EncodedExchange gather;
  /// One per stencil. For a dim that is not cut the whole dim, with the
  /// operator's own padding.
  std::vector<StencilPiece> pieces;
  std::vector<bool> is_cut;

  int64_t first_dim() const {
    return input->dim() - static_cast<int64_t>(pieces.size());
  }
};

/// The layout nearest to `spec` that a stencil can work on: no Partial, no
/// repeated partition (see Note [Repeated partition]) but of `rowwise` dims
/// with rows in every piece, else the rows of each rank side by side, and
/// `whole` dims not sharded.
SpecPtr stencil_layout(
    const SpecPtr& spec,
    const std::vector<int64_t>& whole,
    const std::vector<int64_t>& rowwise = {});

/// Plans a call on an input laid out as `spec`, one stencil per trailing dim.
/// `padding` is what the local operator is called with along dims that are
/// not cut; where `gather_always` is set, such a dim is gathered, too (its
/// padding differs on both sides, say). `output_sizes` are the global ones; the
/// dims before the stencils' keep their partition.
StencilCall plan_stencil_call(
    const SpecPtr& spec,
    const std::vector<int64_t>& whole,
    const std::vector<Stencil>& stencils,
    const std::vector<int64_t>& padding,
    std::vector<int64_t> output_sizes,
    const std::vector<bool>& gather_always = {});

/// The only stencil that reads rows of other ranks, where every rank has rows
/// and outputs and this one is in the mesh; else -1. Such a call can compute
/// while its messages travel.
int64_t find_overlap_stencil(
    const StencilCall& call,
    const std::vector<Stencil>& stencils);

// Note [Same work on every rank]
// A rank without outputs, without samples or without channels computes on one
// of zeros and keeps nothing. With nothing at all to compute, PyTorch leaves
// out parts of the graph, in double backward above all, and with them the
// collectives that other ranks wait in.

/// The input rows of this rank's operator, from its shard in the layout
/// call.input of a tensor that shows `format`. Communication: one exchange if
/// call.gathers.
at::Tensor gather_rows(
    const at::Tensor& local,
    const StencilCall& call,
    at::MemoryFormat format = at::MemoryFormat::Contiguous);

/// The outputs that this rank owns among those of its local operator.
at::Tensor keep_owned(const at::Tensor& local, const StencilCall& call);

/// As torch.nn.functional does: one value stands for all n dims.
std::vector<int64_t> expanded(at::IntArrayRef values, size_t n);

} // namespace shardtensor::detail
