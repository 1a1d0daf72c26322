#include "shardtensor/cells/centered.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardtensor/cells/elements.h"
#include "shardtensor/cells/topology.h"

namespace shardtensor {
namespace {

/// A square of triangles around a point that is not its middle, and a quad
/// beside it.
struct Patch {
  at::Tensor points = at::tensor(
                          {0.0,
                           0.0,
                           2.0,
                           0.0,
                           2.0,
                           2.0,
                           0.0,
                           2.0,
                           0.9,
                           1.2,
                           4.0,
                           0.5,
                           4.0,
                           2.0},
                          at::kDouble)
                          .view({7, 2});
  std::vector<at::Tensor> cells{
      at::tensor({0, 1, 4, 1, 2, 4, 2, 3, 4, 3, 0, 4}, at::kLong).view({4, 3}),
      at::tensor({1, 5, 6, 2}, at::kLong).view({1, 4})};
  std::vector<std::string> kinds{"triangle", "quad"};
  at::Tensor faces;
  at::Tensor sides;
  at::Tensor slope = at::tensor({3.0, -2.0}, at::kDouble);

  Patch() {
    std::tie(faces, sides) = cell_faces(cells, kinds, points.size(0));
  }
  at::Tensor values() const {
    const auto centers = at::cat(
        {cell_centers(points, cells[0], kinds[0]),
         cell_centers(points, cells[1], kinds[1])});
    return centers.matmul(slope);
  }
  at::Tensor boundary_values() const {
    return points.matmul(slope).index({faces}).mean(1);
  }
  at::Tensor gradients(
      const at::Tensor& values,
      const std::string& method,
      const std::optional<at::Tensor>& around = std::nullopt) const {
    return cell_centered_gradients(
        points, cells, kinds, faces, sides, values, method, around);
  }
};

TEST(CellCenteredGradients, FitLinearValues) {
  const Patch patch;
  const auto found =
      patch.gradients(patch.values(), "least_squares", patch.boundary_values());
  EXPECT_TRUE(found.allclose(patch.slope.expand({5, 2})));
  const auto alone = patch.gradients(patch.values(), "least_squares");
  EXPECT_TRUE(alone.narrow(0, 0, 4).allclose(patch.slope.expand({4, 2})));
}

TEST(CellCenteredGradients, AreZeroWhereNeighboursLeaveADirectionOpen) {
  const Patch patch;
  const auto quad = patch.gradients(patch.values(), "least_squares")[4];
  const auto way = cell_centers(patch.points, patch.cells[0], "triangle")[1] -
      cell_centers(patch.points, patch.cells[1], "quad")[0];
  const auto along = way * way.dot(patch.slope) / way.dot(way);
  EXPECT_TRUE(quad.allclose(along));
}

TEST(CellCenteredGradients, GoThroughFacesByGauss) {
  const auto points = at::tensor(
                          {0.0,
                           0.0,
                           1.0,
                           0.0,
                           2.0,
                           0.0,
                           3.0,
                           0.0,
                           0.0,
                           1.0,
                           1.0,
                           1.0,
                           2.0,
                           1.0,
                           3.0,
                           1.0},
                          at::kDouble)
                          .view({8, 2});
  const std::vector<at::Tensor> cells{
      at::tensor({0, 1, 5, 4, 1, 2, 6, 5, 2, 3, 7, 6}, at::kLong).view({3, 4})};
  const auto [faces, sides] = cell_faces(cells, {"quad"}, 8);
  const auto values = at::tensor({1.0, 3.0, 5.0}, at::kDouble);
  const auto found = cell_centered_gradients(
      points, cells, {"quad"}, faces, sides, values, "green_gauss");
  const auto expected =
      at::tensor({1.0, 0.0, 2.0, 0.0, 1.0, 0.0}, at::kDouble).view({3, 2});
  EXPECT_TRUE(found.allclose(expected));
  const auto channels = cell_centered_gradients(
      points,
      cells,
      {"quad"},
      faces,
      sides,
      at::stack({values, values.neg()}, 1),
      "green_gauss");
  EXPECT_TRUE(channels.allclose(at::stack({expected, expected.neg()}, 1)));
}

TEST(CellCenteredGradients, RaiseForAnotherMethod) {
  const Patch patch;
  EXPECT_THROW(patch.gradients(patch.values(), "spline"), c10::ValueError);
}

} // namespace
} // namespace shardtensor
