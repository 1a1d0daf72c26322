#include "shardtensor/cells/elements.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/cells/kinds.h"
#include "shardtensor/cells/vectors.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- cells ------------------------------------------------------------------

/// The first cell of which `is_bad` (C) is true, in words; none: "".
std::string first_cell(
    const Tensor& is_bad,
    const Tensor& cells,
    const std::string& kind) {
  const auto count = cells.size(0);
  if (count == 0) {
    return "";
  }
  const auto numbers = constant_beside(cells, at::arange(count));
  const auto first = at::where(is_bad, numbers, numbers.add(count)).min();
  const auto number = first.item<int64_t>();
  if (number >= count) {
    return "";
  }
  const auto corners = cells.select(0, number);
  const auto named =
      host_numbers(layout_of(corners) ? full_tensor(corners) : corners);
  return c10::str(kind, " ", number, " of the points ", at::IntArrayRef(named));
}

/// As Note [Indices out of bounds] has it; of a function that waits for the
/// device anyway, on any.
void check_named_points(
    const char* op,
    int64_t points,
    const Tensor& given,
    const std::string& kind,
    bool waits) {
  const OutsideTransforms of_all_levels;
  const auto cells = values_inside(given);
  const bool is_cut = layout_of(cells) && spec_inside(cells)->is_sharded();
  if ((waits || is_cut || cells.is_cpu()) &&
      find_outside(op, cells, 0, points)) {
    const auto is_bad = cells.lt(0).logical_or(cells.ge(points)).any(1);
    TORCH_CHECK_INDEX(
        false,
        op,
        ": ",
        first_cell(is_bad, cells, kind),
        " names none of ",
        points,
        " points");
  }
}

const CellKind& check_arguments(
    const char* op,
    const Tensor& points,
    const Tensor& cells,
    const std::string& name,
    bool waits = false) {
  const auto& kind = cell_kind(op, name);
  TORCH_CHECK_VALUE(
      points.dim() == 2 && points.size(1) >= kind.dims && points.size(1) <= 3,
      op,
      ": expected points (N, D), ",
      kind.dims,
      " <= D <= 3 for cells '",
      name,
      "', got ",
      points.sizes());
  const auto dtype = points.scalar_type();
  TORCH_CHECK_TYPE(
      (dtype == at::kFloat || dtype == at::kDouble) &&
          cells.scalar_type() == at::kLong,
      op,
      ": expected points of float32 or float64 and cells of int64, got ",
      dtype,
      " and ",
      cells.scalar_type());
  TORCH_CHECK_VALUE(
      cells.dim() == 2 && cells.size(1) == kind.corners,
      op,
      ": expected cells (C, ",
      kind.corners,
      ") of kind '",
      name,
      "', got ",
      cells.sizes());
  check_named_points(op, points.size(0), cells, name, waits);
  return kind;
}

/// The corners of all cells as one list of rows, which shares memory with the
/// cells so that what it plans is kept for them.
Tensor corner_rows(const Tensor& cells) {
  const bool has_cut_cells =
      layout_of(cells) && spec_inside(cells)->is_sharded(1);
  return (has_cut_cells
              ? redistribute(cells, without_shard(spec_inside(cells), 1))
              : cells)
      .flatten();
}

/// Rows of the points' values (N, X) at the cells' corners: (C, corners, X).
Tensor at_corners(const Tensor& values, const Tensor& cells) {
  return values.index_select(0, corner_rows(cells))
      .unflatten(0, {-1, cells.size(1)});
}

/// The sum of the corners' terms (C, corners, X) at each point, cut as `like`.
Tensor sum_at_points(
    const Tensor& terms,
    const Tensor& cells,
    const Tensor& like) {
  return at::zeros_like(like).index_add(
      0, corner_rows(cells), terms.flatten(0, 1));
}

/// The cells' maps at each point of their quadrature.
class Maps {
 public:
  Maps(const CellKind& kind, const Tensor& corners)
      : kind_(kind),
        space_(corners.size(-1)),
        corners_(corners),
        slopes_(constant_beside(corners, quadrature(kind).slopes)) {
    std::vector<Vector> tangents;
    for (int64_t dim = 0; dim < kind.dims; ++dim) {
      // (Q, corners) x (C, corners, D)
      tangents.push_back(
          vector_of(at::matmul(slopes_.select(2, dim), corners)));
    }
    stretch_ = stretch_of(tangents, space_);
    tangents_ = std::move(tangents);
  }

