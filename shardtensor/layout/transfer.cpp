#include "shardtensor/layout/transfer.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include <c10/util/Exception.h>

#include "shardtensor/layout/print.h"

// Note [Links]
// Boxes are products of intervals, so a plan is a product over dims too. For
// each dim we list once, for the whole mesh, which rows of which source piece
// become which rows of which target piece: its *links*. Two positions exchange
// the product of their pieces' links over all dims, if their coordinates agree
// on the axes along which data does not move. The links are the same on all
// ranks and stand in one order: so do the transfers of a pair on both sides,
// and so every rank draws the same conclusion about the axis to talk along.

namespace shardtensor {

namespace {

/// Consecutive rows of one dim that move, in local coordinates of both sides.
struct Run {
  Interval source;
  Interval target;
};

struct Link {
  int64_t source_piece;
  int64_t target_piece;
  Run run;
};

struct DimLinks {
  std::vector<int64_t> source_axes; // mesh axes that shard the dim
  std::vector<int64_t> target_axes;
  std::vector<Link> links; // in target row order within a pair
};

/// What happens to the data along one mesh axis.
enum class Along {
  Own, // a position takes from its own coordinate only
  Moves, // the source is sharded: coordinates follow from the links
  Summed, // a position takes from every coordinate
};

struct MeshLinks {
  const Mesh& mesh;
  std::vector<Along> along; // per mesh axis
  std::vector<DimLinks> dims;
};

// ---- links of one dim -------------------------------------------------------

/// Rows [begin, end) of the dim, which a piece holds from row `local` on.
struct Stretch {
  Interval rows;
  int64_t piece;
  int64_t local;
};

/// All rows of a dim in order, without the empty stretches.
std::vector<Stretch> stretches(const ShardSpec& spec, int64_t dim) {
  if (!spec.is_sharded(dim)) {
    const Interval all{0, spec.size(dim)};
    return all.empty() ? std::vector<Stretch>{}
                       : std::vector<Stretch>{{all, 0, 0}};
  }
  const Partition& partition = spec.partition(dim);
  std::vector<Stretch> result;
  result.reserve(partition.repeat() * partition.pieces());
  for (int64_t k = 0; k < partition.repeat(); ++k) {
    for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
      const Interval rows = partition.interval(piece);
      if (!rows.empty()) {
        const int64_t local = k * rows.extent();
        result.push_back({rows.shifted(k * partition.period()), piece, local});
      }
    }
  }
  return result;
}

/// The same rows relative to the beginning of the piece's local tensor.
Interval localized(const Interval& rows, const Stretch& stretch) {
  return rows.shifted(stretch.local - stretch.rows.begin);
}

std::vector<Link> redistribute_links(
    const std::vector<Stretch>& from,
    const std::vector<Stretch>& to) {
  std::vector<Link> links;
  links.reserve(from.size() + to.size());
  for (size_t i = 0, j = 0; i < from.size() && j < to.size();) {
    const Interval rows = intersect(from[i].rows, to[j].rows);
    links.push_back(
        {from[i].piece,
         to[j].piece,
         {localized(rows, from[i]), localized(rows, to[j])}});
    const int64_t end = rows.end;
    i += from[i].rows.end == end;
    j += to[j].rows.end == end;
  }
  return links;
}

/// Where a row lies: piece, local row, and how many rows follow in that piece.
struct RowLocation {
  int64_t piece;
  int64_t local;
  int64_t left;
};

RowLocation locate(const ShardSpec& spec, int64_t dim, int64_t row) {
  if (!spec.is_sharded(dim)) {
    return {0, row, spec.size(dim) - row};
  }
  const Partition& partition = spec.partition(dim);
  const int64_t piece = partition.owner(row);
  const Interval rows = partition.interval(piece);
  const int64_t k = row / partition.period();
  const int64_t within = row % partition.period() - rows.begin;
  return {piece, k * rows.extent() + within, rows.extent() - within};
}

void check_rows(const RowSource& rows, const ShardSpec& spec, int64_t dim) {
  for (int64_t row : rows) {
    TORCH_CHECK_INDEX(
        row >= -1 && row < spec.size(dim),
        "plan_gather_rows: row ",
        row,
        " of dim ",
        dim,
        ", expected -1 (zero) or 0 <= row < ",
        spec.size(dim));
  }
}

void append_gather_links(
    const ShardSpec& spec,
    int64_t dim,
    int64_t target_piece,
    const RowSource& rows,
    std::vector<Link>& links) {
  const int64_t count = static_cast<int64_t>(rows.size());
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    end = begin + 1;
    if (rows[begin] < 0) {
      continue;
    }
    const RowLocation at = locate(spec, dim, rows[begin]);
    while (end < count && rows[end] == rows[end - 1] + 1 &&
           end - begin < at.left) {
      ++end;
    }
    const Interval source{at.local, at.local + end - begin};
    links.push_back({at.piece, target_piece, {source, {begin, end}}});
  }
}

