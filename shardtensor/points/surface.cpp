#include "shardtensor/points/surface.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <tuple>

#include <ATen/ops/empty.h>

#include "shardtensor/threads/parallel_for.h"

namespace shardtensor::detail {
namespace {

using Point = std::array<double, 3>;

constexpr int64_t kLeafFaces = 4;
constexpr int64_t kQueriesPerTask = 64;
/// From how many radii on a node's faces count as one for winding numbers.
constexpr double kFar = 3;

Point operator+(const Point& a, const Point& b) {
  return {a[0] + b[0], a[1] + b[1], a[2] + b[2]};
}
Point operator-(const Point& a, const Point& b) {
  return {a[0] - b[0], a[1] - b[1], a[2] - b[2]};
}
Point operator*(double factor, const Point& a) {
  return {factor * a[0], factor * a[1], factor * a[2]};
}
double dot(const Point& a, const Point& b) {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}
Point cross(const Point& a, const Point& b) {
  return {
      a[1] * b[2] - a[2] * b[1],
      a[2] * b[0] - a[0] * b[2],
      a[0] * b[1] - a[1] * b[0]};
}
double length(const Point& a) {
  return std::sqrt(dot(a, a));
}
Point unit(const Point& a) {
  const double size = length(a);
  return size > 0 ? (1 / size) * a : a;
}
Point center_of(const std::array<Point, 3>& corners) {
  return (1.0 / 3) * (corners[0] + corners[1] + corners[2]);
}
double angle_at(const std::array<Point, 3>& corners, int64_t i) {
  const auto a = corners[(i + 1) % 3] - corners[i];
  const auto b = corners[(i + 2) % 3] - corners[i];
  return std::atan2(length(cross(a, b)), dot(a, b));
}

/// The squared distance to a box; 0 inside.
double away_from(const Point& low, const Point& high, const Point& query) {
  double square = 0;
  for (int64_t dim = 0; dim < 3; ++dim) {
    const double away =
        std::max({low[dim] - query[dim], query[dim] - high[dim], 0.0});
    square += away * away;
  }
  return square;
}

struct Projection {
  int64_t part;
  Point at;
};

Projection onto_edge(
    const std::array<Point, 3>& corners,
    int64_t i,
    const Point& query) {
  const auto& from = corners[i];
  const int64_t next = (i + 1) % 3;
  const auto along = corners[next] - from;
  const double size = dot(along, along);
  const double way = size > 0 ? dot(query - from, along) / size : 0;
  if (way <= 0) {
    return {i, from};
  }
  if (way >= 1) {
    return {next, corners[next]};
  }
  return {3 + i, from + way * along};
}

/// Where a triangle is nearest to the query: on its inside if the query stands
/// above that, else on an edge.
Projection project(
    const std::array<Point, 3>& corners,
    const Point& area,
    const Point& query) {
  bool above = dot(area, area) > 0;
  for (int64_t i = 0; i < 3 && above; ++i) {
    const auto along = corners[(i + 1) % 3] - corners[i];
    above = dot(cross(along, query - corners[i]), area) > 0;
  }
  if (above) {
    const double away = dot(query - corners[0], area) / dot(area, area);
    return {NearestFaces::kInside, query - away * area};
  }
  Projection best{};
  double square = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < 3; ++i) {
    const auto found = onto_edge(corners, i, query);
    const auto away = query - found.at;
    if (dot(away, away) < square) {
      square = dot(away, away);
      best = found;
    }
  }
  return best;
}

/// The solid angle under which a triangle is seen, signed (van Oosterom and
/// Strackee).
double solid_angle(const std::array<Point, 3>& corners, const Point& query) {
  const auto a = corners[0] - query;
  const auto b = corners[1] - query;
  const auto c = corners[2] - query;
  const double la = length(a);
  const double lb = length(b);
  const double lc = length(c);
  return 2 *
      std::atan2(
             dot(a, cross(b, c)),
             la * lb * lc + dot(a, b) * lc + dot(b, c) * la + dot(c, a) * lb);
}

} // namespace

// ---- the tree ---------------------------------------------------------------

