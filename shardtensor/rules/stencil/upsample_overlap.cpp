#include "shardtensor/rules/stencil/upsample_overlap.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/tensor/tangent.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Plan = std::shared_ptr<const UpsampleOverlap>;

// ---- planning ---------------------------------------------------------------

/// One piece of the dim that is cut.
struct Piece {
  Interval owned;
  Interval outputs;
  // The outputs that read rows before and after the owned ones.
  Interval before;
  Interval after;
};

Piece piece_of(
    const Stencil& stencil,
    const Interval& owned,
    const Interval& outputs) {
  Piece piece{owned, outputs, {}, {}};
  int64_t begin = outputs.begin;
  while (begin < outputs.end && stencil.reads(begin).begin < owned.begin) {
    ++begin;
  }
  int64_t end = outputs.end;
  while (end > begin && stencil.reads(end - 1).end > owned.end) {
    --end;
  }
  piece.before = {outputs.begin, begin};
  piece.after = {end, outputs.end};
  return piece;
}

/// Whether the owned rows alone give as many outputs, at the same positions,
/// and no edge reaches beyond both ends.
bool stands_alone(const Piece& piece, const Stencil& stencil) {
  const double scale = stencil.local_scale();
  const auto scaled = [&](int64_t rows) {
    return static_cast<double>(rows) * scale;
  };
  if (scaled(piece.owned.begin) != static_cast<double>(piece.outputs.begin) ||
      scaled(piece.owned.end) != static_cast<double>(piece.outputs.end)) {
    return false;
  }
  return (piece.before.empty() ||
          stencil.piece(piece.before).rows.end <= piece.owned.end) &&
      (piece.after.empty() ||
       stencil.piece(piece.after).rows.begin >= piece.owned.begin);
}

/// Every piece of the dim; empty when one does not stand alone.
std::vector<Piece> pieces_of(
    const Stencil& stencil,
    const Partition& inputs,
    const Partition& outputs) {
  std::vector<Piece> pieces;
  for (int64_t p = 0; p < inputs.pieces(); ++p) {
    pieces.push_back(
        piece_of(stencil, inputs.interval(p), outputs.interval(p)));
    if (!stands_alone(pieces.back(), stencil)) {
      return {};
    }
  }
  return pieces;
}

Interval slab_before(const Piece& piece, const Stencil& stencil) {
  return piece.before.empty()
      ? Interval{}
      : Interval{stencil.piece(piece.before).rows.begin, piece.owned.begin};
}

Interval slab_after(const Piece& piece, const Stencil& stencil) {
  return piece.after.empty()
      ? Interval{}
      : Interval{piece.owned.end, stencil.piece(piece.after).rows.end};
}

/// A plan's edges, for one piece.
class EdgePlanner {
 public:
  EdgePlanner(
      const Piece& piece,
      const Stencil& stencil,
      const Upsample& local,
      size_t i)
      : piece_(piece), stencil_(stencil), local_(local), i_(i) {}

  UpsampleOverlap::Edge edge(
      const Interval& outputs,
      const Interval& beyond,
      int64_t slab_begin) const {
    const auto own_outputs = outputs.shifted(-piece_.outputs.begin);
    const auto joined = stencil_.piece(outputs);
    const auto owned = intersect(joined.rows, piece_.owned);
    const auto alone_stencil = this->alone();
    const auto alone = alone_stencil.piece(own_outputs);
    return {
        beyond.begin < piece_.owned.begin,
        {slab_begin, slab_begin + beyond.extent()},
        owned.shifted(-piece_.owned.begin),
        own_outputs,
        call(stencil_, joined),
        alone.rows,
        call(alone_stencil, alone)};
  }

  /// What the local operator does on the owned rows.
  Stencil alone() const {
    Resample how{local_.mode, false, stencil_.local_scale(), false};
    return Stencil::resample(
        how, piece_.owned.extent(), piece_.outputs.extent());
  }

 private:
  UpsampleOverlap::Call call(const Stencil& stencil, const StencilPiece& piece)
      const {
    Upsample upsample = local_;
    upsample.size[i_] = stencil.local_outputs(piece);
    upsample.scales[i_] = stencil.local_scale();
    return {std::move(upsample), piece.crop, piece.outputs};
  }

  const Piece& piece_;
  const Stencil& stencil_;
  const Upsample& local_;
  size_t i_;
};

} // namespace

Plan plan_upsample_overlap(
    const StencilCall& joined,
    const std::vector<Stencil>& stencils,
    const Upsample& local) {
  const int64_t i = find_overlap_stencil(joined, stencils);
  if (i < 0 || !stencils[i].is_shift_invariant()) {
    return nullptr;
  }
  const auto& stencil = stencils[i];
  const auto& input = *joined.input;
  const auto& mesh = *input.mesh();
  const int64_t dim = joined.first_dim() + i;
  const auto pieces =
      pieces_of(stencil, input.partition(dim), joined.output->partition(dim));
  if (pieces.empty()) {
    return nullptr;
  }
  const auto rows = [&](int64_t, int64_t position) {
    const auto& piece = pieces[input.piece(dim, position)];
    auto result = boundary_rows(slab_before(piece, stencil), input.size(dim));
    const auto after =
        boundary_rows(slab_after(piece, stencil), input.size(dim));
    result.insert(result.end(), after.begin(), after.end());
    return result;
  };
  const auto& own = pieces[input.piece(dim, mesh.position())];
  auto plan = std::make_shared<UpsampleOverlap>();
  plan->dim = dim;
  plan->input_sizes = input.local_sizes();
  plan->owned = local;
  plan->owned.size[i] = own.outputs.extent();
  plan->owned.scales[i] = stencil.local_scale();
  const EdgePlanner planner(own, stencil, local, static_cast<size_t>(i));
  const auto before = slab_before(own, stencil);
  const auto after = slab_after(own, stencil);
  if (!own.before.empty()) {
    plan->edges.push_back(planner.edge(own.before, before, 0));
  }
  if (!own.after.empty()) {
    plan->edges.push_back(planner.edge(own.after, after, before.extent()));
  }
  plan->bring_slab = encode(
      plan_gather_rows(joined.input, {dim}, rows, mesh.position()), mesh);
  plan->return_slab = adjoint(plan->bring_slab);
  return plan;
}

