#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

namespace detail {
class RowExchange;
}

/// A graph cut over all ranks of a mesh: each has its own nodes, the edges that
/// end in them, and a list of the halo, the sources of these edges that others
/// own. Nodes are renumbered so that each rank's stand together; an edge is an
/// interior one where both ends have the same owner, a border one elsewhere. No
/// rank ever holds the whole graph.
///
/// Example: the path 0 -> 1 -> 2 -> 3, nodes 0 and 2 on rank 0. Renumbered, in
/// the order 0, 2, 1, 3, the edges are 0 -> 2, 2 -> 1, 1 -> 3. Rank 0 has 2 ->
/// 1, whose source is its halo: rows {0, 1 | 2} and the local edge 2 -> 1.
///
/// Thread safety / ordering: as in primitives.h.
class ShardGraph {
 public:
  /// `edge_index` (2, E), int64: sources, then targets, in the numbers before;
  /// a ShardTensor in any layout or a plain tensor that all ranks have alike.
  /// `targets` and `sources`, one set of nodes or two, where the graph leads
  /// from one to the other: int64 (N) cut by all axes of their mesh,
  /// node i was node targets[i], as partition_points gives it. Raises on all
  /// ranks for an edge to nowhere and for what is no permutation.
  /// Communication: each edge once, and four numbers for each end.
  /// Memory: that of the own edges and nodes.
  ShardGraph(
      const at::Tensor& edge_index,
      const at::Tensor& targets,
      const at::Tensor& sources);
  /// Of one set of nodes.
  ShardGraph(const at::Tensor& edge_index, const at::Tensor& nodes)
      : ShardGraph(edge_index, nodes, nodes) {}

  /// (2, E) in new numbers, cut along E: each rank's end in its nodes, the
  /// interior ones first, else in the order that was given.
  const at::Tensor& edge_index() const {
    return edge_index_;
  }
  /// (E), cut alike: edge i was edge edge_permutation()[i].
  const at::Tensor& edge_permutation() const {
    return edge_permutation_;
  }
  /// Plain, (2, own edges): sources among the rows that halo() gives, targets
  /// among the own nodes.
  const at::Tensor& local_edge_index() const {
    return local_edge_index_;
  }
  /// How many of the own edges, the first ones, have their source here.
  int64_t interior_edges() const {
    return interior_edges_;
  }
  /// Plain: the new numbers of the sources that others own, ascending.
  const at::Tensor& halo_nodes() const {
    return halo_nodes_;
  }
  const SpecPtr& targets() const {
    return targets_;
  }
  const SpecPtr& sources() const {
    return sources_;
  }

  /// Plain: the own rows of x, a ShardTensor with a row for each source, and
  /// behind them the halo's. Differentiable to any order: the gradients of halo
  /// rows are added where these came from. Communication: one message to and
  /// from each rank concerned, none where no edge crosses.
  at::Tensor halo(const at::Tensor& x) const;
  /// The same; `meanwhile` gets the own rows and runs while messages travel.
  at::Tensor halo(
      const at::Tensor& x,
      c10::function_ref<void(const at::Tensor&)> meanwhile) const;

  /// A row for each own target, or own edge, as the ShardTensor of all.
  at::Tensor node_tensor(const at::Tensor& local) const;
  at::Tensor edge_tensor(const at::Tensor& local) const;

 private:
  at::Tensor own_rows(const at::Tensor& x) const;

  SpecPtr targets_;
  SpecPtr sources_;
  std::shared_ptr<const detail::RowExchange> exchange_;
  at::Tensor edge_index_;
  at::Tensor edge_permutation_;
  at::Tensor local_edge_index_;
  at::Tensor halo_nodes_;
  int64_t interior_edges_ = 0;
};

} // namespace shardtensor
