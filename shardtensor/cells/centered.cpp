#include "shardtensor/cells/centered.h"

#include <limits>

#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/cells/elements.h"
#include "shardtensor/cells/kinds.h"
#include "shardtensor/cells/vectors.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using CellBlocks = std::vector<Tensor>;
using KindNames = std::vector<std::string>;

// ---- arguments --------------------------------------------------------------

constexpr const char* kCentered = "cell_centered_gradients";

struct CenteredCall {
  const Tensor& points;
  const CellBlocks& cells;
  const KindNames& kinds;
  const Tensor& faces;
  const Tensor& sides;
  const OptionalTensor& boundary_values;
};

int64_t check_blocks(const CenteredCall& call) {
  TORCH_CHECK_VALUE(
      !call.cells.empty() && call.cells.size() == call.kinds.size(),
      kCentered,
      ": expected a kind for each block of cells, got ",
      call.cells.size(),
      " blocks and ",
      call.kinds.size(),
      " kinds");
  int64_t count = 0;
  for (size_t i = 0; i < call.cells.size(); ++i) {
    const auto dims = cell_kind(kCentered, call.kinds[i]).dims;
    TORCH_CHECK_VALUE(
        dims > 1 && call.points.dim() == 2 && call.points.size(1) == dims,
        kCentered,
        ": expected cells that fill their space, of two or three dims, got '",
        call.kinds[i],
        "' of points ",
        call.points.sizes());
    count += call.cells[i].size(0);
  }
  return count;
}

void check_dtype(const Tensor& points) {
  const auto dtype = points.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble,
      kCentered,
      ": expected points of float32 or float64, got ",
      dtype);
}

void check_faces(const CenteredCall& call) {
  const auto dims = call.points.size(1);
  const bool fits = call.faces.dim() == 2 && call.sides.dim() == 2 &&
      call.faces.size(0) == call.sides.size(0) && call.sides.size(1) == 2 &&
      call.faces.size(1) >= dims && call.faces.size(1) <= 2 * dims - 2;
  TORCH_CHECK_VALUE(
      fits && call.faces.scalar_type() == at::kLong &&
          call.sides.scalar_type() == at::kLong,
      kCentered,
      ": expected faces (F, corners) and sides (F, 2) of int64 as cell_faces "
      "gives them, got ",
      call.faces.sizes(),
      " of ",
      call.faces.scalar_type(),
      " and ",
      call.sides.sizes(),
      " of ",
      call.sides.scalar_type());
}

void check_centered_values(
    const CenteredCall& call,
    const Tensor& values,
    int64_t count) {
  TORCH_CHECK_VALUE(
      (values.dim() == 1 || values.dim() == 2) && values.size(0) == count,
      kCentered,
      ": expected values (C) or (C, channels) of ",
      count,
      " cells, got ",
      values.sizes());
  TORCH_CHECK_TYPE(
      values.scalar_type() == call.points.scalar_type(),
      kCentered,
      ": expected values of the points' dtype, ",
      call.points.scalar_type(),
      ", got ",
      values.scalar_type());
  if (!call.boundary_values) {
    return;
  }
  auto expected = values.sizes().vec();
  expected[0] = call.faces.size(0);
  TORCH_CHECK_VALUE(
      call.boundary_values->sizes() == expected,
      kCentered,
      ": expected boundary_values ",
      at::IntArrayRef(expected),
      " at the faces, got ",
      call.boundary_values->sizes());
  TORCH_CHECK_TYPE(
      call.boundary_values->scalar_type() == values.scalar_type(),
      kCentered,
      ": expected boundary_values of the values' dtype, ",
      values.scalar_type(),
      ", got ",
      call.boundary_values->scalar_type());
}

// ---- what lies beside the faces ---------------------------------------------

/// Rows (N, X) that `numbers` (F, n) name, (F, n, X). -1, which names none,
/// reads the last row: so numbers stay the tensor that plans are kept for.
/// Those that are cut are checked on any device, as cells are.
Tensor named_rows(const Tensor& rows, const Tensor& numbers) {
  const auto flat = numbers.flatten();
  if (layout_of(flat) && layout_of(flat)->is_sharded()) {
    check_planned_index(
        kCentered, flat, 0, rows.size(0), /*may_be_negative=*/true);
  }
  return at::index(rows, {std::optional<Tensor>(flat)})
      .unflatten(0, {-1, numbers.size(1)});
}

/// The faces' terms of both sides (F, 2, X) at their cells, cut as `like`.
Tensor sum_at_cells(
    const Tensor& terms,
    const Tensor& sides,
    const Tensor& like) {
  const auto none = at::zeros_like(like.detach().repeat({1, terms.size(2)}));
  return at::index_put(
      none,
      {std::optional<Tensor>(sides.flatten())},
      terms.flatten(0, 1),
      /*accumulate=*/true);
}

