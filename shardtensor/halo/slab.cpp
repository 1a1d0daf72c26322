#include "shardtensor/halo/slab.h"

#include <ATen/ops/cat.h>

#include "shardtensor/comm/primitives/exchange_code.h"

namespace shardtensor::detail {
namespace {

Interval rows_before(const OverlapPiece& piece, const Interval& owned) {
  const auto& rows = piece.before.rows;
  return rows.empty() ? rows : Interval{rows.begin, owned.begin};
}

Interval rows_after(const OverlapPiece& piece, const Interval& owned) {
  const auto& rows = piece.after.rows;
  return rows.empty() ? rows : Interval{owned.end, rows.end};
}

/// Zeros beyond the input.
RowSource slab_rows(
    const OverlapPiece& piece,
    const Interval& owned,
    int64_t extent) {
  auto rows = boundary_rows(rows_before(piece, owned), extent);
  rows.append(boundary_rows(rows_after(piece, owned), extent));
  return rows;
}

std::vector<Slab::Edge> edges_of(
    const OverlapPiece& piece,
    const Interval& owned,
    const Interval& outputs) {
  std::vector<Slab::Edge> edges;
  int64_t slab = 0;
  const auto add =
      [&](bool before, const OverlapPiece::Edge& edge, const Interval& beyond) {
        if (edge.outputs.empty()) {
          return;
        }
        edges.push_back(
            {before,
             {slab, slab + beyond.extent()},
             intersect(edge.rows, owned).shifted(-owned.begin),
             edge.outputs.shifted(-outputs.begin)});
        slab += beyond.extent();
      };
  add(true, piece.before, rows_before(piece, owned));
  add(false, piece.after, rows_after(piece, owned));
  return edges;
}

} // namespace

Slab plan_slab(
    const StencilCall& joined,
    int64_t dim,
    const std::vector<OverlapPiece>& pieces,
    at::MemoryFormat format) {
  const auto& input = *joined.input;
  const auto& mesh = *input.mesh();
  const auto& inputs = input.partition(dim);
  const auto& outputs = joined.output->partition(dim);
  const auto rows = [&](int64_t, int64_t position) {
    const int64_t p = input.piece(dim, position);
    return slab_rows(pieces[p], inputs.interval(p), input.size(dim));
  };
  const int64_t own = input.piece(dim, mesh.position());
  Slab slab;
  slab.dim = dim;
  slab.edges =
      edges_of(pieces[own], inputs.interval(own), outputs.interval(own));
  slab.bring = in_format(
      encode(
          plan_gather_rows(joined.input, {dim}, rows, mesh.position()), mesh),
      format);
  slab.bring_back = adjoint(slab.bring);
  return slab;
}

at::Tensor along(const at::Tensor& x, const Interval& rows, const Slab& slab) {
  return x.narrow(slab.dim, rows.begin, rows.extent());
}

at::Tensor edge_rows(
    const at::Tensor& x,
    const at::Tensor& slab_rows,
    const Slab::Edge& edge,
    const Slab& slab) {
  const auto owned = along(x, edge.owned, slab);
  const auto others = along(slab_rows, edge.slab, slab);
  return edge.before ? at::cat({others, owned}, slab.dim)
                     : at::cat({owned, others}, slab.dim);
}

at::Tensor slab_gradient(
    const std::vector<at::Tensor>& edge_gradients,
    const at::Tensor& x,
    const Slab& slab) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < slab.edges.size(); ++i) {
    parts.push_back(
        along(edge_gradients[i], slab.edges[i].slab_among_rows(), slab));
  }
  return parts.empty() ? along(x, {0, 0}, slab) : at::cat(parts, slab.dim);
}

} // namespace shardtensor::detail