  /// What each point counts in integrals: (C, Q).
  Tensor volumes() const {
    return stretch_.measure.mul(
        constant_beside(corners_, quadrature(kind_).weights));
  }
  /// (C, Q, corners, D)
  Tensor shape_gradients() const {
    std::vector<Tensor> rows;
    for (const auto& dual : stretch_.duals) {
      rows.push_back(stacked(dual, space_));
    }
    return at::matmul(slopes_, at::stack(rows, 2)); // (C, Q, dims, D)
  }
  /// Across a cell of one dim fewer than its space: the product of its
  /// tangents, of a line its tangent turned to the right, times the weight.
  Tensor area_vectors() const {
    const auto weights = constant_beside(corners_, quadrature(kind_).weights);
    const auto& first = tangents_[0];
    const auto across = kind_.dims == 1
        ? Vector{first[1], first[0].neg(), first[2]}
        : cross(first, tangents_[1]);
    return stacked(across, space_).mul(weights.unsqueeze(1));
  }

 private:
  const CellKind& kind_;
  int64_t space_;
  Tensor corners_;
  Tensor slopes_;
  std::vector<Vector> tangents_;
  Stretch stretch_;
};

/// Values (N) as (N, 1); what is made of them goes back by `one`.
struct Values {
  Tensor channels;
  bool one;
};
Values check_values(
    const char* op,
    const Tensor& points,
    const Tensor& values) {
  TORCH_CHECK_VALUE(
      (values.dim() == 1 || values.dim() == 2) &&
          values.size(0) == points.size(0),
      op,
      ": expected values (N) or (N, channels) of points ",
      points.sizes(),
      ", got ",
      values.sizes());
  TORCH_CHECK_TYPE(
      values.scalar_type() == points.scalar_type(),
      op,
      ": expected values of the points' dtype, ",
      points.scalar_type(),
      ", got ",
      values.scalar_type());
  const bool one = values.dim() == 1;
  return {one ? values.unsqueeze(1) : values, one};
}

/// The cells' coefficients as factors of volumes (C, Q).
Tensor weighted(
    const char* op,
    const Tensor& volumes,
    const OptionalTensor& coefficients) {
  if (!coefficients) {
    return volumes;
  }
  TORCH_CHECK_VALUE(
      coefficients->dim() == 1 && coefficients->size(0) == volumes.size(0),
      op,
      ": expected coefficients (C) of ",
      volumes.size(0),
      " cells, got ",
      coefficients->sizes());
  TORCH_CHECK_TYPE(
      c10::promoteTypes(volumes.scalar_type(), coefficients->scalar_type()) ==
          volumes.scalar_type(),
      op,
      ": expected coefficients that the points' dtype, ",
      volumes.scalar_type(),
      ", holds, got ",
      coefficients->scalar_type());
  return volumes.mul(coefficients->unsqueeze(1));
}

// ---- gradients --------------------------------------------------------------

/// (C, D, channels)
Tensor mean_gradients(const Maps& maps, const Tensor& values) {
  const auto volumes = maps.volumes();
  const auto shares = volumes.div(volumes.sum(1, /*keepdim=*/true));
  const auto shapes =
      maps.shape_gradients().mul(shares.unsqueeze(-1).unsqueeze(-1)).sum(1);
  return at::matmul(shapes.transpose(1, 2), values);
}

/// Solves (ways^T ways) g = ways^T values; across a cell of fewer dims than its
/// space, where the ways say nothing, the gradient is zero.
Tensor fitted_gradients(
    const CellKind& kind,
    const Tensor& corners,
    const Tensor& values) {
  const int64_t space = corners.size(-1);
  const auto lengths = corners.sub(corners.mean(1, /*keepdim=*/true));
  // Of about one, whatever the unit: powers of it are divided.
  const auto size = lengths.detach().abs().amax({1, 2}, /*keepdim=*/true);
  const auto ways = lengths.div(size);
  const auto differences = values.sub(values.mean(1, /*keepdim=*/true));
  auto squares = at::matmul(ways.transpose(1, 2), ways); // (C, D, D)
  if (kind.dims < space) {
    const auto first = vector_of(ways.select(1, 0));
    const auto second = vector_of(ways.select(1, 1));
    const auto normal = cross(first, second);
    const auto across = stacked(
        over(normal, dot(normal, normal).div(dot(first, first)).sqrt()), space);
    squares = squares.add(across.unsqueeze(2).mul(across.unsqueeze(1)));
  }
  return solved(squares, at::matmul(ways.transpose(1, 2), differences))
      .div(size);
}

