#include "shardtensor/layout/mesh_axes.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace shardtensor {
namespace {

MeshPtr mesh_over(
    std::vector<int64_t> shape,
    std::vector<int64_t> ranks,
    int64_t position,
    std::vector<std::string> names = {}) {
  Mesh::Options options;
  options.shape = std::move(shape);
  options.ranks = std::move(ranks);
  options.axis_names = std::move(names);
  options.position = position;
  return make_mesh(std::move(options));
}

using Axes = std::vector<int64_t>;

TEST(AxesIn, FindsTheAxisOfTheSameRanks) {
  const auto whole = mesh_over({2, 2}, {0, 1, 2, 3}, 2);
  EXPECT_EQ(axes_in(*mesh_over({2}, {2, 3}, 0), *whole), Axes{1});
  EXPECT_EQ(axes_in(*mesh_over({2}, {0, 2}, 1), *whole), Axes{0});
  EXPECT_EQ(axes_in(*whole, *whole), (Axes{0, 1}));
  EXPECT_FALSE(axes_in(*mesh_over({2}, {1, 2}, 1), *whole));
  EXPECT_FALSE(axes_in(*mesh_over({4}, {0, 1, 2, 3}, 2), *whole));
  EXPECT_FALSE(axes_in(*whole, *mesh_over({2}, {2, 3}, 0)));
}

TEST(AxesIn, NeedsThisRankInBoth) {
  const auto whole = mesh_over({2, 2}, {0, 1, 2, 3}, 2);
  EXPECT_FALSE(axes_in(*mesh_over({2}, {0, 1}, -1), *whole));
}

TEST(AxesIn, TellsAxesOfOneRankByName) {
  const auto whole = mesh_over({1, 1, 2}, {0, 1}, 0, {"a", "b", "c"});
  EXPECT_EQ(axes_in(*mesh_over({1}, {0}, 0, {"b"}), *whole), Axes{1});
  EXPECT_EQ(axes_in(*mesh_over({1}, {0}, 0, {"x"}), *whole), Axes{0});
  EXPECT_EQ(
      axes_in(*mesh_over({1, 2}, {0, 1}, 0, {"b", "c"}), *whole), (Axes{1, 2}));
}

TEST(AxisMesh, HasTheRanksAlongOneAxis) {
  Mesh::Options options;
  options.shape = {2, 2};
  options.ranks = {0, 1, 2, 3};
  options.axis_names = {"data", "domain"};
  options.axis_groups = {"columns", "rows"};
  options.group = "world";
  options.position = 3;
  const auto whole = make_mesh(options);
  const auto domain = detail::axis_mesh(*whole, "domain");
  EXPECT_EQ(domain->options().ranks, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(domain->position(), 1);
  EXPECT_EQ(domain->group(), "rows");
  EXPECT_EQ(domain->group(0), "rows");
  EXPECT_EQ(axes_in(*domain, *whole), Axes{1});
  EXPECT_EQ(detail::axis_mesh(*domain, "domain"), domain);
  EXPECT_THROW(detail::axis_mesh(*whole, "time"), c10::ValueError);
  options.position = -1;
  EXPECT_THROW(detail::axis_mesh(*make_mesh(options), "data"), c10::ValueError);
}

TEST(OnMesh, IsReplicateAlongTheOtherAxes) {
  const auto whole = mesh_over({2, 2}, {0, 1, 2, 3}, 2);
  const auto part = mesh_over({2}, {0, 2}, 1);
  const auto spec =
      make_spec(part, {5, 4}, {Placement::shard(0)}, {Partition({4, 1}), {}});
  const auto seen = on_mesh(spec, whole);
  EXPECT_EQ(seen->mesh(), whole);
  EXPECT_EQ(
      seen->placements(),
      (std::vector<Placement>{Placement::shard(0), Placement::replicate()}));
  EXPECT_EQ(seen->partition(0), Partition({4, 1}));
  EXPECT_EQ(seen->local_sizes(), spec->local_sizes());
  EXPECT_EQ(on_mesh(spec, part), spec);
  EXPECT_THROW(on_mesh(seen, part), c10::ValueError);
}

TEST(GroupOf, IsThatOfOneAxisOrOfAll) {
  Mesh::Options options;
  options.shape = {2, 1, 2};
  options.ranks = {0, 1, 2, 3};
  options.axis_groups = {"first", "second", "third"};
  options.group = "all";
  options.position = 0;
  const auto mesh = make_mesh(std::move(options));
  EXPECT_EQ(detail::group_of(*mesh, {2}), "third");
  EXPECT_EQ(detail::group_of(*mesh, {0, 1, 2}), "all");
  EXPECT_EQ(detail::group_of(*mesh, {0, 2}), std::nullopt);
}

} // namespace
} // namespace shardtensor
