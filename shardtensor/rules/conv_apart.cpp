#include "shardtensor/rules/conv_apart.h"

#include <mutex>

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/tensor/node.h"

namespace shardtensor {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Plan = std::shared_ptr<const ConvApart>;

// ---- planning ---------------------------------------------------------------

bool has_empty_pieces(const ShardSpec& spec) {
  for (const int64_t dim : spec.sharded_dims()) {
    const auto& partition = spec.partition(dim);
    for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
      if (partition.interval(piece).empty()) {
        return true;
      }
    }
  }
  return false;
}

/// The only stencil that reads rows of other ranks, or -1.
int64_t find_gathering(
    const StencilCall& call,
    const std::vector<Stencil>& stencils) {
  int64_t found = -1;
  for (size_t i = 0; i < stencils.size(); ++i) {
    if (!call.is_cut[i]) {
      continue;
    }
    const int64_t dim = call.first_dim() + static_cast<int64_t>(i);
    if (!call.input->is_sharded(dim)) {
      return -1;
    }
    if (!plan_stencil(stencils[i], call.input->partition(dim)).is_local) {
      if (found >= 0) {
        return -1;
      }
      found = static_cast<int64_t>(i);
    }
  }
  return found;
}

/// Every piece's way of computing apart; empty when one has none.
std::vector<ApartPiece> apart_pieces(
    const Stencil& stencil,
    const Partition& inputs,
    const Partition& outputs) {
  std::vector<ApartPiece> pieces;
  for (int64_t p = 0; p < inputs.pieces(); ++p) {
    const auto piece = stencil.apart(outputs.interval(p), inputs.interval(p));
    if (!piece) {
      return {};
    }
    pieces.push_back(*piece);
  }
  return pieces;
}

Interval rows_before(const ApartPiece& piece, const Interval& owned) {
  const auto& rows = piece.before.rows;
  return rows.empty() ? rows : Interval{rows.begin, owned.begin};
}

Interval rows_after(const ApartPiece& piece, const Interval& owned) {
  const auto& rows = piece.after.rows;
  return rows.empty() ? rows : Interval{owned.end, rows.end};
}

/// What the windows read beyond the owned rows; zeros beyond the input.
RowSource slab_rows(
    const ApartPiece& piece,
    const Interval& owned,
    int64_t extent) {
  auto rows = boundary_rows(rows_before(piece, owned), extent);
  const auto after = boundary_rows(rows_after(piece, owned), extent);
  rows.insert(rows.end(), after.begin(), after.end());
  return rows;
}

std::vector<ConvApart::Edge> edges_of(
    const ApartPiece& piece,
    const Interval& owned,
    const Interval& outputs) {
  std::vector<ConvApart::Edge> edges;
  int64_t slab = 0;
  const auto add = [&](const ApartPiece::Edge& edge, const Interval& beyond) {
    if (edge.outputs.empty()) {
      return;
    }
    edges.push_back(
        {beyond.begin == edge.rows.begin,
         {slab, slab + beyond.extent()},
         intersect(edge.rows, owned).shifted(-owned.begin),
         edge.outputs.shifted(-outputs.begin)});
    slab += beyond.extent();
  };
  add(piece.before, rows_before(piece, owned));
  add(piece.after, rows_after(piece, owned));
  return edges;
}

} // namespace

