#include "shardtensor/graph/shard_graph.h"

#include <tuple>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/collectives/route.h"
#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/layout/cut_by_all.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/index/row_exchange.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;

constexpr auto kOp = "ShardGraph";

// ---- what is given ----------------------------------------------------------

void check_nodes(const Tensor& nodes, const char* name) {
  TORCH_CHECK_TYPE(
      is_shard_tensor(nodes) && nodes.scalar_type() == at::kLong,
      kOp,
      ": expected ",
      name,
      " to be a ShardTensor of int64, got ",
      is_shard_tensor(nodes) ? "one" : "a plain tensor",
      " of ",
      nodes.scalar_type());
  const auto& layout = spec(nodes);
  TORCH_CHECK_VALUE(
      nodes.dim() == 1 && is_cut_by_all(*layout, 0),
      kOp,
      ": expected ",
      name,
      " (N) cut by all axes of their mesh, got ",
      to_string(*layout));
}

/// Plain edges are this rank's word: ranks compare.
void check_edges(const Tensor& edge_index, const MeshPtr& mesh) {
  agree_on_call(Group(mesh->group()), edge_index, [&]() -> Collective {
    TORCH_CHECK_VALUE(
        edge_index.dim() == 2 && edge_index.size(0) == 2 &&
            edge_index.scalar_type() == at::kLong,
        kOp,
        ": expected edge_index (2, E) of int64, got ",
        edge_index.sizes(),
        " of ",
        edge_index.scalar_type());
    const bool is_sharded = is_shard_tensor(edge_index);
    TORCH_CHECK_VALUE(
        !is_sharded || spec(edge_index)->mesh() == mesh,
        kOp,
        ": expected edge_index on the mesh of its nodes");
    return {
        c10::str(
            kOp,
            " of edges ",
            edge_index.sizes(),
            is_sharded ? " in a ShardTensor" : " in a plain tensor"),
        "",
        {},
        {}};
  });
}

/// The given edges, cut along E by all axes, as they are if they are.
Tensor cut_edges(const Tensor& edge_index, const MeshPtr& mesh) {
  const auto edges = promote(edge_index.detach(), mesh);
  return redistribute(edges, cut_by_all(spec(edges), 1));
}

// ---- renumbering ------------------------------------------------------------

/// Where ranks send each other numbers.
Tensor beside_numbers(const Tensor& x, const MeshPtr& mesh) {
  return x.to(Group(mesh->group()).device_of_numbers());
}

/// The new numbers of nodes, each on the rank whose chunk of old numbers it is
/// in.
class NodeNumbers {
 public:
  explicit NodeNumbers(const Tensor& nodes)
      : mesh_(spec(nodes)->mesh()),
        chunks_(Partition::chunked(nodes.size(0), mesh_->ranks())) {
    check_planned_index(kOp, nodes, 0, nodes.size(0));
    const auto old = beside_numbers(to_local(nodes.detach()), mesh_);
    const auto begin = spec(nodes)->interval(0).begin;
    const Route route(pieces_of(old, chunks_), mesh_->group());
    const auto numbers = at::arange(old.numel(), old.options()).add(begin);
    const auto own = chunks_.interval(mesh_->position());
    numbers_ = at::full({own.extent()}, -1, old.options());
    numbers_.index_copy_(
        0, route.send(old).sub(own.begin), route.send(numbers));
    check_all_are_named();
  }

  /// Of nodes in old numbers. Communication: two numbers for each.
  Tensor of(const Tensor& old) const {
    const Route route(pieces_of(old, chunks_), mesh_->group());
    const auto begin = chunks_.interval(mesh_->position()).begin;
    return route.answer(numbers_.index_select(0, route.send(old).sub(begin)));
  }

 private:
  void check_all_are_named() const {
    const auto missing = numbers_.lt(0).any().to(at::kLong);
    const auto all = all_reduce(missing, Reduce::Max, mesh_->group());
    TORCH_CHECK_VALUE(
        all.item<int64_t>() == 0,
        kOp,
        ": expected nodes to name each of ",
        chunks_.extent(),
        " nodes once, got one twice");
  }

