#include "shardtensor/layout/plans/transfer.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include <c10/util/Exception.h>

#include "shardtensor/layout/plans/links.h"
#include "shardtensor/layout/print.h"

namespace shardtensor {

using namespace detail;

namespace {

// ---- plans from links -------------------------------------------------------

using Runs = std::vector<Run>;
/// For one position and dim: the runs shared with each piece of the other side.
using RunsByPiece = std::vector<Runs>;

std::vector<RunsByPiece> runs_by_piece(
    const MeshLinks& links,
    int64_t position,
    const Side& own,
    const Side& other) {
  std::vector<RunsByPiece> result;
  result.reserve(links.dims.size());
  for (const DimLinks& dim : links.dims) {
    RunsByPiece& runs = result.emplace_back(links.mesh.ranks(dim.*other.axes));
    const int64_t piece = links.mesh.piece(position, dim.*own.axes);
    for (const Link& link : dim.links) {
      if (link.*own.piece == piece) {
        runs[link.*other.piece].push_back(link.run);
      }
    }
  }
  return result;
}

bool agree_on_own_axes(const MeshLinks& links, int64_t a, int64_t b) {
  for (int64_t axis = 0; axis < links.mesh.axes(); ++axis) {
    if (links.along[axis] == Along::Own &&
        links.mesh.coordinate(a, axis) != links.mesh.coordinate(b, axis)) {
      return false;
    }
  }
  return true;
}

/// The runs of each dim that a peer shares; false when a dim has none.
bool select_runs(
    const MeshLinks& links,
    const std::vector<RunsByPiece>& by_piece,
    const Side& side,
    int64_t peer,
    std::vector<const Runs*>& selected) {
  for (size_t dim = 0; dim < by_piece.size(); ++dim) {
    const int64_t piece = links.mesh.piece(peer, links.dims[dim].*side.axes);
    selected[dim] = &by_piece[dim][piece];
    if (selected[dim]->empty()) {
      return false;
    }
  }
  return true;
}

/// Calls visit(peer, runs of each dim) for each position on the other side
/// that shares elements with `position` on its own.
template <class Visit>
void for_each_peer(
    const MeshLinks& links,
    int64_t position,
    const Side& own,
    const Side& other,
    const Visit& visit) {
  const auto by_piece = runs_by_piece(links, position, own, other);
  std::vector<const Runs*> selected(by_piece.size());
  for (int64_t peer = 0; peer < links.mesh.ranks(); ++peer) {
    if (agree_on_own_axes(links, position, peer) &&
        select_runs(links, by_piece, other, peer, selected)) {
      visit(peer, selected);
    }
  }
}

Transfer make_transfer(
    int64_t src,
    int64_t dst,
    const std::vector<const Runs*>& runs,
    const std::vector<size_t>& at) {
  Transfer transfer{src, dst, Box(runs.size()), Box(runs.size())};
  for (size_t dim = 0; dim < runs.size(); ++dim) {
    const Run& run = (*runs[dim])[at[dim]];
    transfer.source[dim] = run.source;
    transfer.target[dim] = run.target;
  }
  return transfer;
}

/// The next combination in row-major order; false after the last.
bool advance(const std::vector<const Runs*>& runs, std::vector<size_t>& at) {
  for (size_t dim = runs.size(); dim-- > 0;) {
    if (++at[dim] < runs[dim]->size()) {
      return true;
    }
    at[dim] = 0;
  }
  return false;
}

/// One transfer for each combination of the dims' runs.
void append_product(
    int64_t src,
    int64_t dst,
    const std::vector<const Runs*>& runs,
    std::vector<Transfer>& transfers) {
  std::vector<size_t> at(runs.size(), 0);
  do {
    transfers.push_back(make_transfer(src, dst, runs, at));
  } while (advance(runs, at));
}

std::vector<Transfer> sends_of(const MeshLinks& links, int64_t position) {
  std::vector<Transfer> sends;
  for_each_peer(
      links,
      position,
      kSource,
      kTarget,
      [&](int64_t peer, const std::vector<const Runs*>& runs) {
        append_product(position, peer, runs, sends);
      });
  return sends;
}

std::vector<Transfer> receives_of(const MeshLinks& links, int64_t position) {
  std::vector<Transfer> receives;
  for_each_peer(
      links,
      position,
      kTarget,
      kSource,
      [&](int64_t peer, const std::vector<const Runs*>& runs) {
        append_product(peer, position, runs, receives);
      });
  return receives;
}

// ---- whether the receives tile the target -----------------------------------

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int64_t total(const std::vector<Transfer>& receives) {
  int64_t elements = 0;
  for (const Transfer& receive : receives) {
    elements += numel(receive.target);
  }
  return elements;
}

ExchangePlan make_plan(
    const MeshLinks& links,
    int64_t position,
    std::vector<int64_t> source_sizes,
    std::vector<int64_t> target_sizes) {
  const std::vector<int64_t> crossed = crossed_axes(links);
  ExchangePlan plan;
  plan.source_sizes = std::move(source_sizes);
  plan.target_sizes = std::move(target_sizes);
  plan.sends = sends_of(links, position);
  plan.receives = receives_of(links, position);
  // Receives overlap only where they are summed, and then exceed the target.
  plan.covers = total(plan.receives) == product(plan.target_sizes);
  plan.axis = crossed.size() == 1 ? crossed.front() : -1;
  plan.largest_message = largest_message(links, crossed);
  const int64_t ranks = links.mesh.ranks();
  plan.peers = (linked_positions(links) + ranks - 1) / ranks;
  return plan;
}

// ---- redistribute -----------------------------------------------------------

void check_partial(const ShardSpec& from, const ShardSpec& to) {
  for (int64_t axis = 0; axis < from.mesh()->axes(); ++axis) {
    const Placement& before = from.placement(axis);
    const Placement& after = to.placement(axis);
    TORCH_CHECK_VALUE(
        !after.is_partial() || before == after,
        "plan_redistribute: ",
        before,
        " to ",
        after,
        " on axis ",
        axis,
        ", expected the same Partial on both sides");
    TORCH_CHECK_NOT_IMPLEMENTED(
        !before.is_partial() || before == after || before.reduce == Reduce::Sum,
        "plan_redistribute: ",
        before,
        " to ",
        after,
        " on axis ",
        axis,
        ", expected Partial(sum): an exchange only sums");
  }
}

void check_position(const Mesh& mesh, int64_t position, const char* what) {
  TORCH_CHECK_INDEX(
      position >= 0 && position < mesh.ranks(),
      what,
      ": position ",
      position,
      ", expected 0 <= position < ",
      mesh.ranks());
}

void check_dims(const std::vector<int64_t>& dims, const ShardSpec& spec) {
  for (int64_t dim : dims) {
    TORCH_CHECK_INDEX(
        dim >= 0 && dim < spec.dim(),
        "plan_gather_rows: dim ",
        dim,
        ", expected 0 <= dim < ",
        spec.dim());
  }
}

// ---- what moves -------------------------------------------------------------

/// How many rows of a piece lie before `row`, 0 <= row <= extent.
int64_t rows_before(const Partition& partition, int64_t piece, int64_t row) {
  if (row == 0) {
    return 0; // a period may be empty
  }
  const Interval own = partition.interval(piece);
  const int64_t within = row % partition.period() - own.begin;
  return row / partition.period() * own.extent() +
      std::clamp<int64_t>(within, 0, own.extent());
}

/// The rows that two pieces of a dim have in common, without a look at each
/// repetition of both.
int64_t shared_rows(
    const Partition& coarse,
    int64_t piece,
    const Partition& fine,
    int64_t other) {
  if (coarse.repeat() > fine.repeat()) {
    return shared_rows(fine, other, coarse, piece);
  }
  const bool alike = fine.period() > 0 && coarse.period() % fine.period() == 0;
  int64_t rows = 0;
  for (int64_t k = 0; k < (alike ? 1 : coarse.repeat()); ++k) {
    const Interval own = coarse.interval(piece).shifted(k * coarse.period());
    rows +=
        rows_before(fine, other, own.end) - rows_before(fine, other, own.begin);
  }
  return alike ? rows * coarse.repeat() : rows;
}

/// The elements that positions take from themselves, all of them together.
int64_t kept_elements(const ShardSpec& from, const ShardSpec& to) {
  std::vector<int64_t> kept(from.mesh()->ranks(), 1);
  for (int64_t dim = 0; dim < from.dim(); ++dim) {
    const Partition before = partition_of(from, dim);
    const Partition after = partition_of(to, dim);
    for (int64_t position = 0; position < from.mesh()->ranks(); ++position) {
      kept[position] *= shared_rows(
          before, from.piece(dim, position), after, to.piece(dim, position));
    }
  }
  return std::accumulate(kept.begin(), kept.end(), int64_t{0});
}

} // namespace

void detail::check_same_tensor(const ShardSpec& from, const ShardSpec& to) {
  TORCH_CHECK_VALUE(
      from.mesh() == to.mesh(),
      "redistribute: from ",
      *from.mesh(),
      " to ",
      *to.mesh(),
      ", expected the same mesh");
  TORCH_CHECK_VALUE(
      from.sizes() == to.sizes(),
      "redistribute: from sizes (",
      join(from.sizes()),
      ") to (",
      join(to.sizes()),
      "), expected the same");
}

ExchangePlan plan_redistribute(
    const SpecPtr& from,
    const SpecPtr& to,
    int64_t position) {
  check_same_tensor(*from, *to);
  check_partial(*from, *to);
  check_position(*from->mesh(), position, "plan_redistribute");
  return make_plan(
      link_layouts(*from, *to),
      position,
      from->local_sizes(position),
      to->local_sizes(position));
}

int64_t moved_elements(const SpecPtr& from, const SpecPtr& to) {
  check_same_tensor(*from, *to);
  if (from == to) {
    return 0;
  }
  return free_coordinates(link_axes(*from, *to)) * from->numel() -
      kept_elements(*from, *to);
}

ExchangePlan plan_gather_rows(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const std::function<RowSource(int64_t dim, int64_t position)>& rows,
    int64_t position) {
  check_position(*spec->mesh(), position, "plan_gather_rows");
  check_dims(dims, *spec);
  std::vector<int64_t> source_sizes = spec->local_sizes(position);
  std::vector<int64_t> target_sizes = source_sizes;
  for (int64_t dim : dims) {
    target_sizes[dim] = rows(dim, position).extent();
  }
  return make_plan(
      link_rows(*spec, dims, rows),
      position,
      std::move(source_sizes),
      std::move(target_sizes));
}

} // namespace shardtensor