Plan plan_conv_apart(
    const StencilCall& joined,
    const std::vector<Stencil>& stencils,
    const std::vector<int64_t>& joined_padding,
    const std::vector<int64_t>& stride,
    const std::vector<int64_t>& dilation,
    int64_t groups) {
  const auto& input = *joined.input;
  const auto& mesh = *input.mesh();
  const int64_t gathering = find_gathering(joined, stencils);
  if (gathering < 0 || !mesh.contains_this_rank() || has_empty_pieces(input) ||
      has_empty_pieces(*joined.output)) {
    return nullptr;
  }
  const int64_t dim = joined.first_dim() + gathering;
  const auto& inputs = input.partition(dim);
  const auto& outputs = joined.output->partition(dim);
  const auto pieces = apart_pieces(stencils[gathering], inputs, outputs);
  if (pieces.empty()) {
    return nullptr;
  }
  const auto rows = [&](int64_t, int64_t position) {
    const int64_t p = input.piece(dim, position);
    return slab_rows(pieces[p], inputs.interval(p), input.size(dim));
  };
  const int64_t own = input.piece(dim, mesh.position());
  auto plan = std::make_shared<ConvApart>();
  plan->joined = joined;
  plan->joined_padding = joined_padding;
  plan->return_joined = adjoint(joined.gather);
  plan->stride = stride;
  plan->dilation = dilation;
  plan->groups = groups;
  plan->padding = joined_padding;
  plan->padding[gathering] = pieces[own].padding;
  plan->dim = dim;
  plan->edges =
      edges_of(pieces[own], inputs.interval(own), outputs.interval(own));
  plan->bring_slab = encode(
      plan_gather_rows(joined.input, {dim}, rows, mesh.position()), mesh);
  plan->return_slab = adjoint(plan->bring_slab);
  return plan;
}

namespace {

// ---- local convolutions -----------------------------------------------------

std::vector<int64_t> zeros(const ConvApart& plan) {
  return std::vector<int64_t>(plan.stride.size(), 0);
}

/// The rows of an edge are all there.
std::vector<int64_t> edge_padding(const ConvApart& plan) {
  auto padding = plan.padding;
  padding[plan.dim - plan.joined.first_dim()] = 0;
  return padding;
}

Tensor convolution(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    at::IntArrayRef padding,
    const ConvApart& plan) {
  return at::convolution(
      x,
      weight,
      bias,
      plan.stride,
      padding,
      plan.dilation,
      false,
      zeros(plan),
      plan.groups);
}

struct Gradients {
  Tensor x;
  Tensor weight;
  Tensor bias;
};

using Wanted = std::array<bool, 3>;

Gradients convolution_gradients(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    at::IntArrayRef padding,
    const Wanted& wanted,
    const ConvApart& plan) {
  const std::vector<int64_t> bias_sizes{weight.size(0)};
  auto [dx, dweight, dbias] = at::convolution_backward(
      grad,
      x,
      weight,
      at::OptionalIntArrayRef(bias_sizes),
      plan.stride,
      padding,
      plan.dilation,
      false,
      zeros(plan),
      plan.groups,
      wanted);
  return {dx, dweight, dbias};
}

Tensor along(const Tensor& x, const Interval& rows, const ConvApart& plan) {
  return x.narrow(plan.dim, rows.begin, rows.extent());
}

/// All rows that the windows of an edge read.
Tensor edge_rows(
    const Tensor& x,
    const Tensor& slab,
    const ConvApart::Edge& edge,
    const ConvApart& plan) {
  const auto owned = along(x, edge.owned, plan);
  const auto others = along(slab, edge.slab, plan);
  return edge.before ? at::cat({others, owned}, plan.dim)
                     : at::cat({owned, others}, plan.dim);
}

/// The same with zeros in the place of the owned ones.
Tensor edge_rows_of_others(
    const Tensor& slab,
    const ConvApart::Edge& edge,
    const ConvApart& plan) {
  std::vector<int64_t> pad(2 * (slab.dim() - plan.dim), 0);
  pad[pad.size() - (edge.before ? 1 : 2)] = edge.owned.extent();
  return at::constant_pad_nd(along(slab, edge.slab, plan), pad);
}

struct Forward {
  Tensor output;
  Tensor slab;
};

Forward compute(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const ConvApart& plan) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  Forward result;
  result.slab = exchange_during(x, plan.bring_slab, [&] {
    result.output = convolution(x, weight, bias, plan.padding, plan);
  });
  for (const auto& edge : plan.edges) {
    const auto rows = edge_rows(x, result.slab, edge, plan);
    along(result.output, edge.outputs, plan)
        .copy_(convolution(rows, weight, bias, edge_padding(plan), plan));
  }
  return result;
}

