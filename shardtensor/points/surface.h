#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// How a surface tells inside, where distances are negative, from outside.
/// - Normal: by the side of the nearest part, whose normal is that of a face,
///   the sum of an edge's two, or a corner's weighted by angles. Right for
///   closed surfaces whose faces share corners.
/// - Winding: by how often the surface winds around a point, more than half.
///   Right for soups of triangles and surfaces with small holes, too.
enum class SurfaceSign { Normal, Winding };

/// What queries find on a surface.
struct NearestFaces {
  at::Tensor faces; // (Q), int64; of equally near ones the first; -1 for none
  /// Which part of the face is nearest, (Q), int64: 0 to 2 its corner, 3 + i
  /// the edge from corner i to the next, 6 its inside.
  at::Tensor parts;
  at::Tensor signs; // (Q), double: 1 or -1

  static constexpr int64_t kInside = 6;
};

/// Triangles in space as a tree of boxes over them. PyTorch's threads
/// share the queries.
class Surface {
 public:
  /// Vertices (V, 3), double, and faces (F, 3), int64, contiguous, on CPUs, all
  /// in range.
  Surface(const at::Tensor& vertices, const at::Tensor& faces);

  /// Of queries (Q, 3), double and finite; nothing further than `max_distance`.
  NearestFaces nearest(
      const at::Tensor& queries,
      double max_distance,
      SurfaceSign sign) const;

 private:
  using Point = std::array<double, 3>;

  /// A node's right child follows its left child's last descendant; a leaf has
  /// none. Its faces are order_[begin, end).
  struct Node {
    Point low;
    Point high;
    int64_t begin;
    int64_t end;
    int64_t right = 0; // 0: a leaf
    // For what is far away the node's faces are one flat piece of surface.
    Point area{}; // the sum of their area vectors
    Point center{}; // the mean of their centers, weighted by area
    double radius = 0; // of a ball around the center that holds all of them
  };
  struct Triangle {
    std::array<int64_t, 3> corners;
    std::array<Point, 3> at;
    Point area; // half the product of two edges
  };
  struct Found {
    double square;
    int64_t face = -1;
    int64_t part = -1;
    Point at{};
  };

  int64_t build(int64_t begin, int64_t end);
  void sum_up(Node& node) const;
  void add_normals();
  void add_edge_normals();
  Found nearest(const Point& query, double max_square) const;
  void visit(const Node& leaf, const Point& query, Found& found) const;
  double side_of(const Point& query, const Found& found) const;
  double winding(const Point& query) const;

  std::vector<Triangle> triangles_;
  std::vector<int64_t> order_;
  std::vector<Node> nodes_;
  std::vector<Point> corner_normals_; // of each vertex
  std::vector<std::array<Point, 3>> edge_normals_; // of each face
};

} // namespace shardtensor::detail
