#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/stencil_call.h"

namespace shardtensor::detail {

/// What a rank's outermost outputs read beyond its own rows: the slab, a tensor
/// of the rows before and then those after. An operator that keeps the slab
/// apart works on its own rows while the slab travels, and computes the outputs
/// at the edges again from slab and own rows.
///
/// Rows 4 to 8 of 12 and windows of three: the slab is rows 3 and 8. The edge
/// before has slab rows [0, 1), owned rows [0, 2) and output [0, 1).
struct Slab {
  struct Edge {
    bool before; // the slab's rows come first
    Interval slab; // the rows of the slab that it reads
    Interval owned; // and the owned ones
    Interval outputs;

    int64_t rows() const {
      return slab.extent() + owned.extent();
    }
    /// Where they lie among all rows of the edge.
    Interval slab_among_rows() const {
      const int64_t begin = before ? 0 : owned.extent();
      return {begin, begin + slab.extent()};
    }
    Interval owned_among_rows() const {
      const int64_t begin = before ? slab.extent() : 0;
      return {begin, begin + owned.extent()};
    }
  };
  int64_t dim = 0; // that is cut
  std::vector<Edge> edges; // before, after: those that there are
  EncodedExchange bring;
  EncodedExchange bring_back; // its adjoint
};

/// For the call that `joined` describes, whose dim's pieces have these edges,
/// of a tensor that shows `format`.
Slab plan_slab(
    const StencilCall& joined,
    int64_t dim,
    const std::vector<OverlapPiece>& pieces,
    at::MemoryFormat format = at::MemoryFormat::Contiguous);

at::Tensor along(const at::Tensor& x, const Interval& rows, const Slab& slab);

/// All rows that an edge reads. `x` are the owned rows.
at::Tensor edge_rows(
    const at::Tensor& x,
    const at::Tensor& slab_rows,
    const Slab::Edge& edge,
    const Slab& slab);

/// The slab's gradient, out of those of each edge's rows; shaped like `x`
/// otherwise.
at::Tensor slab_gradient(
    const std::vector<at::Tensor>& edge_gradients,
    const at::Tensor& x,
    const Slab& slab);

} // namespace shardtensor::detail