Surface::Surface(const at::Tensor& vertices, const at::Tensor& faces) {
  const auto* const vertex =
      reinterpret_cast<const Point*>(vertices.const_data_ptr<double>());
  const auto* const face = faces.const_data_ptr<int64_t>();
  triangles_.resize(faces.size(0));
  for (int64_t i = 0; i < faces.size(0); ++i) {
    auto& triangle = triangles_[i];
    for (int64_t corner = 0; corner < 3; ++corner) {
      triangle.corners[corner] = face[3 * i + corner];
      triangle.at[corner] = vertex[triangle.corners[corner]];
    }
    const auto& at = triangle.at;
    triangle.area = 0.5 * cross(at[1] - at[0], at[2] - at[0]);
  }
  corner_normals_.resize(vertices.size(0), Point{});
  add_normals();
  order_.resize(triangles_.size());
  std::iota(order_.begin(), order_.end(), 0);
  if (!triangles_.empty()) {
    nodes_.reserve(triangles_.size());
    build(0, static_cast<int64_t>(order_.size()));
  }
}

int64_t Surface::build(int64_t begin, int64_t end) {
  Node node{};
  node.low.fill(std::numeric_limits<double>::infinity());
  node.high.fill(-std::numeric_limits<double>::infinity());
  node.begin = begin;
  node.end = end;
  sum_up(node);
  const auto place = static_cast<int64_t>(nodes_.size());
  nodes_.push_back(node);
  if (end - begin <= kLeafFaces) {
    return place;
  }
  const auto extent = node.high - node.low;
  const auto dim =
      std::max_element(extent.begin(), extent.end()) - extent.begin();
  const int64_t middle = (begin + end) / 2;
  const auto along = [&](int64_t face) {
    return std::pair(center_of(triangles_[face].at)[dim], face);
  };
  std::nth_element(
      order_.begin() + begin,
      order_.begin() + middle,
      order_.begin() + end,
      [&](int64_t a, int64_t b) { return along(a) < along(b); });
  build(begin, middle);
  const int64_t right = build(middle, end);
  nodes_[place].right = right;
  return place;
}

void Surface::sum_up(Node& node) const {
  double weight = 0;
  for (int64_t i = node.begin; i < node.end; ++i) {
    const auto& triangle = triangles_[order_[i]];
    const double size = length(triangle.area);
    node.area = node.area + triangle.area;
    node.center = node.center + size * center_of(triangle.at);
    weight += size;
    for (const auto& corner : triangle.at) {
      for (int64_t dim = 0; dim < 3; ++dim) {
        node.low[dim] = std::min(node.low[dim], corner[dim]);
        node.high[dim] = std::max(node.high[dim], corner[dim]);
      }
    }
  }
  node.center =
      weight > 0 ? (1 / weight) * node.center : 0.5 * (node.low + node.high);
  for (int64_t i = node.begin; i < node.end; ++i) {
    for (const auto& corner : triangles_[order_[i]].at) {
      node.radius = std::max(node.radius, length(corner - node.center));
    }
  }
}

// ---- normals ----------------------------------------------------------------

void Surface::add_normals() {
  for (const auto& triangle : triangles_) {
    const auto normal = unit(triangle.area);
    for (int64_t i = 0; i < 3; ++i) {
      auto& sum = corner_normals_[triangle.corners[i]];
      sum = sum + angle_at(triangle.at, i) * normal;
    }
  }
  add_edge_normals();
}

void Surface::add_edge_normals() {
  // Corners of an edge, ascending, its face and its place in that.
  using Edge = std::tuple<int64_t, int64_t, int64_t, int64_t>;
  std::vector<Edge> edges;
  edges.reserve(3 * triangles_.size());
  for (size_t face = 0; face < triangles_.size(); ++face) {
    const auto& corners = triangles_[face].corners;
    for (int64_t i = 0; i < 3; ++i) {
      const auto [a, b] = std::minmax(corners[i], corners[(i + 1) % 3]);
      edges.emplace_back(a, b, static_cast<int64_t>(face), i);
    }
  }
  std::sort(edges.begin(), edges.end());
  edge_normals_.resize(triangles_.size());
  for (size_t begin = 0, end = 0; begin < edges.size(); begin = end) {
    Point sum{};
    const auto& [a, b, first, place] = edges[begin];
    for (end = begin; end < edges.size() && std::get<0>(edges[end]) == a &&
         std::get<1>(edges[end]) == b;
         ++end) {
      sum = sum + unit(triangles_[std::get<2>(edges[end])].area);
    }
    for (size_t i = begin; i < end; ++i) {
      edge_normals_[std::get<2>(edges[i])][std::get<3>(edges[i])] = sum;
    }
  }
}