/// Every position keeps its piece of the dim.
std::vector<Link> identity_links(const ShardSpec& spec, int64_t dim) {
  if (!spec.is_sharded(dim)) {
    const Interval all{0, spec.size(dim)};
    return all.empty() ? std::vector<Link>{}
                       : std::vector<Link>{{0, 0, {all, all}}};
  }
  const Partition& partition = spec.partition(dim);
  std::vector<Link> links;
  for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
    const Interval all{0, partition.local_extent(piece)};
    if (!all.empty()) {
      links.push_back({piece, piece, {all, all}});
    }
  }
  return links;
}

// ---- plans from links -------------------------------------------------------

using Runs = std::vector<Run>;
/// For one position and dim: the runs shared with each piece of the other side.
using RunsByPiece = std::vector<Runs>;

int64_t pieces_of(const Mesh& mesh, const std::vector<int64_t>& axes) {
  int64_t pieces = 1;
  for (int64_t axis : axes) {
    pieces *= mesh.ranks(axis);
  }
  return pieces;
}

std::vector<RunsByPiece> runs_to_targets(
    const MeshLinks& links,
    int64_t position) {
  std::vector<RunsByPiece> result;
  result.reserve(links.dims.size());
  for (const DimLinks& dim : links.dims) {
    RunsByPiece& runs =
        result.emplace_back(pieces_of(links.mesh, dim.target_axes));
    const int64_t piece = links.mesh.piece(position, dim.source_axes);
    for (const Link& link : dim.links) {
      if (link.source_piece == piece) {
        runs[link.target_piece].push_back(link.run);
      }
    }
  }
  return result;
}

