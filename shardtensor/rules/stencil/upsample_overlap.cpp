#include "shardtensor/rules/stencil/upsample_overlap.h"

#include <algorithm>

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/tensor/gradients/linear_map.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OverlapPlan = std::shared_ptr<const UpsampleOverlap>;

// ---- planning ---------------------------------------------------------------

/// The outputs that read rows before and after the owned ones.
OverlapPiece piece_of(
    const Stencil& stencil,
    const Interval& owned,
    const Interval& outputs) {
  int64_t begin = outputs.begin;
  while (begin < outputs.end && stencil.reads(begin).begin < owned.begin) {
    ++begin;
  }
  int64_t end = outputs.end;
  while (end > begin && stencil.reads(end - 1).end > owned.end) {
    --end;
  }
  OverlapPiece piece;
  piece.before.outputs = {outputs.begin, begin};
  piece.after.outputs = {end, outputs.end};
  for (auto* edge : {&piece.before, &piece.after}) {
    if (!edge->outputs.empty()) {
      edge->rows = stencil.piece(edge->outputs).rows;
    }
  }
  return piece;
}

/// Whether the owned rows alone give as many outputs, at the same positions,
/// and no edge reaches beyond both ends.
bool stands_alone(
    const OverlapPiece& piece,
    const Stencil& stencil,
    const Interval& owned,
    const Interval& outputs) {
  const double scale = stencil.local_scale();
  const auto scaled = [&](int64_t rows) {
    return static_cast<double>(rows) * scale;
  };
  if (scaled(owned.begin) != static_cast<double>(outputs.begin) ||
      scaled(owned.end) != static_cast<double>(outputs.end)) {
    return false;
  }
  const auto& [rows_before, before] = piece.before;
  const auto& [rows_after, after] = piece.after;
  return (before.empty() || rows_before.end <= owned.end) &&
      (after.empty() || rows_after.begin >= owned.begin);
}

/// Every piece of the dim; empty when one does not stand alone.
std::vector<OverlapPiece> pieces_of(
    const Stencil& stencil,
    const Partition& inputs,
    const Partition& outputs) {
  std::vector<OverlapPiece> pieces;
  for (int64_t p = 0; p < inputs.pieces(); ++p) {
    const auto& owned = inputs.interval(p);
    pieces.push_back(piece_of(stencil, owned, outputs.interval(p)));
    if (!stands_alone(pieces.back(), stencil, owned, outputs.interval(p))) {
      return {};
    }
  }
  return pieces;
}

UpsampleOverlap::Call call_for(
    const Stencil& stencil,
    const StencilPiece& piece,
    Upsample upsample,
    size_t i) {
  upsample.size[i] = stencil.local_outputs(piece);
  upsample.scales[i] = stencil.local_scale();
  return {std::move(upsample), piece.crop, piece.outputs};
}

/// The owned rows that the edges' outputs reach when `alone` computes them;
/// those of two edges are one interval where they overlap.
std::vector<Interval> wrong_rows(
    const std::vector<Slab::Edge>& edges,
    const Stencil& alone) {
  std::vector<Interval> wrong;
  for (const auto& edge : edges) {
    const auto rows = alone.reads(edge.outputs);
    if (wrong.empty() || wrong.back().end <= rows.begin) {
      wrong.push_back(rows);
    } else {
      wrong.back().end = std::max(wrong.back().end, rows.end);
    }
  }
  return wrong;
}

/// All outputs but the edges'.
Interval outputs_between(
    const std::vector<Slab::Edge>& edges,
    Interval outputs) {
  for (const auto& edge : edges) {
    if (edge.before) {
      outputs.begin = edge.outputs.end;
    } else {
      outputs.end = edge.outputs.begin;
    }
  }
  return outputs;
}

std::vector<UpsampleOverlap::Redone> plan_redone(
    const std::vector<Slab::Edge>& edges,
    const Stencil& alone,
    const Upsample& local,
    size_t i) {
  const auto between = outputs_between(edges, {0, alone.output()});
  std::vector<UpsampleOverlap::Redone> all;
  for (const auto& rows : wrong_rows(edges, alone)) {
    const auto outputs = alone.readers(rows, between);
    const auto piece = alone.piece(outputs);
    all.push_back(
        {rows, outputs, piece.rows, call_for(alone, piece, local, i)});
  }
  return all;
}

} // namespace

