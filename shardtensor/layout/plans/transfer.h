#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/plans/row_source.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// One box that moves between two mesh positions. `source` is in the local
/// coordinates of src's tensor, `target` in those of dst's; same extents.
struct Transfer {
  int64_t src = 0;
  int64_t dst = 0;
  Box source;
  Box target;
  bool operator==(const Transfer&) const = default;
};

/// What one position does in an exchange: a linear map from the local tensors
/// of all positions to new local tensors. Targets that no transfer reaches are
/// zero; where several transfers reach one element they are summed
/// (`accumulate`). The adjoint is the same exchange backwards, see
/// comm/primitives/exchange_code.h.
///
/// For every pair (src, dst) the transfers stand in the same order in src's
/// `sends` and in dst's `receives`: they travel in one message.
struct ExchangePlan {
  std::vector<int64_t> source_sizes; // local sizes before
  std::vector<int64_t> target_sizes; // local sizes after
  std::vector<Transfer> sends; // src is this position; dst may be, too
  std::vector<Transfer> receives; // dst is this position; src may be, too
  bool covers = false; // each target element is written exactly once
  // The next four are the same at every position, for they decide how data
  // travels: >= 0 when, at every position, all peers differ in this mesh axis
  // only; a bound of the elements in any one message between two different
  // positions, 0 only when there is none at all, nothing where no position
  // knows it of the others; and how many positions one sends to, itself among
  // them, on average, rounded up, or -1: not known; and whether every target is
  // all sources, one behind the other in the order of the group's ranks.
  int64_t axis = -1;
  std::optional<int64_t> largest_message = 0;
  int64_t peers = -1;
  bool gathers = false;

  bool operator==(const ExchangePlan&) const = default;
};

/// Moves a tensor laid out as `from` into `to`; both of the same mesh and
/// global sizes. A repeated partition takes one box per repetition. A rank
/// takes what it holds itself from itself, and from an axis on which `from` is
/// Replicate only its own coordinate, so each element moves at most once. Where
/// `from` is Partial(sum), every coordinate of that axis contributes and the
/// pieces are summed: a reduce-scatter when `to` shards there. Raises when `to`
/// is Partial on an axis where `from` is not the same Partial (that needs no
/// messages), and when `from` is a Partial other than sum there.
ExchangePlan plan_redistribute(
    const SpecPtr& from,
    const SpecPtr& to,
    int64_t position);

namespace detail {

/// Raises, naming redistribute, for layouts on two meshes or of two sizes.
void check_same_tensor(const ShardSpec& from, const ShardSpec& to);

} // namespace detail

/// Bytes-independent cost: elements that cross between ranks, over all ranks.
/// A Partial that is reduced counts as Partial(sum) does; one that `to` adds
/// costs nothing. Never raises for a combination of placements.
int64_t moved_elements(const SpecPtr& from, const SpecPtr& to);

/// Gives every position, along each of `dims`, the global rows that
/// `rows(dim, position)` names, from a tensor laid out as `spec`. Halo
/// exchange of any width, boundary and geometry is this; corners included, one
/// message per pair, and a run of rows that follow each other is one box.
/// `rows` must be the same function on all ranks and depend on position only
/// through its coordinates on the axes that shard `dim`.
ExchangePlan plan_gather_rows(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const std::function<RowSource(int64_t dim, int64_t position)>& rows,
    int64_t position);

} // namespace shardtensor
