#include "shardtensor/cells/topology.h"

#include <algorithm>
#include <numeric>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "shardtensor/cells/kinds.h"
#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/collectives/route.h"
#include "shardtensor/collectives/unique_keys.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/layout/cut_by_all.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;
using Blocks = std::vector<Tensor>;
using Kinds = std::vector<std::string>;

// ---- this rank's cells ------------------------------------------------------

struct Block {
  const CellKind& kind;
  Tensor cells; // this rank's
  int64_t first; // of them, among all cells
};
struct OwnCells {
  std::vector<Block> blocks;
  MeshPtr mesh; // null for plain tensors
  bool is_cut = false;

  std::string group() const {
    return is_cut ? mesh->group() : "";
  }
};

void check_block(
    const char* op,
    const CellKind& kind,
    const Tensor& cells,
    int64_t points) {
  TORCH_CHECK_VALUE(
      cells.dim() == 2 && cells.size(1) == kind.corners &&
          cells.scalar_type() == at::kLong,
      op,
      ": expected cells (C, ",
      kind.corners,
      ") of int64 and kind '",
      kind.name,
      "', got ",
      cells.sizes(),
      " of ",
      cells.scalar_type());
  check_planned_index(op, cells, 0, points);
}

/// Blocks are cut by all axes if any is cut.
OwnCells own_cells(
    const char* op,
    const Blocks& given,
    const Kinds& kinds,
    int64_t points) {
  Blocks cells;
  for (const auto& block : given) {
    cells.push_back(value_inside(block));
  }
  TORCH_CHECK_VALUE(
      !cells.empty() && cells.size() == kinds.size(),
      op,
      ": expected a kind for each block of cells, got ",
      cells.size(),
      " blocks and ",
      kinds.size(),
      " kinds");
  OwnCells own;
  for (const auto& block : cells) {
    own.is_cut |= layout_of(block) && spec_inside(block)->is_sharded();
  }
  if (std::any_of(cells.begin(), cells.end(), layout_of)) {
    own.mesh = common_mesh(op, cells);
  }
  int64_t first = 0;
  for (size_t i = 0; i < cells.size(); ++i) {
    const auto& kind = cell_kind(op, kinds[i]);
    check_block(op, kind, cells[i], points);
    auto block = cells[i];
    int64_t begin = 0;
    if (own.mesh) {
      block = promote_operand(block, own.mesh, op);
      block = redistribute(
          block,
          own.is_cut ? cut_by_all(spec_inside(block), 0)
                     : replicated(spec_inside(block)));
      begin = spec_inside(block)->interval(0).begin;
      block = to_local(block);
    }
    own.blocks.push_back({kind, block, first + begin});
    first += cells[i].size(0);
  }
  return own;
}

/// What each rank has `own` of, as one tensor.
Tensor joined(
    const OwnCells& cells,
    const Tensor& local,
    const std::vector<int64_t>& sizes) {
  if (!cells.mesh) {
    return local;
  }
  auto all = local.sizes().vec();
  all[0] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  return from_local(
      local,
      cells.is_cut
          ? cut_by_all(cells.mesh, all, 0, Partition(sizes))
          : make_spec(
                cells.mesh, all, std::vector<Placement>(cells.mesh->axes())));
}

// ---- faces ------------------------------------------------------------------

/// Faces of this rank's cells, (n, width): corners as the cell has them, -1
/// behind them, and the cell.
struct OwnFaces {
  Tensor corners;
  Tensor cells;
};

OwnFaces own_faces(const OwnCells& own) {
  int64_t width = 0;
  for (const auto& block : own.blocks) {
    for (const auto& face : block.kind.faces) {
      width = std::max(width, static_cast<int64_t>(face.size()));
    }
  }
  std::vector<Tensor> corners;
  std::vector<Tensor> cells;
  for (const auto& block : own.blocks) {
    const auto count = block.cells.size(0);
    for (const auto& face : block.kind.faces) {
      std::vector<Tensor> columns;
      for (const int64_t corner : face) {
        columns.push_back(block.cells.select(1, corner));
      }
      const auto missing = width - static_cast<int64_t>(face.size());
      corners.push_back(
          at::constant_pad_nd(at::stack(columns, 1), {0, missing}, -1));
      cells.push_back(
          at::arange(block.first, block.first + count, block.cells.options()));
    }
  }
  return {at::cat(corners), at::cat(cells)};
}

/// Equal numbers for faces of equal corners, in the order of these: corner
/// after corner, so that a key stays one number.
UniqueKeys number_faces(
    const Tensor& corners,
    int64_t points,
    const std::string& group) {
  // -1 first, so that a face with fewer corners is told by its zero.
  const auto sorted = std::get<0>(corners.sort(1)).add(1);
  auto numbers = unique_keys(sorted.select(1, 0), group);
  for (int64_t column = 1; column < sorted.size(1); ++column) {
    numbers = unique_keys(
        numbers.inverse.mul(points + 1).add(sorted.select(1, column)), group);
  }
  return numbers;
}