// ---- queries ----------------------------------------------------------------

void Surface::visit(const Node& leaf, const Point& query, Found& found) const {
  for (int64_t i = leaf.begin; i < leaf.end; ++i) {
    const int64_t face = order_[i];
    const auto& triangle = triangles_[face];
    const auto nearest = project(triangle.at, triangle.area, query);
    const auto away = query - nearest.at;
    const double square = dot(away, away);
    const bool is_nearer = square < found.square ||
        (square == found.square && (found.face < 0 || face < found.face));
    if (is_nearer) {
      found = {square, face, nearest.part, nearest.at};
    }
  }
}

Surface::Found Surface::nearest(const Point& query, double max_square) const {
  Found found{max_square};
  std::vector<std::pair<double, int64_t>> open;
  const auto push = [&](int64_t place) {
    const auto& node = nodes_[place];
    const double square = away_from(node.low, node.high, query);
    if (square <= found.square) {
      open.emplace_back(square, place);
    }
  };
  if (!nodes_.empty()) {
    push(0);
  }
  while (!open.empty()) {
    const auto [square, place] = open.back();
    open.pop_back();
    const auto& node = nodes_[place];
    if (square > found.square) {
      continue;
    }
    if (node.right == 0) {
      visit(node, query, found);
      continue;
    }
    push(node.right);
    push(place + 1);
    const auto count = open.size();
    if (count >= 2 && open[count - 2].first < open[count - 1].first) {
      std::swap(open[count - 2], open[count - 1]); // the nearer one next
    }
  }
  return found;
}

double Surface::side_of(const Point& query, const Found& found) const {
  const auto& triangle = triangles_[found.face];
  const auto normal = found.part == NearestFaces::kInside ? triangle.area
      : found.part >= 3 ? edge_normals_[found.face][found.part - 3]
                        : corner_normals_[triangle.corners[found.part]];
  return dot(query - found.at, normal) < 0 ? -1 : 1;
}

double Surface::winding(const Point& query) const {
  double sum = 0;
  std::vector<int64_t> open{0};
  while (!open.empty()) {
    const int64_t place = open.back();
    const auto& node = nodes_[place];
    open.pop_back();
    const auto way = node.center - query;
    const double away = length(way);
    if (away > kFar * node.radius) {
      sum += dot(node.area, way) / (away * away * away);
    } else if (node.right == 0) {
      for (int64_t i = node.begin; i < node.end; ++i) {
        sum += solid_angle(triangles_[order_[i]].at, query);
      }
    } else {
      open.push_back(node.right);
      open.push_back(place + 1);
    }
  }
  return sum / (4 * std::numbers::pi);
}

NearestFaces Surface::nearest(
    const at::Tensor& queries,
    double max_distance,
    SurfaceSign sign) const {
  const int64_t count = queries.size(0);
  const auto options = queries.options();
  const NearestFaces result{
      at::empty({count}, options.dtype(at::kLong)),
      at::empty({count}, options.dtype(at::kLong)),
      at::empty({count}, options)};
  const auto* const query =
      reinterpret_cast<const Point*>(queries.const_data_ptr<double>());
  auto* const faces = result.faces.mutable_data_ptr<int64_t>();
  auto* const parts = result.parts.mutable_data_ptr<int64_t>();
  auto* const signs = result.signs.mutable_data_ptr<double>();
  parallel_for(count, kQueriesPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto found = nearest(query[i], max_distance * max_distance);
      faces[i] = found.face;
      parts[i] = found.part;
      signs[i] = found.face < 0         ? 1
          : sign == SurfaceSign::Normal ? side_of(query[i], found)
          : winding(query[i]) > 0.5     ? -1
                                        : 1;
    }
  });
  return result;
}

} // namespace shardtensor::detail
