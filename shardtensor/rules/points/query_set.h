#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/points/neighbours.h"

namespace shardtensor::detail {

/// A piece of a cloud, one tree for each batch entry.
using Trees = std::vector<PointTree>;

/// A rank's queries (B, M, D) while they meet piece after piece.
class QuerySet {
 public:
  QuerySet(const at::Tensor& queries, const Wanted& wanted);

  void meet(const Trees& trees);

  // For queries that are sent to other ranks. They are named by their places in
  // a batch entry along a curve, in which neighbours are near each other.

  /// Those of an entry; each one's limit is what it has already, if nearer.
  OrderedQueries open_queries(int64_t entry) const;
  /// What others found for queries at these places, ascending.
  void take(int64_t entry, const at::Tensor& places, const Nearest& found);
  void take(int64_t entry, const at::Tensor& places, const Pairs& found);

  /// Of the queries in their own order.
  Neighbours neighbours() const;

 private:
  struct Entry {
    OrderedQueries queries; // along the curve
    Nearest nearest; // of the queries in their own order
    std::vector<Pairs> pairs; // of each piece
  };
  static Pairs pairs(const Entry& entry);

  Wanted wanted_;
  Nearest nearest_; // of all entries
  std::vector<Entry> entries_; // of the batch
};

/// The trees of a rank's piece (B, N, D).
Trees make_trees(const at::Tensor& points, int64_t first_row);
/// Of points that are those `rows` (N), int32, of the cloud.
Trees make_trees(const at::Tensor& points, const at::Tensor& rows);

/// The piece in the order of its trees, as bytes that travel.
at::Tensor pack_trees(const at::Tensor& points);
/// Of a piece of `points` points per batch entry, of which the first is row
/// `first_row`; `like` has its batch, dims and dtype.
Trees unpack_trees(
    const at::Tensor& bytes,
    const at::Tensor& like,
    int64_t points,
    int64_t first_row);
int64_t packed_bytes(const at::Tensor& like, int64_t points);

/// What queries from elsewhere find in a piece alone: (n, D + 1), coordinates
/// and the limit.
Nearest nearest_in(
    const PointTree& tree,
    const at::Tensor& with_limits,
    int64_t most);
Pairs pairs_in(const PointTree& tree, const at::Tensor& with_limits);

} // namespace shardtensor::detail
