#include "shardtensor/rules/attention/layouts.h"

#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

MeshPtr grid_of(int64_t first, int64_t last) {
  Mesh::Options options;
  options.shape = {first, last};
  for (int64_t rank = 0; rank < first * last; ++rank) {
    options.ranks.push_back(rank);
  }
  options.group = "all";
  options.axis_groups = {"first", "last"};
  options.position = 5;
  return make_mesh(std::move(options));
}

// 65,536 rows and 4 heads on 4 x 4 ranks.
TEST(PlanAttention, ChoosesHeadsAlongTheLastAxisAndARingAlongTheOther) {
  const auto rows = make_spec(
      grid_of(4, 4),
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

} // namespace
} // namespace shardtensor::detail
