#include "shardtensor/cells/kinds.h"

#include <array>
#include <cmath>
#include <map>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include "shardtensor/comm/transforms.h"

namespace shardtensor::detail {
namespace {

using Lists = std::vector<std::vector<int64_t>>;
using Place = std::array<double, 3>;

const std::vector<CellKind>& kinds() {
  static const Lists ends{{0}, {1}};
  static const Lists triangle{{0, 1}, {1, 2}, {2, 0}};
  static const Lists quad{{0, 1}, {1, 2}, {2, 3}, {3, 0}};
  static const Lists tetra_edges{
      {0, 1}, {1, 2}, {2, 0}, {0, 3}, {1, 3}, {2, 3}};
  static const Lists tetra_faces{{0, 2, 1}, {0, 1, 3}, {1, 2, 3}, {0, 3, 2}};
  static const Lists hexahedron_edges{
      {0, 1},
      {1, 2},
      {2, 3},
      {3, 0},
      {4, 5},
      {5, 6},
      {6, 7},
      {7, 4},
      {0, 4},
      {1, 5},
      {2, 6},
      {3, 7}};
  static const Lists hexahedron_faces{
      {0, 3, 2, 1},
      {4, 5, 6, 7},
      {0, 1, 5, 4},
      {1, 2, 6, 5},
      {2, 3, 7, 6},
      {3, 0, 4, 7}};
  static const Lists quad_turns{{0, 1, 3}, {1, 2, 0}, {2, 3, 1}, {3, 0, 2}};
  static const Lists hexahedron_turns{
      {0, 1, 3, 4},
      {1, 2, 0, 5},
      {2, 3, 1, 6},
      {3, 0, 2, 7},
      {4, 7, 5, 0},
      {5, 4, 6, 1},
      {6, 5, 7, 2},
      {7, 6, 4, 3}};
  static const std::vector<CellKind> all{
      {"line", 1, 2, {{0, 1}}, ends, true, {{0, 1}}},
      {"triangle", 2, 3, triangle, triangle, true, {{0, 1, 2}}},
      {"quad", 2, 4, quad, quad, false, quad_turns},
      {"tetra", 3, 4, tetra_edges, tetra_faces, true, {{0, 1, 2, 3}}},
      {"hexahedron",
       3,
       8,
       hexahedron_edges,
       hexahedron_faces,
       false,
       hexahedron_turns}};
  return all;
}

/// Points of the unit simplex, of equal weights, right for polynomials of
/// degree 2.
std::vector<Place> simplex_places(int64_t dims) {
  const double root = std::sqrt(dims + 2.0);
  const double small = (1 - 1 / root) / (dims + 1);
  const double large = 1 - static_cast<double>(dims) * small;
  std::vector<Place> places;
  for (int64_t corner = 0; corner <= dims; ++corner) {
    Place place{small, small, small};
    if (corner > 0) {
      place[corner - 1] = large;
    }
    places.push_back(place);
  }
  return places;
}

Quadrature of_simplex(const CellKind& kind) {
  const auto places = simplex_places(kind.dims);
  const auto count = static_cast<int64_t>(places.size());
  double volume = 1;
  Quadrature result{
      at::zeros({count, kind.corners}, at::kDouble),
      at::zeros({count, kind.corners, kind.dims}, at::kDouble),
      at::ones({count}, at::kDouble)};
  for (int64_t dim = 0; dim < kind.dims; ++dim) {
    volume /= static_cast<double>(dim + 1);
    result.slopes.select(1, 0).select(1, dim).fill_(-1);
    result.slopes.select(1, dim + 1).select(1, dim).fill_(1);
  }
  for (int64_t point = 0; point < count; ++point) {
    double first = 1;
    for (int64_t dim = 0; dim < kind.dims; ++dim) {
      result.shapes[point][dim + 1].fill_(places[point][dim]);
      first -= places[point][dim];
    }
    result.shapes[point][0].fill_(first);
  }
  result.weights.mul_(volume / static_cast<double>(count));
  return result;
}

/// Of the cube [0, 1]^dims: Gauss' two points along each dim. Corners go around
/// the bottom, then around the top.
Quadrature of_cube(const CellKind& kind) {
  const int64_t count = kind.corners;
  const double away = 0.5 / std::sqrt(3.0);
  Quadrature result{
      at::ones({count, count}, at::kDouble),
      at::ones({count, count, kind.dims}, at::kDouble),
      at::ones({count}, at::kDouble).div(static_cast<double>(count))};
  const auto is_high = [](int64_t corner, int64_t dim) {
    return dim == 0 ? corner % 4 == 1 || corner % 4 == 2
        : dim == 1  ? corner % 4 >= 2
                    : corner >= 4;
  };
  for (int64_t point = 0; point < count; ++point) {
    for (int64_t corner = 0; corner < count; ++corner) {
      for (int64_t dim = 0; dim < kind.dims; ++dim) {
        const double at = is_high(point, dim) ? 0.5 + away : 0.5 - away;
        const bool high = is_high(corner, dim);
        result.shapes[point][corner].mul_(high ? at : 1 - at);
        for (int64_t along = 0; along < kind.dims; ++along) {
          const double factor = along == dim ? (high ? 1 : -1)
              : high                         ? at
                                             : 1 - at;
          result.slopes[point][corner][along].mul_(factor);
        }
      }
    }
  }
  return result;
}

/// For all callers, in whatever mode the first one is.
std::map<std::string, Quadrature> all_quadratures() {
  const OutsideTransforms of_all_levels;
  const c10::InferenceMode no_inference(false);
  std::map<std::string, Quadrature> all;
  for (const auto& kind : kinds()) {
    all.emplace(kind.name, kind.is_simplex ? of_simplex(kind) : of_cube(kind));
  }
  return all;
}

} // namespace

const CellKind& cell_kind(const char* op, const std::string& name) {
  for (const auto& kind : kinds()) {
    if (kind.name == name) {
      return kind;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      op,
      ": expected a kind 'line', 'triangle', 'quad', 'tetra' or 'hexahedron', "
      "got '",
      name,
      "'");
}

const Quadrature& quadrature(const CellKind& kind) {
  static const auto all = all_quadratures();
  return all.at(kind.name);
}

} // namespace shardtensor::detail
