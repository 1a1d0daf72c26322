#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// A kind of cells with straight edges, its corners in the order of VTK and of
/// meshio, which names it.
struct CellKind {
  std::string name;
  int64_t dims; // of the cell itself: a triangle in space has two
  int64_t corners;
  std::vector<std::vector<int64_t>> edges;
  /// What bounds it, of one dim less, seen from outside.
  std::vector<std::vector<int64_t>> faces;
  bool is_simplex;
  /// Corners, each before its neighbours along the cell's dims, right-handed:
  /// where all turn that way the cell is not inside out.
  std::vector<std::vector<int64_t>> turns;
};

/// "line", "triangle", "quad", "tetra" or "hexahedron". Raises on another name.
const CellKind& cell_kind(const char* op, const std::string& name);

/// Numbers with which integrals over a cell are sums, exact for products of two
/// of its shape functions on cells without distortion. Tensors of double.
struct Quadrature {
  at::Tensor shapes; // (Q, corners): shape functions at the points
  at::Tensor slopes; // (Q, corners, dims): their derivatives there
  at::Tensor weights; // (Q)
};
const Quadrature& quadrature(const CellKind& kind);

} // namespace shardtensor::detail
