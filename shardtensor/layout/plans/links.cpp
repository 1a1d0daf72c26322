#include "shardtensor/layout/plans/links.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <c10/util/Exception.h>

namespace shardtensor::detail {

namespace {

// ---- one dim, one layout to another -----------------------------------------

/// Rows of the dim that a piece holds from its row `local` on.
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
  // Of many ranks few have rows of a short period, which repeats often.
  std::vector<Stretch> once;
  for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
    const Interval rows = partition.interval(piece);
    if (!rows.empty()) {
      once.push_back({rows, piece, 0});
    }
  }
  std::vector<Stretch> result;
  result.reserve(partition.repeat() * once.size());
  for (int64_t k = 0; k < partition.repeat(); ++k) {
    for (const auto& [rows, piece, local] : once) {
      result.push_back(
          {rows.shifted(k * partition.period()), piece, k * rows.extent()});
    }
  }
  return result;
}

/// The same rows as the piece's local tensor counts them.
Interval localized(const Interval& rows, const Stretch& stretch) {
  return rows.shifted(stretch.local - stretch.rows.begin);
}

std::vector<Link> overlaps(
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
    i += from[i].rows.end == rows.end;
    j += to[j].rows.end == rows.end;
  }
  return links;
}

bool same_pieces(const Link& a, const Link& b) {
  return a.source_piece == b.source_piece && a.target_piece == b.target_piece;
}

bool continues(const Link& link, const Link& next) {
  return same_pieces(link, next) &&
      link.run.source.end == next.run.source.begin &&
      link.run.target.end == next.run.target.begin;
}

/// In the order that DimLinks promises. Runs that touch on both sides become
/// one: a repeated partition that stays as it is moves as one box.
std::vector<Link> sorted(std::vector<Link> links) {
  const auto key = [](const Link& link) {
    return std::tuple(
        link.source_piece, link.target_piece, link.run.target.begin);
  };
  std::sort(links.begin(), links.end(), [&](const Link& a, const Link& b) {
    return key(a) < key(b);
  });
  std::vector<Link> merged;
  merged.reserve(links.size());
  for (const Link& link : links) {
    if (!merged.empty() && continues(merged.back(), link)) {
      merged.back().run.source.end = link.run.source.end;
      merged.back().run.target.end = link.run.target.end;
    } else {
      merged.push_back(link);
    }
  }
  return merged;
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

// ---- one dim, chosen rows ---------------------------------------------------

/// Where a row lies, and how many rows there are from it to the piece's end.
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
  const int64_t repetition = row / partition.period();
  const int64_t within = row % partition.period() - rows.begin;
  return {piece, repetition * rows.extent() + within, rows.extent() - within};
}

void check_rows(const RowSource& rows, const ShardSpec& spec, int64_t dim) {
  const int64_t size = spec.size(dim);
  for (const auto& [begin, extent] : rows.runs()) {
    TORCH_CHECK_INDEX(
        begin == RowSource::kZeros || (begin >= 0 && begin + extent <= size),
        "plan_gather_rows: row ",
        begin < 0 ? begin : std::max(begin, size),
        " of dim ",
        dim,
        ", expected -1 (zero) or 0 <= row < ",
        size);
  }
}

void append_gathered(
    const ShardSpec& spec,
    int64_t dim,
    int64_t target_piece,
    const RowSource& rows,
    std::vector<Link>& links) {
  int64_t target = 0;
  for (const auto& [begin, extent] : rows.runs()) {
    const int64_t end = target + extent;
    for (int64_t row = begin; begin >= 0 && target < end;) {
      const RowLocation at = locate(spec, dim, row);
      const int64_t count = std::min(at.left, end - target);
      links.push_back(
          {at.piece,
           target_piece,
           {{at.local, at.local + count}, {target, target + count}}});
      row += count;
      target += count;
    }
    target = end;
  }
}

