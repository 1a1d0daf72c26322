#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/points/neighbours.h"

namespace shardtensor::detail {

// What functions of points and queries are made of: bring both to layouts that
// can meet, search, and compute from the neighbours' coordinates.

/// A call's operands on this rank, (B, N, D) and (B, M, D), and how they meet
/// the other ranks'.
struct LocalCall {
  const char* op;
  at::Tensor points;
  at::Tensor queries;
  CloudPieces cloud;
  MeshPtr mesh; // null for plain tensors
};

/// A call with its layouts; plain tensors have none. Raises, on all ranks
/// alike, unless points and queries fit each other and are on one mesh.
class NeighbourCall {
 public:
  NeighbourCall(
      const char* op,
      const at::Tensor& points,
      const at::Tensor& queries,
      bool whole_queries = false);

  const LocalCall& local() const {
    return local_;
  }
  bool is_batched() const {
    return batched_;
  }
  /// Of the queries for the search; null for plain tensors.
  const SpecPtr& layout() const {
    return layout_;
  }
  /// What belongs to the points, ([B,] N, ...), as (B, n, ...) on this rank.
  at::Tensor beside_points(const at::Tensor& values) const;
  /// A result of this rank (B, M, ...), as the queries came.
  at::Tensor beside_queries(at::Tensor local) const;

 private:
  void lay_out(
      const at::Tensor& points,
      const at::Tensor& queries,
      bool whole_queries);

  LocalCall local_;
  bool batched_ = false;
  SpecPtr layout_;
  SpecPtr given_; // as the queries came
  SpecPtr points_; // of the points for the search
  SpecPtr point_terms_;
};

// Each raises, naming `op`, unless its argument is in bounds.
void check_k(const char* op, int64_t k, const at::Tensor& points);
void check_radius(const char* op, double radius);
void check_max_points(const char* op, int64_t max_points);

/// Raises where a coordinate is not finite, on every rank if on one.
/// Communication: one all-reduce of a number.
void check_finite(const LocalCall& call);

/// In check mode: raises on every rank where they gave other numbers.
void check_same_number(const LocalCall& call, const char* name, double number);

/// After check_finite. Communication: that of both, and of find_neighbours.
Neighbours search(const LocalCall& call, const Wanted& wanted);

/// What results of either kind are made from: neighbour i of the list belongs
/// to query queries[i] of batch entry entries[i].
struct List {
  at::Tensor entries;
  at::Tensor queries;
  at::Tensor rows; // -1: none
  at::Tensor squares;
};

/// (B, M, k): every slot is in the list.
List list_of(const Nearest& nearest, bool may_have_none);

bool is_differentiated(const LocalCall& call);
/// Backward or in forward mode.
bool is_differentiated(const at::Tensor& x);

/// The rows of values (B, n, ...) beside the points: of the shape of list.rows,
/// with the values' last dim.
at::Tensor values_of(
    const LocalCall& call,
    const at::Tensor& values,
    const List& list);

/// The squared distances; computed again from the neighbours' coordinates
/// `found`, or those fetched here where that is undefined, if the call is
/// differentiated.
at::Tensor squares_of(
    const LocalCall& call,
    const List& list,
    at::Tensor found = {});

} // namespace shardtensor::detail