// ---- gradients --------------------------------------------------------------

/// What the slab contributes: its own gradient, and weight's.
Gradients slab_gradients(
    const Tensor& grad,
    const Tensor& slab,
    const Tensor& weight,
    const Wanted& wanted,
    const ConvApart& plan) {
  std::vector<Tensor> slabs;
  Gradients result;
  for (const auto& edge : plan.edges) {
    const auto part = convolution_gradients(
        along(grad, edge.outputs, plan),
        edge_rows_of_others(slab, edge, plan),
        weight,
        edge_padding(plan),
        {wanted[0], wanted[1], false},
        plan);
    if (wanted[0]) {
      const int64_t begin = edge.before ? 0 : edge.owned.extent();
      slabs.push_back(along(part.x, {begin, begin + edge.slab.extent()}, plan));
    }
    if (wanted[1]) {
      result.weight =
          result.weight.defined() ? result.weight + part.weight : part.weight;
    }
  }
  if (wanted[0]) {
    result.x = slabs.empty() ? slab : at::cat(slabs, plan.dim);
  }
  return result;
}

Gradients apart_gradients(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& slab,
    const Tensor& weight,
    const Wanted& wanted,
    const ConvApart& plan) {
  const auto of_slab = slab_gradients(grad, slab, weight, wanted, plan);
  Gradients result;
  const auto of_owned = [&] {
    result = convolution_gradients(grad, x, weight, plan.padding, wanted, plan);
  };
  if (wanted[0]) {
    RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
    Tensor dx;
    exchange_onto(dx, of_slab.x, plan.return_slab, [&] {
      of_owned();
      dx = result.x;
    });
    result.x = dx;
  } else {
    of_owned();
  }
  if (of_slab.weight.defined()) {
    result.weight = result.weight + of_slab.weight;
  }
  return result;
}

/// By differentiable operators on joined rows, for double backward.
Gradients joined_gradients(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Wanted& wanted,
    const ConvApart& plan) {
  const auto rows = gather_rows(x, plan.joined);
  auto result = convolution_gradients(
      grad, rows, weight, plan.joined_padding, wanted, plan);
  if (wanted[0]) {
    result.x = exchange(result.x, plan.return_joined);
  }
  return result;
}

struct ConvApartBackward : Node {
  ConvApartBackward(
      const Tensor& x,
      const Tensor& slab,
      const Tensor& weight,
      Plan plan)
      : x_(x, false),
        slab_(slab, false),
        weight_(weight, false),
        scope_(current_comm_scope()),
        plan_(std::move(plan)) {}

  std::string name() const override {
    return "ShardTensorConvBackward";
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    slab_.reset_data();
    weight_.reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return variable_list(3);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto x = x_.unpack();
    const auto slab = slab_.unpack();
    const auto weight = weight_.unpack();
    const Wanted wanted{
        task_should_compute_output(0),
        task_should_compute_output(1),
        task_should_compute_output(2)};
    const CommScope scope(backward_of(scope_));
    const auto result = at::GradMode::is_enabled()
        ? joined_gradients(grads[0], x, weight, wanted, *plan_)
        : apart_gradients(grads[0], x, slab, weight, wanted, *plan_);
    return {result.x, result.weight, result.bias};
  }

  SavedVariable x_;
  SavedVariable slab_;
  SavedVariable weight_;
  std::string scope_;
  Plan plan_;
};

} // namespace

Tensor conv_apart(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const Plan& plan) {
  Forward forward;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    forward = compute(x, weight, bias, *plan);
  }
  if (needs_node(x) || needs_node(weight) || needs_node(bias)) {
    auto node = make_node<ConvApartBackward>(x, forward.slab, weight, plan);
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    torch::autograd::set_history(forward.output, node);
  }
  return forward.output;
}

} // namespace shardtensor