/// The coordinate on `axis`, one of `axes`, of a piece of the dim that they
/// shard.
int64_t coordinate_of_piece(
    const Mesh& mesh,
    const std::vector<int64_t>& axes,
    int64_t piece,
    int64_t axis) {
  for (size_t i = axes.size(); axes.at(--i) != axis;) {
    piece /= mesh.ranks(axes[i]);
  }
  return piece % mesh.ranks(axis);
}

/// A position that owns this piece of the dim.
int64_t position_of_piece(const ShardSpec& spec, int64_t dim, int64_t piece) {
  const Mesh& mesh = *spec.mesh();
  const std::vector<int64_t>& axes = spec.axes(dim);
  int64_t position = 0;
  for (int64_t axis : axes) {
    position = mesh.with_coordinate(
        position, axis, coordinate_of_piece(mesh, axes, piece, axis));
  }
  return position;
}

std::vector<Link> gathered(
    const ShardSpec& spec,
    int64_t dim,
    const std::function<RowSource(int64_t dim, int64_t position)>& rows) {
  std::vector<Link> links;
  const int64_t pieces = spec.mesh()->ranks(spec.axes(dim));
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const RowSource wanted = rows(dim, position_of_piece(spec, dim, piece));
    check_rows(wanted, spec, dim);
    append_gathered(spec, dim, piece, wanted, links);
  }
  return sorted(std::move(links));
}

// ---- questions about the whole mesh -----------------------------------------

