#include "shardtensor/layout/placement.h"

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor {
namespace {

using namespace testing;

TEST(Reduce, HasPyTorchsNames) {
  const std::vector<std::pair<Reduce, std::string>> names{
      {Reduce::Sum, "sum"},
      {Reduce::Avg, "avg"},
      {Reduce::Prod, "product"},
      {Reduce::Max, "max"},
      {Reduce::Min, "min"}};
  for (const auto& [reduce, name] : names) {
    EXPECT_EQ(to_string(reduce), name);
    EXPECT_EQ(parse_reduce(name), reduce);
  }
  expect_error<c10::ValueError>(
      [] { parse_reduce("mean"); },
      "reduction: expected 'sum', 'avg', 'product', 'max' or 'min', got 'mean'");
}

TEST(Placement, Prints) {
  EXPECT_EQ(to_string(Placement::shard(2)), "Shard(dim=2)");
  EXPECT_EQ(to_string(Placement::replicate()), "Replicate()");
  EXPECT_EQ(to_string(Placement::partial()), "Partial(sum)");
  EXPECT_EQ(printed(Placement::partial(Reduce::Avg)), "Partial(avg)");
}

TEST(Placement, KnowsItsKind) {
  EXPECT_TRUE(Placement::shard(2).is_shard());
  EXPECT_TRUE(Placement::shard(2).is_shard(2));
  EXPECT_FALSE(Placement::shard(2).is_shard(1));
  EXPECT_FALSE(Placement::replicate().is_shard(-1));
  EXPECT_TRUE(Placement().is_replicate());
  EXPECT_TRUE(Placement::partial().is_partial());
  EXPECT_NE(Placement::partial(), Placement::partial(Reduce::Max));
  EXPECT_NE(Placement::shard(0), Placement::shard(1));
}

} // namespace
} // namespace shardtensor