OverlapPlan plan_upsample_overlap(
    const StencilCall& joined,
    at::MemoryFormat format,
    const std::vector<Stencil>& stencils,
    const Upsample& local) {
  const int64_t i = find_overlap_stencil(joined, stencils);
  if (i < 0 || !stencils[i].is_shift_invariant()) {
    return nullptr;
  }
  const auto& stencil = stencils[i];
  const auto& input = *joined.input;
  const int64_t dim = joined.first_dim() + i;
  const auto& inputs = input.partition(dim);
  const auto& outputs = joined.output->partition(dim);
  const auto pieces = pieces_of(stencil, inputs, outputs);
  if (pieces.empty()) {
    return nullptr;
  }
  const int64_t own = input.piece(dim, input.mesh()->position());
  const auto own_outputs = outputs.interval(own);
  auto plan = std::make_shared<UpsampleOverlap>();
  plan->input_sizes = input.local_sizes();
  plan->owned = local;
  plan->owned.size[i] = own_outputs.extent();
  plan->owned.scales[i] = stencil.local_scale();
  plan->slab = plan_slab(joined, dim, pieces, format);
  const auto dim_index = static_cast<size_t>(i);
  for (const auto& edge : plan->slab.edges) {
    const auto piece = stencil.piece(edge.outputs.shifted(own_outputs.begin));
    plan->edges.push_back(call_for(stencil, piece, local, dim_index));
  }
  const Resample how{local.mode, false, stencil.local_scale(), false};
  const auto alone = Stencil::resample(
      how, inputs.interval(own).extent(), own_outputs.extent());
  plan->redone = plan_redone(plan->slab.edges, alone, local, dim_index);
  return plan;
}

namespace {

// ---- the operator and its adjoint -------------------------------------------

Tensor call(
    const UpsampleOverlap::Call& call,
    const Tensor& rows,
    const UpsampleOverlap& plan) {
  return plain_upsample(call.upsample, rows)
      .narrow(plan.slab.dim, call.crop, call.outputs);
}

/// The gradient of `extent` rows.
Tensor call_adjoint(
    const UpsampleOverlap::Call& call,
    const Tensor& grad,
    int64_t extent,
    const UpsampleOverlap& plan) {
  const int64_t dim = plan.slab.dim;
  const int64_t outputs = call.upsample.size[dim - 2];
  std::vector<int64_t> pad(2 * (grad.dim() - dim), 0);
  pad[pad.size() - 2] = call.crop;
  pad[pad.size() - 1] = outputs - call.crop - call.outputs;
  auto sizes = plan.input_sizes;
  sizes[dim] = extent;
  return plain_upsample_backward(
      call.upsample, at::constant_pad_nd(grad, pad), sizes);
}

Tensor forward(const Tensor& x, const UpsampleOverlap& plan) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  const auto& slab = plan.slab;
  Tensor y;
  const auto others = exchange_during(
      x, slab.bring, [&] { y = plain_upsample(plan.owned, x); });
  for (size_t i = 0; i < slab.edges.size(); ++i) {
    const auto& edge = slab.edges[i];
    const auto rows = edge_rows(x, others, edge, slab);
    along(y, edge.outputs, slab).copy_(call(plan.edges[i], rows, plan));
  }
  return y;
}

/// The gradients of all rows of each edge.
std::vector<Tensor> edge_gradients(
    const Tensor& grad,
    const UpsampleOverlap& plan) {
  const auto& slab = plan.slab;
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < slab.edges.size(); ++i) {
    const auto& edge = slab.edges[i];
    gradients.push_back(call_adjoint(
        plan.edges[i], along(grad, edge.outputs, slab), edge.rows(), plan));
  }
  return gradients;
}

/// Without the edges' outputs.
void redo(
    const UpsampleOverlap::Redone& redone,
    const Tensor& dx,
    const Tensor& grad,
    const UpsampleOverlap& plan) {
  const auto& [rows, outputs, read, call] = redone;
  along(dx, rows, plan.slab).zero_();
  const auto both = intersect(rows, read);
  if (outputs.empty() || both.empty()) {
    return;
  }
  const auto part =
      call_adjoint(call, along(grad, outputs, plan.slab), read.extent(), plan);
  along(dx, both, plan.slab)
      .copy_(along(part, both.shifted(-read.begin), plan.slab));
}

void correct_owned(
    const Tensor& dx,
    const Tensor& grad,
    const std::vector<Tensor>& of_edges,
    const UpsampleOverlap& plan) {
  const auto& slab = plan.slab;
  for (const auto& redone : plan.redone) {
    redo(redone, dx, grad, plan);
  }
  for (size_t i = 0; i < slab.edges.size(); ++i) {
    const auto& edge = slab.edges[i];
    along(dx, edge.owned, slab)
        .add_(along(of_edges[i], edge.owned_among_rows(), slab));
  }
}

Tensor backward(const Tensor& grad, const UpsampleOverlap& plan) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  const auto& slab = plan.slab;
  const auto of_edges = edge_gradients(grad, plan);
  auto sizes = plan.input_sizes;
  sizes[slab.dim] = 0;
  const auto no_rows = at::empty(sizes, grad.options());
  Tensor dx;
  exchange_onto(
      dx, slab_gradient(of_edges, no_rows, slab), slab.bring_back, [&] {
        dx = plain_upsample_backward(plan.owned, grad, plan.input_sizes);
        correct_owned(dx, grad, of_edges, plan);
      });
  return dx;
}

} // namespace

Tensor upsample_overlap(const Tensor& x, const OverlapPlan& plan) {
  return apply_linear<UpsampleOverlap, forward, backward>(x, plan);
}

} // namespace shardtensor::detail