struct FaceShapes {
  Tensor areas; // vectors out of the first cell (F, D)
  Tensor centers; // (F, D)
};

FaceShapes shapes_in_plane(const Tensor& corners) {
  const auto way = corners.select(1, 1).sub(corners.select(1, 0));
  return {
      at::stack({way.select(1, 1), way.select(1, 0).neg()}, 1),
      corners.mean(1)};
}

/// Two triangles, the second of no area where there is no fourth corner.
FaceShapes shapes_in_space(const Tensor& faces, const Tensor& corners) {
  const auto a = corners.select(1, 0);
  const auto c = corners.select(1, 2);
  const auto ac = vector_of(c.sub(a));
  const auto first =
      stacked(cross(vector_of(corners.select(1, 1).sub(a)), ac), 3).div(2);
  const auto center = corners.narrow(1, 0, 3).mean(1);
  if (corners.size(1) == 3) {
    return {first, center};
  }
  const auto d =
      at::where(faces.narrow(1, 3, 1).lt(0), c, corners.select(1, 3));
  const auto second = stacked(cross(ac, vector_of(d.sub(a))), 3).div(2);
  const auto areas = first.add(second);
  const auto share = second.mul(areas)
                         .sum(1, /*keepdim=*/true)
                         .div(areas.square().sum(1, /*keepdim=*/true));
  const auto away = d.sub(corners.select(1, 1)).div(3); // of the other center
  return {areas, center.add(share.mul(away))};
}

FaceShapes face_shapes(const CenteredCall& call) {
  const auto corners = named_rows(call.points, call.faces);
  return call.points.size(1) == 2 ? shapes_in_plane(corners)
                                  : shapes_in_space(call.faces, corners);
}

/// From the first cell of each face to the second.
struct Steps {
  Tensor is_inner; // (F, 1)
  Tensor first; // the first cell's center (F, D)
  Tensor ways; // between centers (F, D); zero where there is no second
  /// (F, X), to the boundary's value where there is no second
  Tensor differences;
};

Steps steps_of(
    const CenteredCall& call,
    const Tensor& centers,
    const Tensor& values) {
  const auto dims = centers.size(1);
  const auto both = named_rows(at::cat({centers, values}, 1), call.sides);
  const auto first = both.select(1, 0);
  const auto is_inner = call.sides.narrow(1, 1, 1).ge(0);
  const auto steps = at::where(is_inner, both.select(1, 1), first).sub(first);
  auto differences = steps.narrow(1, dims, values.size(1));
  if (call.boundary_values) {
    const auto given = call.boundary_values->dim() == 1
        ? call.boundary_values->unsqueeze(1)
        : *call.boundary_values;
    const auto own = first.narrow(1, dims, values.size(1));
    differences = at::where(is_inner, differences, given.sub(own));
  }
  return {
      is_inner,
      first.narrow(1, 0, dims),
      steps.narrow(1, 0, dims),
      differences};
}

Tensor times_rows(const Tensor& a, const Tensor& b) {
  return a.unsqueeze(2).mul(b.unsqueeze(1)); // (F, D, X)
}

// ---- the methods ------------------------------------------------------------

/// Sums of a direction times itself (C, D, D), with the directions that none of
/// the neighbours has: solutions are zero along them.
Tensor completed(const Tensor& squares) {
  const int64_t dims = squares.size(-1);
  const double tiny = 4 *
      (squares.scalar_type() == at::kFloat
           ? double{std::numeric_limits<float>::epsilon()}
           : std::numeric_limits<double>::epsilon());
  const auto each = [](const Tensor& x) { return x.view({-1, 1, 1}); };
  const auto trace = [&](const Tensor& x) {
    return each(x.diagonal(0, 1, 2).sum(1));
  };
  const auto eye = constant_beside(squares, at::eye(dims));
  const auto count = trace(squares); // directions are of length 1
  const auto across_one = count.mul(eye).sub(squares);
  std::vector<Vector> columns;
  for (int64_t dim = 0; dim < dims; ++dim) {
    columns.push_back(vector_of(squares.select(2, dim)));
  }
  auto missing = across_one;
  Tensor volume;
  if (dims == 2) {
    volume = each(cross(columns[0], columns[1])[2]);
  } else {
    const auto& [a, b, c] = std::tie(columns[0], columns[1], columns[2]);
    volume = each(dot(a, cross(b, c)));
    // Of two directions, the one across both times itself.
    const auto minors = at::stack(
        {stacked(cross(b, c), 3),
         stacked(cross(c, a), 3),
         stacked(cross(a, b), 3)},
        1);
    const auto spread = trace(minors);
    const auto is_plane = spread.gt(count.square().mul(tiny));
    const auto across_two =
        minors.mul(count).div(at::where(is_plane, spread, 1));
    missing = at::where(is_plane, across_two, across_one);
  }
  const auto is_open = volume.le(count.pow(dims).mul(tiny));
  return squares.add(at::where(is_open, missing, 0))
      .add(at::where(count.gt(0), 0, eye));
}