// ---- what is no cell --------------------------------------------------------

/// How far the cell opens at the corners that tell: (C, turns), not positive
/// where it is flat or inside out.
Tensor openings(const CellKind& kind, const Tensor& corners) {
  const auto turns = [&](size_t place) {
    std::vector<int64_t> rows;
    for (const auto& turn : kind.turns) {
      rows.push_back(turn[place]);
    }
    return corners.index_select(
        1,
        at::tensor(rows, at::TensorOptions(corners.device()).dtype(at::kLong)));
  };
  std::vector<Vector> tangents;
  for (int64_t dim = 0; dim < kind.dims; ++dim) {
    tangents.push_back(vector_of(turns(dim + 1).sub(turns(0))));
  }
  if (kind.dims == 2 && corners.size(-1) == 3) {
    const auto normals = stacked(cross(tangents[0], tangents[1]), 3);
    return normals.mul(normals.sum(1, /*keepdim=*/true)).sum(2);
  }
  return stretch_of(tangents, corners.size(-1)).measure;
}

} // namespace

// ---- the functions ----------------------------------------------------------

void check_cells(
    const Tensor& points,
    const Tensor& given,
    const std::string& kind) {
  const CommScope scope("shardtensor::check_cells");
  const auto& of =
      check_arguments("check_cells", points, given, kind, /*waits=*/true);
  const OutsideTransforms of_all_levels;
  const auto cells = value_inside(given);
  const auto corners = at_corners(value_inside(points).detach(), cells);
  const auto sorted = std::get<0>(cells.sort(1));
  const auto next = sorted.narrow(1, 1, of.corners - 1);
  const auto repeats = next.eq(sorted.narrow(1, 0, of.corners - 1)).any(1);
  const auto twice = first_cell(repeats, cells, kind);
  TORCH_CHECK_VALUE(
      twice.empty(), "check_cells: ", twice, " names a point twice");
  const auto opens = openings(of, corners).gt(0).all(1);
  const auto closed = first_cell(opens.logical_not(), cells, kind);
  TORCH_CHECK_VALUE(
      closed.empty(),
      "check_cells: ",
      closed,
      " is flat or turned inside out, expected corners in the order of VTK");
}

Tensor cell_measures(
    const Tensor& points,
    const Tensor& cells,
    const std::string& kind) {
  const CommScope scope("shardtensor::cell_measures");
  const WithoutAutocast exact;
  const auto& of = check_arguments("cell_measures", points, cells, kind);
  return Maps(of, at_corners(points, cells)).volumes().sum(1);
}

Tensor cell_centers(
    const Tensor& points,
    const Tensor& cells,
    const std::string& kind) {
  const CommScope scope("shardtensor::cell_centers");
  const WithoutAutocast exact;
  check_arguments("cell_centers", points, cells, kind);
  return at_corners(points, cells).mean(1);
}

Tensor cell_normals(
    const Tensor& points,
    const Tensor& cells,
    const std::string& kind,
    bool weighted) {
  const CommScope scope("shardtensor::cell_normals");
  const WithoutAutocast exact;
  const auto& of = check_arguments("cell_normals", points, cells, kind);
  TORCH_CHECK_VALUE(
      points.size(1) > 1 && points.size(1) == of.dims + 1,
      "cell_normals: expected cells 'triangle' or 'quad' of points (N, 3) or "
      "'line' of points (N, 2), got '",
      kind,
      "' and ",
      points.sizes());
  const auto areas = Maps(of, at_corners(points, cells)).area_vectors().sum(1);
  return weighted ? areas
                  : areas.div(areas.square().sum(1, /*keepdim=*/true).sqrt());
}