  MeshPtr mesh_;
  Partition chunks_;
  Tensor numbers_;
};

// ---- edges ------------------------------------------------------------------

/// Ends in new numbers and the edges' places in the given list.
struct Edges {
  Tensor sources;
  Tensor targets;
  Tensor places;

  Edges sorted(const Tensor& order) const {
    return {
        sources.index_select(0, order),
        targets.index_select(0, order),
        places.index_select(0, order)};
  }
};

/// Interior edges stand first.
std::pair<Edges, int64_t> interior_first(
    const Edges& edges,
    const Interval& own) {
  const auto inside =
      edges.sources.ge(own.begin).logical_and_(edges.sources.lt(own.end));
  const auto first = inside.nonzero().select(1, 0);
  const auto last = inside.logical_not().nonzero().select(1, 0);
  return {edges.sorted(at::cat({first, last})), first.numel()};
}

/// The layout of a tensor whose rows are cut as `rows` is.
SpecPtr beside(const SpecPtr& rows, const Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes[0] = rows->size(0);
  Numbers from(x.dim(), -1);
  from[0] = 0;
  return with_dims(rows, std::move(sizes), from);
}

/// Of all ranks' `local`, which are told on one rank: all ranks compare.
Tensor tensor_of_rows(
    const char* op,
    const char* each,
    const Tensor& local,
    const SpecPtr& rows) {
  agree_on_call(Group(rows->mesh()->group()), local, [&]() -> Collective {
    TORCH_CHECK_TYPE(
        !layout_of(local), op, ": expected a plain tensor, got a ShardTensor");
    const auto own = rows->interval(0).extent();
    TORCH_CHECK_VALUE(
        local.dim() > 0 && local.size(0) == own,
        op,
        ": expected a row for each own ",
        each,
        ", (",
        own,
        ", ...), got ",
        local.sizes());
    return {text_of_rows(op, local, 0), "", {}, {}};
  });
  return from_local(local, beside(rows, local));
}

// ---- the halo of features ---------------------------------------------------

/// Of the own rows, as `meanwhile` gets them, and of those that came from
/// others while it ran. One node, so that a rank whose loss uses the former
/// alone still gets what the others' losses say of its rows.
struct HaloBackward final : torch::autograd::Node {
  explicit HaloBackward(std::shared_ptr<const RowExchange> exchange)
      : exchange(std::move(exchange)), scope(current_comm_scope()) {}
  std::string name() const override {
    return "ShardGraphHaloBackward";
  }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    const CommScope in(backward_of(scope));
    const auto& of_own = gradients[0];
    auto of_others = gradients[1];
    if (!of_others.defined()) { // of the own rows' graph, for a second backward
      of_others = input_metadata(1).zeros_like() + of_own.narrow(0, 0, 0).sum();
    }
    const auto returned = exchange->returned(of_others, 0);
    return {of_own.defined() ? of_own + returned : returned};
  }
  std::shared_ptr<const RowExchange> exchange;
  std::string scope;
};

} // namespace