/// (C, D, X)
Tensor fitted_to_neighbours(
    const CenteredCall& call,
    const Tensor& centers,
    const Steps& steps) {
  const auto dims = centers.size(1);
  const auto channels = steps.differences.size(1);
  auto ways = steps.ways;
  if (call.boundary_values) {
    const auto outwards = face_shapes(call).centers.sub(steps.first);
    ways = at::where(steps.is_inner, ways, outwards);
  }
  auto lengths = ways.square().sum(1, /*keepdim=*/true);
  if (!call.boundary_values) {
    lengths = at::where(steps.is_inner, lengths, 1);
  }
  const auto weighted = ways.div(lengths);
  const auto terms = at::cat(
      {times_rows(weighted, ways).flatten(1),
       times_rows(weighted, steps.differences).flatten(1)},
      1);
  // Both sides see the same product of two differences.
  const auto sums = sum_at_cells(
      at::stack({terms, at::where(steps.is_inner, terms, 0)}, 1),
      call.sides,
      centers.select(1, 0).unsqueeze(1));
  const auto squares = sums.narrow(1, 0, dims * dims);
  const auto rights = sums.narrow(1, dims * dims, dims * channels);
  return solved(
      completed(squares.unflatten(1, {dims, dims})),
      rights.unflatten(1, {dims, channels}));
}

/// (C, D, X). Cells are closed: a value that all faces share has no part.
Tensor summed_over_faces(
    const CenteredCall& call,
    const Tensor& centers,
    const Steps& steps) {
  const auto dims = centers.size(1);
  const auto shapes = face_shapes(call);
  const auto along = [&](const Tensor& way) {
    return way.mul(shapes.areas).sum(1, /*keepdim=*/true);
  };
  const auto whole = at::where(steps.is_inner, along(steps.ways), 1);
  const auto part = along(shapes.centers.sub(steps.first));
  const auto share = at::where(steps.is_inner, part.div(whole), 1);
  const auto fluxes = times_rows(shapes.areas, steps.differences).flatten(1);
  // Not times zero where there is no second: that of NaN would reach another.
  const auto others =
      at::where(steps.is_inner, fluxes.mul(share.neg().add(1)), 0);
  const auto sums = sum_at_cells(
      at::stack({fluxes.mul(share), others}, 1),
      call.sides,
      centers.select(1, 0).unsqueeze(1));
  CellBlocks volumes;
  for (size_t i = 0; i < call.cells.size(); ++i) {
    volumes.push_back(cell_measures(call.points, call.cells[i], call.kinds[i]));
  }
  return sums.div(at::cat(volumes).unsqueeze(1))
      .unflatten(1, {dims, steps.differences.size(1)});
}

} // namespace

// ---- the function -----------------------------------------------------------

Tensor cell_centered_gradients(
    const Tensor& points,
    const CellBlocks& cells,
    const KindNames& kinds,
    const Tensor& faces,
    const Tensor& sides,
    const Tensor& values,
    const std::string& method,
    const OptionalTensor& boundary_values) {
  const CommScope scope("shardtensor::cell_centered_gradients");
  const WithoutAutocast exact;
  const CenteredCall call{points, cells, kinds, faces, sides, boundary_values};
  const auto count = check_blocks(call);
  check_dtype(points);
  check_faces(call);
  check_centered_values(call, values, count);
  TORCH_CHECK_VALUE(
      method == "least_squares" || method == "green_gauss",
      kCentered,
      ": expected method 'least_squares' or 'green_gauss', got '",
      method,
      "'");
  CellBlocks parts;
  for (size_t i = 0; i < cells.size(); ++i) {
    parts.push_back(cell_centers(points, cells[i], kinds[i]));
  }
  const auto centers = at::cat(parts);
  const bool one = values.dim() == 1;
  const auto steps =
      steps_of(call, centers, one ? values.unsqueeze(1) : values);
  const auto found = method == "least_squares"
      ? fitted_to_neighbours(call, centers, steps)
      : summed_over_faces(call, centers, steps);
  return one ? found.squeeze(2) : found.transpose(1, 2);
}

namespace {

Tensor centered_kernel(
    const Tensor& points,
    at::TensorList cells,
    KindNames kinds,
    const Tensor& faces,
    const Tensor& sides,
    const Tensor& values,
    std::string method,
    const OptionalTensor& boundary_values) {
  return cell_centered_gradients(
      points,
      cells.vec(),
      kinds,
      faces,
      sides,
      values,
      method,
      boundary_values);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("cell_centered_gradients", centered_kernel);
}

} // namespace

} // namespace shardtensor