std::vector<RunsByPiece> runs_from_sources(
    const MeshLinks& links,
    int64_t position) {
  std::vector<RunsByPiece> result;
  result.reserve(links.dims.size());
  for (const DimLinks& dim : links.dims) {
    RunsByPiece& runs =
        result.emplace_back(pieces_of(links.mesh, dim.source_axes));
    const int64_t piece = links.mesh.piece(position, dim.target_axes);
    for (const Link& link : dim.links) {
      if (link.target_piece == piece) {
        runs[link.source_piece].push_back(link.run);
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
    std::vector<int64_t> DimLinks::* peer_axes,
    int64_t peer,
    std::vector<const Runs*>& selected) {
  for (size_t dim = 0; dim < by_piece.size(); ++dim) {
    const int64_t piece = links.mesh.piece(peer, links.dims[dim].*peer_axes);
    selected[dim] = &by_piece[dim][piece];
    if (selected[dim]->empty()) {
      return false;
    }
  }
  return true;
}

/// Calls visit(peer, runs of each dim) for each position that shares elements
/// with `position`.
template <class Visit>
void for_each_peer(
    const MeshLinks& links,
    const std::vector<RunsByPiece>& by_piece,
    std::vector<int64_t> DimLinks::* peer_axes,
    int64_t position,
    const Visit& visit) {
  std::vector<const Runs*> selected(by_piece.size());
  for (int64_t peer = 0; peer < links.mesh.ranks(); ++peer) {
    if (agree_on_own_axes(links, position, peer) &&
        select_runs(links, by_piece, peer_axes, peer, selected)) {
      visit(peer, selected);
    }
  }
}

/// One transfer for each combination of the dims' runs, in row-major order.
void append_product(
    int64_t src,
    int64_t dst,
    const std::vector<const Runs*>& runs,
    std::vector<Transfer>& transfers) {
  std::vector<size_t> at(runs.size(), 0);
  for (;;) {
    Transfer& transfer = transfers.emplace_back();
    transfer.src = src;
    transfer.dst = dst;
    transfer.source.reserve(runs.size());
    transfer.target.reserve(runs.size());
    for (size_t dim = 0; dim < runs.size(); ++dim) {
      const Run& run = (*runs[dim])[at[dim]];
      transfer.source.push_back(run.source);
      transfer.target.push_back(run.target);
    }
    size_t dim = runs.size();
    while (dim > 0 && ++at[dim - 1] == runs[dim - 1]->size()) {
      at[--dim] = 0;
    }
    if (dim == 0) {
      return;
    }
  }
}

std::vector<Transfer> sends_of(const MeshLinks& links, int64_t position) {
  std::vector<Transfer> sends;
  for_each_peer(
      links,
      runs_to_targets(links, position),
      &DimLinks::target_axes,
      position,
      [&](int64_t peer, const std::vector<const Runs*>& runs) {
        append_product(position, peer, runs, sends);
      });
  return sends;
}

std::vector<Transfer> receives_of(const MeshLinks& links, int64_t position) {
  std::vector<Transfer> receives;
  for_each_peer(
      links,
      runs_from_sources(links, position),
      &DimLinks::source_axes,
      position,
      [&](int64_t peer, const std::vector<const Runs*>& runs) {
        append_product(peer, position, runs, receives);
      });
  return receives;
}

// ---- which axes the messages cross ------------------------------------------

/// The coordinate on `axis` of a piece of a dim that `axes` shard, or -1.
int64_t piece_coordinate(
    const Mesh& mesh,
    const std::vector<int64_t>& axes,
    int64_t piece,
    int64_t axis) {
  for (size_t i = axes.size(); i-- > 0;) {
    const int64_t ranks = mesh.ranks(axes[i]);
    if (axes[i] == axis) {
      return piece % ranks;
    }
    piece /= ranks;
  }
  return -1;
}

bool contains(const std::vector<int64_t>& axes, int64_t axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

/// Whether sources and targets whose coordinates on `axis` differ exchange
/// anything, when the source is sharded along it. A dim that the axis shards
/// on one side only leaves the other side's coordinate free.
bool coordinates_differ(const MeshLinks& links, int64_t axis) {
  std::vector<bool> sources(links.mesh.ranks(axis), true);
  std::vector<bool> targets(links.mesh.ranks(axis), true);
  for (const DimLinks& dim : links.dims) {
    const bool in_source = contains(dim.source_axes, axis);
    const bool in_target = contains(dim.target_axes, axis);
    std::vector<bool> seen_sources(sources.size(), false);
    std::vector<bool> seen_targets(targets.size(), false);
    for (const Link& link : dim.links) {
      const int64_t source = piece_coordinate(
          links.mesh, dim.source_axes, link.source_piece, axis);
      const int64_t target = piece_coordinate(
          links.mesh, dim.target_axes, link.target_piece, axis);
      if (in_source && in_target && source != target) {
        return true;
      }
      if (in_source) {
        seen_sources[source] = true;
      }
      if (in_target) {
        seen_targets[target] = true;
      }
    }
    if (in_source && in_target) {
      return false;
    }
    if (in_source) {
      sources = seen_sources;
    }
    if (in_target) {
      targets = seen_targets;
    }
  }
  const auto count = [](const std::vector<bool>& seen) {
    return std::count(seen.begin(), seen.end(), true);
  };
  return !(count(sources) == 1 && sources == targets);
}

bool crosses(const MeshLinks& links, int64_t axis) {
  switch (links.along[axis]) {
    case Along::Own:
      return false;
    case Along::Summed:
      return links.mesh.ranks(axis) > 1;
    case Along::Moves:
      return coordinates_differ(links, axis);
  }
  TORCH_INTERNAL_ASSERT(false, "not an Along");
}

/// The axes that some message crosses, anywhere in the mesh.
std::vector<int64_t> crossed_axes(const MeshLinks& links) {
  std::vector<int64_t> crossed;
  for (const DimLinks& dim : links.dims) {
    if (dim.links.empty()) {
      return crossed;
    }
  }
  for (int64_t axis = 0; axis < links.mesh.axes(); ++axis) {
    if (crosses(links, axis)) {
      crossed.push_back(axis);
    }
  }
  return crossed;
}

// ---- how large the messages are ---------------------------------------------

/// The most rows of one dim that a pair of pieces shares.
struct MostRows {
  int64_t any = 0;
  int64_t differing = 0; // among pairs that differ on an axis both sides have
};

/// Whether two pieces of a dim lie at different coordinates of an axis that
/// shards the dim on both sides.
bool pieces_differ(const Mesh& mesh, const DimLinks& dim, const Link& link) {
  for (int64_t axis : dim.source_axes) {
    if (contains(dim.target_axes, axis) &&
        piece_coordinate(mesh, dim.source_axes, link.source_piece, axis) !=
            piece_coordinate(mesh, dim.target_axes, link.target_piece, axis)) {
      return true;
    }
  }
  return false;
}

MostRows most_rows(const Mesh& mesh, const DimLinks& dim) {
  std::vector<const Link*> links;
  links.reserve(dim.links.size());
  for (const Link& link : dim.links) {
    links.push_back(&link);
  }
  const auto pair = [](const Link* link) {
    return std::pair(link->source_piece, link->target_piece);
  };
  std::sort(links.begin(), links.end(), [&](const Link* a, const Link* b) {
    return pair(a) < pair(b);
  });
  MostRows most;
  for (size_t i = 0, next = 0; i < links.size(); i = next) {
    int64_t rows = 0;
    for (next = i; next < links.size() && pair(links[next]) == pair(links[i]);
         ++next) {
      rows += links[next]->run.source.extent();
    }
    most.any = std::max(most.any, rows);
    if (pieces_differ(mesh, dim, *links[i])) {
      most.differing = std::max(most.differing, rows);
    }
  }
  return most;
}

/// Whether the coordinates on both sides follow from one dim's pieces.
bool is_within_a_dim(const MeshLinks& links, int64_t axis) {
  for (const DimLinks& dim : links.dims) {
    if (contains(dim.source_axes, axis) && contains(dim.target_axes, axis)) {
      return true;
    }
  }
  return false;
}

/// A bound of the elements that any two different positions exchange, exact
/// when the crossed axes keep to their dims, as in a halo exchange: then the
/// two differ within some dim.
int64_t largest_message(
    const MeshLinks& links,
    const std::vector<int64_t>& crossed) {
  const bool within_dims =
      std::all_of(crossed.begin(), crossed.end(), [&](int64_t axis) {
        return is_within_a_dim(links, axis);
      });
  int64_t any = 1;
  int64_t differing = 0;
  for (const DimLinks& dim : links.dims) {
    const MostRows most = most_rows(links.mesh, dim);
    differing = std::max(differing * most.any, any * most.differing);
    any *= most.any;
  }
  return within_dims ? differing : any;
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

bool overlap(const Box& a, const Box& b) {
  for (size_t dim = 0; dim < a.size(); ++dim) {
    if (intersect(a[dim], b[dim]).empty()) {
      return false;
    }
  }
  return true;
}

/// The dim along which the boxes begin at the most different rows.
size_t most_cut_dim(const std::vector<const Box*>& boxes, size_t dims) {
  size_t best = 0;
  size_t most = 0;
  for (size_t dim = 0; dim < dims; ++dim) {
    std::vector<int64_t> begins;
    for (const Box* box : boxes) {
      begins.push_back((*box)[dim].begin);
    }
    std::sort(begins.begin(), begins.end());
    const size_t distinct =
        std::unique(begins.begin(), begins.end()) - begins.begin();
    if (distinct > most) {
      best = dim;
      most = distinct;
    }
  }
  return best;
}

bool are_disjoint(const std::vector<Transfer>& receives, size_t dims) {
  std::vector<const Box*> boxes;
  for (const Transfer& receive : receives) {
    boxes.push_back(&receive.target);
  }
  if (dims == 0) {
    return boxes.size() <= 1;
  }
  const size_t dim = most_cut_dim(boxes, dims);
  std::sort(boxes.begin(), boxes.end(), [&](const Box* a, const Box* b) {
    return (*a)[dim].begin < (*b)[dim].begin;
  });
  for (size_t i = 0; i < boxes.size(); ++i) {
    const int64_t end = (*boxes[i])[dim].end;
    for (size_t j = i + 1; j < boxes.size() && (*boxes[j])[dim].begin < end;
         ++j) {
      if (overlap(*boxes[i], *boxes[j])) {
        return false;
      }
    }
  }
  return true;
}

bool tile(
    const std::vector<Transfer>& receives,
    const std::vector<int64_t>& sizes) {
  return total(receives) == product(sizes) &&
      are_disjoint(receives, sizes.size());
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
  plan.largest_message = crossed.empty() ? 0 : largest_message(links, crossed);
  return plan;
}

// ---- redistribute -----------------------------------------------------------

void check_same_tensor(const ShardSpec& from, const ShardSpec& to) {
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

Along along(const Placement& before, const Placement& after) {
  if (after.is_partial()) {
    return Along::Own;
  }
  if (before.is_shard()) {
    return Along::Moves;
  }
  return before.is_partial() ? Along::Summed : Along::Own;
}

MeshLinks link(const ShardSpec& from, const ShardSpec& to) {
  MeshLinks links{*from.mesh(), {}, {}};
  for (int64_t axis = 0; axis < links.mesh.axes(); ++axis) {
    links.along.push_back(along(from.placement(axis), to.placement(axis)));
  }
  for (int64_t dim = 0; dim < from.dim(); ++dim) {
    links.dims.push_back(
        {from.axes(dim),
         to.axes(dim),
         redistribute_links(stretches(from, dim), stretches(to, dim))});
  }
  return links;
}

int64_t volume(const std::vector<const Runs*>& runs) {
  int64_t elements = 1;
  for (const Runs* of_dim : runs) {
    int64_t rows = 0;
    for (const Run& run : *of_dim) {
      rows += run.source.extent();
    }
    elements *= rows;
  }
  return elements;
}

// ---- gather rows ------------------------------------------------------------

/// A position that owns this piece of the dim.
int64_t position_of_piece(const ShardSpec& spec, int64_t dim, int64_t piece) {
  int64_t position = 0;
  for (int64_t axis : spec.axes(dim)) {
    const int64_t to =
        piece_coordinate(*spec.mesh(), spec.axes(dim), piece, axis);
    position = spec.mesh()->with_coordinate(position, axis, to);
  }
  return position;
}

} // namespace

ExchangePlan adjoint(const ExchangePlan& plan) {
  const auto reversed = [](std::vector<Transfer> transfers) {
    for (Transfer& transfer : transfers) {
      std::swap(transfer.src, transfer.dst);
      std::swap(transfer.source, transfer.target);
    }
    return transfers;
  };
  ExchangePlan result;
  result.source_sizes = plan.target_sizes;
  result.target_sizes = plan.source_sizes;
  result.sends = reversed(plan.receives);
  result.receives = reversed(plan.sends);
  result.covers = tile(result.receives, result.target_sizes);
  result.axis = plan.axis;
  result.largest_message = plan.largest_message;
  return result;
}

ExchangePlan plan_redistribute(
    const SpecPtr& from,
    const SpecPtr& to,
    int64_t position) {
  check_same_tensor(*from, *to);
  check_partial(*from, *to);
  check_position(*from->mesh(), position, "plan_redistribute");
  return make_plan(
      link(*from, *to),
      position,
      from->local_sizes(position),
      to->local_sizes(position));
}

int64_t moved_elements(const SpecPtr& from, const SpecPtr& to) {
  check_same_tensor(*from, *to);
  if (from == to) {
    return 0;
  }
  const MeshLinks links = link(*from, *to);
  int64_t moved = 0;
  for (int64_t position = 0; position < links.mesh.ranks(); ++position) {
    for_each_peer(
        links,
        runs_from_sources(links, position),
        &DimLinks::source_axes,
        position,
        [&](int64_t peer, const std::vector<const Runs*>& runs) {
          moved += peer == position ? 0 : volume(runs);
        });
  }
  return moved;
}

ExchangePlan plan_gather_rows(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const std::function<RowSource(int64_t dim, int64_t position)>& rows,
    int64_t position) {
  const Mesh& mesh = *spec->mesh();
  check_position(mesh, position, "plan_gather_rows");
  MeshLinks links{mesh, {}, {}};
  for (const Placement& placement : spec->placements()) {
    links.along.push_back(placement.is_shard() ? Along::Moves : Along::Own);
  }
  const std::vector<int64_t> source_sizes = spec->local_sizes(position);
  std::vector<int64_t> target_sizes = source_sizes;
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    const std::vector<int64_t>& axes = spec->axes(dim);
    DimLinks& of_dim = links.dims.emplace_back(DimLinks{axes, axes, {}});
    if (!contains(dims, dim)) {
      of_dim.links = identity_links(*spec, dim);
      continue;
    }
    for (int64_t piece = 0; piece < pieces_of(mesh, axes); ++piece) {
      const RowSource wanted = rows(dim, position_of_piece(*spec, dim, piece));
      check_rows(wanted, *spec, dim);
      append_gather_links(*spec, dim, piece, wanted, of_dim.links);
      if (piece == spec->piece(dim, position)) {
        target_sizes[dim] = static_cast<int64_t>(wanted.size());
      }
    }
  }
  return make_plan(links, position, source_sizes, std::move(target_sizes));
}

} // namespace shardtensor