ShardGraph::ShardGraph(
    const Tensor& edge_index,
    const Tensor& targets,
    const Tensor& sources) {
  const CommScope scope("shardtensor::ShardGraph");
  const OutsideTransforms of_all_levels;
  check_nodes(targets, "targets");
  check_nodes(sources, "sources");
  targets_ = spec(targets);
  sources_ = spec(sources);
  const auto& mesh = targets_->mesh();
  TORCH_CHECK_VALUE(
      sources_->mesh() == mesh, kOp, ": expected sources on targets' mesh");
  check_edges(edge_index, mesh);

  const auto given = cut_edges(edge_index, mesh);
  check_planned_index(kOp, given.select(0, 0), 0, sources.size(0));
  check_planned_index(kOp, given.select(0, 1), 0, targets.size(0));
  const auto ends = beside_numbers(to_local(given), mesh);
  const NodeNumbers target_numbers(targets);
  const auto source_numbers = sources.is_same(targets)
      ? target_numbers.of(ends.select(0, 0).contiguous())
      : NodeNumbers(sources).of(ends.select(0, 0).contiguous());
  const Edges renumbered{
      source_numbers,
      target_numbers.of(ends.select(0, 1).contiguous()),
      at::arange(ends.size(1), ends.options())
          .add(spec(given)->interval(1).begin)};

  const Route route(
      pieces_of(renumbered.targets, targets_->partition(0)), mesh->group());
  Edges own{
      route.send(renumbered.sources),
      route.send(renumbered.targets),
      route.send(renumbered.places)};
  std::tie(own, interior_edges_) = interior_first(own, sources_->interval(0));

  const auto device = edge_index.device();
  const Partition pieces(gather_number(own.places.numel(), mesh->group()));
  const auto count = given.size(1);
  edge_index_ = from_local(
      at::stack({own.sources, own.targets}).to(device),
      cut_by_all(mesh, {2, count}, 1, pieces));
  edge_permutation_ =
      from_local(own.places.to(device), cut_by_all(mesh, {count}, 0, pieces));

  exchange_ = row_exchange(kOp, edge_index_.select(0, 0), sources_, 0, false);
  const auto mine = sources_->interval(0);
  local_edge_index_ = at::stack(
      {exchange_->places(),
       own.targets.to(device).sub(targets_->interval(0).begin)});
  halo_nodes_ = exchange_->others(
      at::arange(mine.extent(), exchange_->places().options()).add(mine.begin),
      0);
}

Tensor ShardGraph::own_rows(const Tensor& x) const {
  const auto layout = layout_of(x);
  TORCH_CHECK_TYPE(layout, "ShardGraph.halo: expected a ShardTensor");
  TORCH_CHECK_VALUE(
      x.dim() > 0 && x.size(0) == sources_->size(0) &&
          layout->mesh() == sources_->mesh(),
      "ShardGraph.halo: expected a row for each of ",
      sources_->size(0),
      " sources, on their mesh, got ",
      to_string(*layout));
  return to_local(redistribute(x, beside(sources_, x)));
}

Tensor ShardGraph::node_tensor(const Tensor& local) const {
  return tensor_of_rows("ShardGraph.node_tensor", "node", local, targets_);
}

Tensor ShardGraph::edge_tensor(const Tensor& local) const {
  return tensor_of_rows(
      "ShardGraph.edge_tensor", "edge", local, spec(edge_permutation_));
}

Tensor ShardGraph::halo(const Tensor& x) const {
  const CommScope scope("shardtensor::ShardGraph.halo");
  const auto own = own_rows(x);
  return at::cat({own, exchange_->others(own, 0)});
}

Tensor ShardGraph::halo(
    const Tensor& x,
    c10::function_ref<void(const Tensor&)> meanwhile) const {
  const CommScope scope("shardtensor::ShardGraph.halo");
  auto own = own_rows(x);
  // Levels record operators, which have tangents.
  if (is_transformed(own) || has_tangent({own})) {
    meanwhile(own);
    return at::cat({own, exchange_->others(own, 0)});
  }
  NodePtr node; // null where nothing is recorded
  if (needs_node(own)) {
    keep_backward_in_one_thread(own);
    node = make_node<HaloBackward>(exchange_);
    node->set_next_edges(torch::autograd::collect_next_edges(own));
    own = own.detach();
    torch::autograd::set_history(own, node);
  }
  const bool records = at::GradMode::is_enabled();
  Tensor others;
  {
    const at::NoGradGuard no_grad;
    others = exchange_->others_during(own.detach(), 0, [&] {
      const at::AutoGradMode mode(records);
      meanwhile(own);
    });
  }
  if (node) {
    torch::autograd::set_history(others, node);
  }
  return at::cat({own, others});
}

} // namespace shardtensor