bool contains(const std::vector<int64_t>& axes, int64_t axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

/// The dim that the axis shards on this side; may be null.
const DimLinks* dim_sharded_by(
    const MeshLinks& links,
    const Side& side,
    int64_t axis) {
  for (const DimLinks& dim : links.dims) {
    if (contains(dim.*side.axes, axis)) {
      return &dim;
    }
  }
  return nullptr;
}

/// The coordinate of this side's piece on an axis that shards the dim there.
int64_t coordinate_of(
    const Mesh& mesh,
    const DimLinks& dim,
    const Link& link,
    const Side& side,
    int64_t axis) {
  return coordinate_of_piece(mesh, dim.*side.axes, link.*side.piece, axis);
}

/// Whether a link's pieces lie at different coordinates of an axis that shards
/// the dim on both sides.
bool differs(
    const Mesh& mesh,
    const DimLinks& dim,
    const Link& link,
    int64_t axis) {
  return coordinate_of(mesh, dim, link, kSource, axis) !=
      coordinate_of(mesh, dim, link, kTarget, axis);
}

/// The coordinates on `axis` at which a side takes part; all when the axis
/// shards no dim there.
std::vector<bool> active_coordinates(
    const MeshLinks& links,
    const Side& side,
    int64_t axis) {
  const DimLinks* dim = dim_sharded_by(links, side, axis);
  std::vector<bool> active(links.mesh.ranks(axis), dim == nullptr);
  if (dim != nullptr) {
    for (const Link& link : dim->links) {
      active[coordinate_of(links.mesh, *dim, link, side, axis)] = true;
    }
  }
  return active;
}

/// The dim that the axis shards on both sides; may be null.
const DimLinks* dim_kept_by(const MeshLinks& links, int64_t axis) {
  const DimLinks* source = dim_sharded_by(links, kSource, axis);
  return source == dim_sharded_by(links, kTarget, axis) ? source : nullptr;
}

/// Whether a message crosses an axis along which the source is sharded.
bool coordinates_differ(const MeshLinks& links, int64_t axis) {
  if (const DimLinks* dim = dim_kept_by(links, axis)) {
    return std::any_of(
        dim->links.begin(), dim->links.end(), [&](const Link& link) {
          return differs(links.mesh, *dim, link, axis);
        });
  }
  // The two coordinates are independent: they agree only if there is but one.
  const std::vector<bool> sources = active_coordinates(links, kSource, axis);
  const std::vector<bool> targets = active_coordinates(links, kTarget, axis);
  const bool is_one = std::count(sources.begin(), sources.end(), true) == 1;
  return !(is_one && sources == targets);
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

/// The most rows of one dim that a pair of pieces shares.
struct MostRows {
  int64_t any = 0;
  int64_t differing = 0; // among pairs that differ on an axis both sides have
};

bool differs(const Mesh& mesh, const DimLinks& dim, const Link& link) {
  return std::any_of(
      dim.source_axes.begin(), dim.source_axes.end(), [&](int64_t axis) {
        return contains(dim.target_axes, axis) &&
            differs(mesh, dim, link, axis);
      });
}

MostRows most_rows(const Mesh& mesh, const DimLinks& dim) {
  MostRows most;
  const std::vector<Link>& links = dim.links;
  for (size_t begin = 0, end = 0; begin < links.size(); begin = end) {
    int64_t rows = 0;
    for (; end < links.size() && same_pieces(links[begin], links[end]); ++end) {
      rows += links[end].run.source.extent();
    }
    most.any = std::max(most.any, rows);
    if (differs(mesh, dim, links[begin])) {
      most.differing = std::max(most.differing, rows);
    }
  }
  return most;
}

/// The pairs of pieces that share rows of the dim.
int64_t linked_pieces(const DimLinks& dim) {
  int64_t pairs = 0;
  for (size_t i = 0; i < dim.links.size(); ++i) {
    pairs += i == 0 || !same_pieces(dim.links[i - 1], dim.links[i]);
  }
  return pairs;
}

} // namespace

Partition partition_of(const ShardSpec& spec, int64_t dim) {
  return spec.is_sharded(dim) ? spec.partition(dim)
                              : Partition({spec.size(dim)});
}

MeshLinks link_axes(const ShardSpec& from, const ShardSpec& to) {
  MeshLinks links{*from.mesh(), {}, {}};
  for (int64_t axis = 0; axis < links.mesh.axes(); ++axis) {
    links.along.push_back(along(from.placement(axis), to.placement(axis)));
  }
  for (int64_t dim = 0; dim < from.dim(); ++dim) {
    links.dims.push_back({from.axes(dim), to.axes(dim), {}});
  }
  return links;
}

MeshLinks link_layouts(const ShardSpec& from, const ShardSpec& to) {
  MeshLinks links = link_axes(from, to);
  for (int64_t dim = 0; dim < from.dim(); ++dim) {
    links.dims[dim].links =
        sorted(overlaps(stretches(from, dim), stretches(to, dim)));
  }
  return links;
}

MeshLinks link_rows(
    const ShardSpec& spec,
    const std::vector<int64_t>& dims,
    const std::function<RowSource(int64_t dim, int64_t position)>& rows) {
  MeshLinks links = link_layouts(spec, spec);
  for (int64_t dim : dims) {
    links.dims.at(dim).links = gathered(spec, dim, rows);
  }
  return links;
}

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

int64_t largest_message(
    const MeshLinks& links,
    const std::vector<int64_t>& crossed) {
  if (crossed.empty()) {
    return 0;
  }
  int64_t any = 1;
  int64_t differing = 0; // some dim's pieces differ
  for (const DimLinks& dim : links.dims) {
    const MostRows most = most_rows(links.mesh, dim);
    differing = std::max(differing * most.any, any * most.differing);
    any *= most.any;
  }
  const bool within_dims =
      std::all_of(crossed.begin(), crossed.end(), [&](int64_t axis) {
        return dim_kept_by(links, axis) != nullptr;
      });
  return within_dims ? differing : any;
}

int64_t free_coordinates(const MeshLinks& links) {
  int64_t pairs = 1;
  for (int64_t axis = 0; axis < links.mesh.axes(); ++axis) {
    const int64_t ends = (dim_sharded_by(links, kSource, axis) == nullptr) +
        (dim_sharded_by(links, kTarget, axis) == nullptr) -
        (links.along[axis] == Along::Own);
    for (int64_t end = 0; end < ends; ++end) {
      pairs *= links.mesh.ranks(axis);
    }
  }
  return pairs;
}

int64_t linked_positions(const MeshLinks& links) {
  int64_t pairs = free_coordinates(links);
  for (const DimLinks& dim : links.dims) {
    pairs *= linked_pieces(dim);
  }
  return pairs;
}

} // namespace shardtensor::detail
