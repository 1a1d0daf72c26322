#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/plans/transfer.h"
#include "shardtensor/layout/shard_spec.h"

// Note [Links]
// Boxes are products of intervals, so a plan is a product over dims too. For
// each dim we list once, for the whole mesh, which rows of which source piece
// become which rows of which target piece: its *links*. Two positions exchange
// the product of their pieces' links over all dims, if their coordinates agree
// on the axes along which data does not move. The links are the same on all
// ranks and stand in one order: so do the transfers of a pair on both sides,
// and so every rank draws the same conclusions about the mesh as a whole.

namespace shardtensor::detail {

/// Consecutive rows of one dim that move, in local coordinates of both sides.
struct Run {
  Interval source;
  Interval target;
};

struct Link {
  int64_t source_piece = 0;
  int64_t target_piece = 0;
  Run run;
};

struct DimLinks {
  std::vector<int64_t> source_axes; // mesh axes that shard the dim
  std::vector<int64_t> target_axes;
  std::vector<Link> links; // by source piece, target piece, target row
};

/// One end of the links, for code that is the same for both.
struct Side {
  std::vector<int64_t> DimLinks::* axes;
  int64_t Link::* piece;
};
inline constexpr Side kSource{&DimLinks::source_axes, &Link::source_piece};
inline constexpr Side kTarget{&DimLinks::target_axes, &Link::target_piece};

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

/// How a dim is cut: into one piece where it is whole.
Partition partition_of(const ShardSpec& spec, int64_t dim);

/// What each axis does where `from` becomes `to`, without the links.
MeshLinks link_axes(const ShardSpec& from, const ShardSpec& to);

/// The links that turn `from` into `to`, of the same mesh and sizes. Example:
/// 5 rows, Partition({3, 2}) to Partition({1, 4}): piece 0's rows [0, 1) stay,
/// its rows [1, 3) become rows [0, 2) of piece 1, whose own rows [0, 2) become
/// its rows [2, 4).
MeshLinks link_layouts(const ShardSpec& from, const ShardSpec& to);

/// The links that give each position rows(dim, position) of each of `dims`.
MeshLinks link_rows(
    const ShardSpec& spec,
    const std::vector<int64_t>& dims,
    const std::function<RowSource(int64_t dim, int64_t position)>& rows);

/// The axes whose coordinates differ between the two ends of some message,
/// anywhere in the mesh.
std::vector<int64_t> crossed_axes(const MeshLinks& links);

/// A bound of the elements that any two different positions exchange, exact
/// when every crossed axis shards one dim on both sides, as in a halo exchange.
int64_t largest_message(
    const MeshLinks& links,
    const std::vector<int64_t>& crossed);

/// The pairs of positions, equal ones among them, that share elements.
int64_t linked_positions(const MeshLinks& links);
/// How many of these pairs there are for each choice of linked pieces. Asks no
/// link: a side's coordinate is free on an axis that shards no dim there, but
/// for equal coordinates where a position takes from its own.
int64_t free_coordinates(const MeshLinks& links);

} // namespace shardtensor::detail
