#include "shardtensor/rules/attention/layouts.h"

#include <numeric>

#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

MeshPtr grid_of(std::vector<int64_t> shape, std::vector<std::string> groups) {
  Mesh::Options options;
  options.shape = std::move(shape);
  options.ranks.resize(c10::multiply_integers(options.shape));
  std::iota(options.ranks.begin(), options.ranks.end(), 0);
  options.group = "all";
  options.axis_groups = std::move(groups);
  options.position = 5;
  return make_mesh(std::move(options));
}

// 65,536 rows and 4 heads on 4 x 4 ranks.
TEST(PlanAttention, ChoosesHeadsAlongTheLastAxisAndARingAlongTheOther) {
  const auto rows = make_spec(
      grid_of({4, 4}, {"first", "last"}),
      {1, 4, 65536, 64},
      {Placement::shard(2), Placement::shard(2)});
  const auto plan = [&](const SpecPtr& mask) {
    return plan_attention(
        rows, rows, rows, mask, false, 4, AttentionTransport::Auto);
  };
  const auto layouts = plan(nullptr);
  EXPECT_EQ(
      layouts.query->placements(),
      (std::vector<Placement>{Placement::shard(2), Placement::shard(1)}));
  EXPECT_EQ(layouts.key->placements(), layouts.query->placements());
  EXPECT_EQ(layouts.work.meeting, Meeting::Ring);
  EXPECT_EQ(layouts.work.group, "first");
  EXPECT_EQ(layouts.work.keys.size(), 4);
  EXPECT_EQ(layouts.result->placements(), rows->placements());
  // Rows of a mask would be gathered.
  const auto mask = with_sizes(rows, {1, 1, 65536, 65536});
  EXPECT_EQ(plan(mask).query->placements(), rows->placements());
}

TEST(PlanAttention, HasNoGridOfThreeAxes) {
  const auto rows = make_spec(
      grid_of({4, 2, 2}, {"first", "middle", "last"}),
      {1, 4, 65536, 64},
      std::vector<Placement>(3, Placement::shard(2)));
  for (const auto transport :
       {AttentionTransport::Grid, AttentionTransport::Auto}) {
    const auto layouts =
        plan_attention(rows, rows, rows, nullptr, false, 4, transport);
    EXPECT_EQ(layouts.query, rows);
    EXPECT_EQ(layouts.work.meeting, Meeting::Ring);
    EXPECT_EQ(layouts.work.group, "all");
    EXPECT_EQ(layouts.work.rank, 5);
    EXPECT_EQ(layouts.work.keys.size(), 16);
  }
}

} // namespace
} // namespace shardtensor::detail
