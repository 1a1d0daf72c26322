#include "shardtensor/rules/attention/rows.h"

#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

/// Global rows, one by one.
std::vector<int64_t> listed(const Rows& rows) {
  std::vector<int64_t> result;
  for (const auto& interval : rows) {
    for (int64_t row = interval.begin; row < interval.end; ++row) {
      result.push_back(row);
    }
  }
  return result;
}

/// How often each query meets each key.
std::vector<int64_t> met(const Rows& queries, const Rows& keys, bool causal) {
  const int64_t columns = extent(keys);
  std::vector<int64_t> count(extent(queries) * columns, 0);
  for (const auto& p : plan_products(queries, keys, causal)) {
    EXPECT_FALSE(p.queries.empty() || p.keys.empty());
    EXPECT_EQ(p.keys.extent(), p.columns.extent());
    for (int64_t q = 0; q < p.queries.extent(); ++q) {
      for (int64_t k = 0; k < p.keys.extent(); ++k) {
        EXPECT_EQ(listed(keys)[p.keys.begin + k], p.columns.begin + k);
        if (!p.causal || k <= q) {
          ++count[(p.queries.begin + q) * columns + p.keys.begin + k];
        }
      }
    }
  }
  return count;
}

std::vector<int64_t> expected(
    const Rows& queries,
    const Rows& keys,
    bool causal) {
  std::vector<int64_t> count;
  for (const int64_t q : listed(queries)) {
    for (const int64_t k : listed(keys)) {
      count.push_back(!causal || k <= q);
    }
  }
  return count;
}

TEST(PlanProducts, MeetsEachKeyThatAQuerySeesOnce) {
  const std::vector<Rows> all{
      {{0, 5}},
      {{2, 6}},
      {{4, 8}},
      {{7, 7}},
      {{0, 2}, {6, 8}},
      {{2, 4}, {4, 6}},
      {{0, 0}, {3, 9}},
  };
  for (const auto& queries : all) {
    for (const auto& keys : all) {
      for (const bool causal : {false, true}) {
        EXPECT_EQ(met(queries, keys, causal), expected(queries, keys, causal));
      }
    }
  }
}

TEST(PlanProducts, SplitsABlockAtTheDiagonal) {
  const std::vector<Product> products{
      {{0, 4}, {0, 2}, {2, 4}, {4, 8}, false},
      {{0, 4}, {2, 4}, {4, 6}, {4, 8}, true}};
  EXPECT_EQ(plan_products({{4, 8}}, {{2, 6}}, true), products);
}

TEST(Zigzag, SharesTheWorkOfACausalMask) {
  EXPECT_EQ(
      zigzag(8, 2), (std::vector<Rows>{{{0, 2}, {6, 8}}, {{2, 4}, {4, 6}}}));
  for (const int64_t ranks : {1, 2, 3, 5}) {
    const auto rows = zigzag(24 * ranks, ranks);
    for (const auto& queries : rows) {
      for (const auto& keys : rows) {
        if (queries != keys) {
          int64_t work = 0;
          for (const int64_t seen : expected(queries, keys, true)) {
            work += seen;
          }
          EXPECT_EQ(work, 24 * 24 / 2);
        }
      }
    }
  }
}

TEST(PlanRows, SendsWhatTheOtherTakes) {
  const std::vector<Rows> from{{{0, 4}}, {{4, 4}}, {{4, 7}}};
  for (const auto& to : {zigzag(7, 3), std::vector<Rows>(3, Rows{{0, 7}})}) {
    for (int64_t src = 0; src < 3; ++src) {
      for (int64_t dst = 0; dst < 3; ++dst) {
        const auto sends =
            plan_rows({2, extent(from[src])}, 1, from, to, src).sends;
        const auto receives =
            plan_rows({2, extent(from[dst])}, 1, from, to, dst).receives;
        std::vector<Transfer> sent;
        std::vector<Transfer> received;
        for (const auto& t : sends) {
          if (t.dst == dst) {
            sent.push_back(t);
          }
        }
        for (const auto& t : receives) {
          if (t.src == src) {
            received.push_back(t);
          }
        }
        EXPECT_EQ(sent, received);
        for (const auto& t : sent) {
          for (int64_t i = 0; i < t.source[1].extent(); ++i) {
            EXPECT_EQ(
                listed(from[src])[t.source[1].begin + i],
                listed(to[dst])[t.target[1].begin + i]);
          }
        }
      }
    }
  }
}

} // namespace
} // namespace shardtensor::detail