namespace {

// ---- the operator and its adjoint -------------------------------------------

Tensor along(
    const Tensor& x,
    const Interval& rows,
    const UpsampleOverlap& plan) {
  return x.narrow(plan.dim, rows.begin, rows.extent());
}

Tensor call(
    const UpsampleOverlap::Call& call,
    const Tensor& rows,
    const UpsampleOverlap& plan) {
  return plain_upsample(call.upsample, rows)
      .narrow(plan.dim, call.crop, call.outputs);
}

/// The gradient of `extent` rows.
Tensor call_adjoint(
    const UpsampleOverlap::Call& call,
    const Tensor& grad,
    int64_t extent,
    const UpsampleOverlap& plan) {
  const int64_t outputs = call.upsample.size[plan.dim - 2];
  std::vector<int64_t> pad(2 * (grad.dim() - plan.dim), 0);
  pad[pad.size() - 2] = call.crop;
  pad[pad.size() - 1] = outputs - call.crop - call.outputs;
  auto sizes = plan.input_sizes;
  sizes[plan.dim] = extent;
  return plain_upsample_backward(
      call.upsample, at::constant_pad_nd(grad, pad), sizes);
}

Tensor forward(const Tensor& x, const UpsampleOverlap& plan) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  Tensor y;
  const auto slab = exchange_during(
      x, plan.bring_slab, [&] { y = plain_upsample(plan.owned, x); });
  for (const auto& edge : plan.edges) {
    const auto others = along(slab, edge.slab, plan);
    const auto owned = along(x, edge.owned, plan);
    const auto rows = edge.before ? at::cat({others, owned}, plan.dim)
                                  : at::cat({owned, others}, plan.dim);
    along(y, edge.outputs, plan).copy_(call(edge.joined, rows, plan));
  }
  return y;
}

/// What edges read of others, in the slab's order.
Tensor slab_gradient(
    const Tensor& grad,
    const std::vector<Tensor>& joined,
    const UpsampleOverlap& plan) {
  std::vector<Tensor> parts;
  for (size_t i = 0; i < plan.edges.size(); ++i) {
    const auto& edge = plan.edges[i];
    const int64_t begin = edge.before ? 0 : edge.owned.extent();
    parts.push_back(
        along(joined[i], {begin, begin + edge.slab.extent()}, plan));
  }
  if (!parts.empty()) {
    return at::cat(parts, plan.dim);
  }
  auto sizes = plan.input_sizes;
  sizes[plan.dim] = 0;
  return at::empty(sizes, grad.options());
}

Tensor backward(const Tensor& grad, const UpsampleOverlap& plan) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  std::vector<Tensor> joined;
  for (const auto& edge : plan.edges) {
    joined.push_back(call_adjoint(
        edge.joined,
        along(grad, edge.outputs, plan),
        edge.slab.extent() + edge.owned.extent(),
        plan));
  }
  Tensor dx;
  exchange_onto(dx, slab_gradient(grad, joined, plan), plan.return_slab, [&] {
    dx = plain_upsample_backward(plan.owned, grad, plan.input_sizes);
    for (size_t i = 0; i < plan.edges.size(); ++i) {
      const auto& edge = plan.edges[i];
      const int64_t begin = edge.before ? edge.slab.extent() : 0;
      along(dx, edge.owned, plan)
          .add_(along(joined[i], {begin, begin + edge.owned.extent()}, plan));
      along(dx, edge.alone_rows, plan)
          .sub_(call_adjoint(
              edge.alone,
              along(grad, edge.outputs, plan),
              edge.alone_rows.extent(),
              plan));
    }
  });
  return dx;
}

// ---- autograd ---------------------------------------------------------------

Tensor apply_adjoint(const Tensor& grad, const Plan& plan);

/// Linear: the gradient is the adjoint's value, and the other way round.
template <Tensor (*gradient)(const Tensor&, const Plan&)>
struct UpsampleNode : Node {
  explicit UpsampleNode(Plan plan)
      : scope_(current_comm_scope()), plan_(std::move(plan)) {}

  std::string name() const override {
    return "ShardTensorUpsampleBackward";
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {Tensor()};
    }
    const CommScope scope(backward_of(scope_));
    return {gradient(grads[0], plan_)};
  }

  std::string scope_;
  Plan plan_;
};

/// value(x, plan), which is linear in x.
template <class Backward, class Value>
Tensor apply_linear(const Tensor& x, const Plan& plan, const Value& value) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = value(x, *plan);
  }
  connect<Backward>(result, x, plan);
  carry_tangent(result, x, [&](const Tensor& tangent) {
    return apply_linear<Backward>(tangent, plan, value);
  });
  return result;
}

Tensor apply_adjoint(const Tensor& grad, const Plan& plan) {
  return apply_linear<UpsampleNode<upsample_overlap>>(grad, plan, backward);
}

} // namespace

Tensor upsample_overlap(const Tensor& x, const Plan& plan) {
  return apply_linear<UpsampleNode<apply_adjoint>>(x, plan, forward);
}

} // namespace shardtensor::detail