Tensor cell_gradients(
    const Tensor& points,
    const Tensor& cells,
    const std::string& kind,
    const Tensor& values,
    const std::string& method) {
  const CommScope scope("shardtensor::cell_gradients");
  const WithoutAutocast exact;
  const auto& of = check_arguments("cell_gradients", points, cells, kind);
  const auto given = check_values("cell_gradients", points, values);
  TORCH_CHECK_VALUE(
      method == "green_gauss" || (method == "least_squares" && of.dims > 1),
      "cell_gradients: expected method 'green_gauss' or, for other cells than "
      "lines, 'least_squares', got '",
      method,
      "'");
  const auto corners = at_corners(points, cells);
  const auto ends = at_corners(given.channels, cells);
  const auto found = method == "green_gauss"
      ? mean_gradients(Maps(of, corners), ends)
      : fitted_gradients(of, corners, ends);
  return given.one ? found.squeeze(2) : found.transpose(1, 2);
}

Tensor apply_mass(
    const Tensor& points,
    const Tensor& cells,
    const std::string& kind,
    const Tensor& values,
    const OptionalTensor& coefficients) {
  const CommScope scope("shardtensor::apply_mass");
  const WithoutAutocast exact;
  const auto& of = check_arguments("apply_mass", points, cells, kind);
  const auto given = check_values("apply_mass", points, values);
  const Maps maps(of, at_corners(points, cells));
  const auto volumes = weighted("apply_mass", maps.volumes(), coefficients);
  const auto shapes = constant_beside(volumes, quadrature(of).shapes);
  const auto inside = at::matmul(shapes, at_corners(given.channels, cells));
  const auto terms =
      at::matmul(shapes.transpose(0, 1), inside.mul(volumes.unsqueeze(-1)));
  const auto sums = sum_at_points(terms, cells, given.channels);
  return given.one ? sums.squeeze(1) : sums;
}

Tensor apply_stiffness(
    const Tensor& points,
    const Tensor& cells,
    const std::string& kind,
    const Tensor& values,
    const OptionalTensor& coefficients) {
  const CommScope scope("shardtensor::apply_stiffness");
  const WithoutAutocast exact;
  const auto& of = check_arguments("apply_stiffness", points, cells, kind);
  const auto given = check_values("apply_stiffness", points, values);
  const Maps maps(of, at_corners(points, cells));
  const auto volumes =
      weighted("apply_stiffness", maps.volumes(), coefficients);
  const auto slopes = maps.shape_gradients(); // (C, Q, corners, D)
  const auto ends = at_corners(given.channels, cells).unsqueeze(1);
  const auto inside = at::matmul(slopes.transpose(2, 3), ends);
  const auto fluxes = inside.mul(volumes.unsqueeze(-1).unsqueeze(-1));
  const auto terms = at::matmul(slopes, fluxes).sum(1);
  const auto sums = sum_at_points(terms, cells, given.channels);
  return given.one ? sums.squeeze(1) : sums;
}

namespace {

void check_kernel(const Tensor& points, const Tensor& cells, std::string kind) {
  check_cells(points, cells, kind);
}
Tensor measures_kernel(
    const Tensor& points,
    const Tensor& cells,
    std::string kind) {
  return cell_measures(points, cells, kind);
}
Tensor centers_kernel(
    const Tensor& points,
    const Tensor& cells,
    std::string kind) {
  return cell_centers(points, cells, kind);
}
Tensor normals_kernel(
    const Tensor& points,
    const Tensor& cells,
    std::string kind,
    bool weighted) {
  return cell_normals(points, cells, kind, weighted);
}
Tensor gradients_kernel(
    const Tensor& points,
    const Tensor& cells,
    std::string kind,
    const Tensor& values,
    std::string method) {
  return cell_gradients(points, cells, kind, values, method);
}
template <auto apply>
Tensor apply_kernel(
    const Tensor& points,
    const Tensor& cells,
    std::string kind,
    const Tensor& values,
    const OptionalTensor& coefficients) {
  return apply(points, cells, kind, values, coefficients);
}

/// ShardTensors take the same way, operator by operator.
TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("check_cells", check_kernel);
  m.impl("cell_measures", measures_kernel);
  m.impl("cell_centers", centers_kernel);
  m.impl("cell_normals", normals_kernel);
  m.impl("cell_gradients", gradients_kernel);
  m.impl("apply_mass", apply_kernel<apply_mass>);
  m.impl("apply_stiffness", apply_kernel<apply_stiffness>);
}

} // namespace

} // namespace shardtensor
