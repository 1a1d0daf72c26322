#include "shardtensor/rules/attention/cost.h"

#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

AttentionSizes even(int64_t rows, int64_t heads, int64_t ranks) {
  AttentionSizes sizes;
  sizes.ranks = ranks;
  sizes.heads = sizes.key_heads = heads;
  sizes.queries = sizes.keys = rows;
  sizes.most_queries = sizes.most_keys = (rows + ranks - 1) / ranks;
  sizes.features = sizes.value_features = 64;
  return sizes;
}

TEST(ChooseTransport, GathersShortSequencesOnManyRanks) {
  EXPECT_EQ(choose_transport(even(64, 8, 8)), AttentionTransport::AllGather);
}

TEST(ChooseTransport, PassesBlocksOfLongSequences) {
  EXPECT_EQ(choose_transport(even(65536, 1, 4)), AttentionTransport::Ring);
}

TEST(ChooseTransport, CutsHeadsWithAndWithoutACausalMask) {
  auto sizes = even(4096, 8, 2);
  EXPECT_EQ(choose_transport(sizes), AttentionTransport::AllToAll);
  sizes.causal = true;
  EXPECT_EQ(choose_transport(sizes), AttentionTransport::AllToAll);
  sizes.heads = sizes.key_heads = 3; // 2 and 1
  EXPECT_NE(choose_transport(sizes), AttentionTransport::AllToAll);
}

TEST(ChooseTransport, DoesNotGatherManyHeads) {
  EXPECT_NE(choose_transport(even(2048, 8, 3)), AttentionTransport::AllGather);
  EXPECT_EQ(choose_transport(even(2048, 1, 3)), AttentionTransport::AllGather);
}

TEST(ChooseTransport, CutsHeadsOfFewQueries) {
  auto sizes = even(2048, 4, 8);
  EXPECT_EQ(choose_transport(sizes), AttentionTransport::AllGather);
  sizes = even(2048, 8, 2);
  sizes.queries = 256;
  sizes.most_queries = 128;
  EXPECT_EQ(choose_transport(sizes), AttentionTransport::AllToAll);
}

TEST(ChooseTransport, CutsHeadsWhereOneRankHasAllRows) {
  auto sizes = even(8191, 8, 2);
  sizes.most_queries = sizes.most_keys = 8190;
  EXPECT_EQ(choose_transport(sizes), AttentionTransport::AllToAll);
  sizes.has_mask_rows = true;
  EXPECT_NE(choose_transport(sizes), AttentionTransport::AllToAll);
}

TEST(ChooseTransport, CutsTheHeadsThatThereAreAlongTheLastAxis) {
  auto sizes = even(65536, 4, 16);
  EXPECT_NE(choose_transport(sizes), AttentionTransport::Grid);
  sizes.last_ranks = 4;
  EXPECT_EQ(choose_transport(sizes), AttentionTransport::Grid);
  sizes.has_mask_rows = true;
  EXPECT_NE(choose_transport(sizes), AttentionTransport::Grid);
}

} // namespace
} // namespace shardtensor::detail