struct Sides {
  Tensor corners; // (own faces, width)
  Tensor cells; // (own faces, 2)
  int64_t most = 0; // cells of one face, on this rank
};

/// From what all cells say of this rank's faces: rows of face, cell, corners.
Sides sides_of(const Tensor& rows, int64_t first, int64_t faces) {
  const auto by_cell = rows.select(1, 1).argsort(true, 0, false);
  const auto order = by_cell.index_select(
      0, rows.select(1, 0).index_select(0, by_cell).argsort(true, 0, false));
  const auto ordered = rows.index_select(0, order);
  const auto cells = ordered.select(1, 1);
  // Each face stands in some row.
  const auto counts = at::bincount(ordered.select(1, 0).sub(first), {}, faces);
  const auto firsts = counts.cumsum(0).sub(counts);
  const auto seconds = firsts.add(1).clamp_max(rows.size(0) - 1);
  return {
      ordered.narrow(1, 2, rows.size(1) - 2).index_select(0, firsts),
      at::stack(
          {cells.index_select(0, firsts),
           at::where(counts.ge(2), cells.index_select(0, seconds), -1)},
          1),
      faces == 0 ? 0 : counts.max().item<int64_t>()};
}

void check_sides(const OwnCells& cells, int64_t own_most) {
  auto most = at::full({}, own_most, at::kLong);
  if (cells.is_cut) {
    most = reduce_numbers(most, Reduce::Max, cells.mesh->group());
  }
  TORCH_CHECK_VALUE(
      most.item<int64_t>() <= 2,
      "cell_faces: a face has ",
      most.item<int64_t>(),
      " cells, expected one or two");
}

} // namespace

// ---- the functions ----------------------------------------------------------

Tensor cell_edges(const Blocks& cells, const Kinds& kinds, int64_t points) {
  const CommScope scope("shardtensor::cell_edges");
  const OutsideTransforms of_all_levels;
  const auto own = own_cells("cell_edges", cells, kinds, points);
  std::vector<Tensor> keys;
  for (const auto& block : own.blocks) {
    for (const auto& edge : block.kind.edges) {
      const auto a = block.cells.select(1, edge[0]);
      const auto b = block.cells.select(1, edge[1]);
      keys.push_back(at::minimum(a, b).mul(points).add(at::maximum(a, b)));
    }
  }
  const auto unique = unique_keys(at::cat(keys), own.group());
  const auto extent = std::max<int64_t>(points, 1);
  const auto ends = at::stack(
      {unique.keys.floor_divide(extent), unique.keys.remainder(extent)}, 1);
  return joined(own, ends, unique.sizes).transpose(0, 1);
}

std::tuple<Tensor, Tensor> cell_faces(
    const Blocks& cells,
    const Kinds& kinds,
    int64_t points) {
  const CommScope scope("shardtensor::cell_faces");
  const OutsideTransforms of_all_levels;
  const auto own = own_cells("cell_faces", cells, kinds, points);
  for (const auto& block : own.blocks) {
    TORCH_CHECK_VALUE(
        block.kind.dims == own.blocks[0].kind.dims,
        "cell_faces: expected cells of one number of dims, got '",
        own.blocks[0].kind.name,
        "' and '",
        block.kind.name,
        "'");
  }
  const auto given = own_faces(own);
  const auto numbers = number_faces(given.corners, points, own.group());
  const Partition faces(numbers.sizes);
  auto rows = at::cat(
      {numbers.inverse.unsqueeze(1), given.cells.unsqueeze(1), given.corners},
      1);
  if (own.is_cut) {
    rows = Route(pieces_of(numbers.inverse, faces), own.group()).send(rows);
  }
  const auto mine = faces.interval(own.is_cut ? own.mesh->position() : 0);
  const auto sides = sides_of(rows, mine.begin, mine.extent());
  check_sides(own, sides.most);
  return {
      joined(own, sides.corners, numbers.sizes),
      joined(own, sides.cells, numbers.sizes)};
}

namespace {

Tensor edges_kernel(at::TensorList cells, Kinds kinds, int64_t points) {
  return cell_edges(cells.vec(), kinds, points);
}
std::tuple<Tensor, Tensor> faces_kernel(
    at::TensorList cells,
    Kinds kinds,
    int64_t points) {
  return cell_faces(cells.vec(), kinds, points);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("cell_edges", edges_kernel);
  m.impl("cell_faces", faces_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("cell_edges", edges_kernel);
  m.impl("cell_faces", faces_kernel);
}

} // namespace

} // namespace shardtensor
