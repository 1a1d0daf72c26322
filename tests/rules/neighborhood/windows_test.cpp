#include "shardtensor/rules/neighborhood/windows.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

NeighborhoodDim dim_of(
    int64_t length,
    int64_t kernel,
    int64_t dilation = 1,
    int64_t stride = 1,
    bool causal = false) {
  return {length, kernel, dilation, stride, causal, {0, length}};
}

std::vector<int64_t> rows_of(const NeighborhoodDim& dim, int64_t query) {
  const auto window = key_window(dim, query);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < window.count; ++i) {
    rows.push_back(window.first + i * dim.dilation);
  }
  return rows;
}

using Keys = std::vector<int64_t>;

TEST(KeyWindow, MovesInwardsAtTheEnds) {
  const auto dim = dim_of(8, 3);
  EXPECT_EQ(rows_of(dim, 0), (Keys{0, 1, 2}));
  EXPECT_EQ(rows_of(dim, 3), (Keys{2, 3, 4}));
  EXPECT_EQ(rows_of(dim, 7), (Keys{5, 6, 7}));
  EXPECT_EQ(rows_of(dim_of(8, 4), 3), (Keys{1, 2, 3, 4}));
}

TEST(KeyWindow, EndsWithACausalQuery) {
  const auto dim = dim_of(8, 3, 1, 1, true);
  EXPECT_EQ(rows_of(dim, 0), (Keys{0}));
  EXPECT_EQ(rows_of(dim, 3), (Keys{1, 2, 3}));
  EXPECT_EQ(rows_of(dim_of(8, 3, 1, 2, true), 2), (Keys{1, 2}));
}

TEST(KeyWindow, StaysInTheRowsOfADilatedSequence) {
  const auto dim = dim_of(8, 3, 2);
  EXPECT_EQ(rows_of(dim, 0), (Keys{0, 2, 4}));
  EXPECT_EQ(rows_of(dim, 7), (Keys{3, 5, 7}));
}

TEST(KeyWindow, IsSharedByTheQueriesOfAStride) {
  const auto dim = dim_of(9, 3, 1, 3);
  for (int64_t query = 3; query < 6; ++query) {
    EXPECT_EQ(rows_of(dim, query), (Keys{3, 4, 5}));
  }
}

template <class Visit>
void for_all_dims(const Visit& visit) {
  for (int64_t length : {4, 7, 12}) {
    for (int64_t kernel = 2; kernel <= length; ++kernel) {
      for (int64_t dilation = 1; dilation * kernel <= length; ++dilation) {
        for (int64_t stride = 1; stride <= kernel; ++stride) {
          visit(dim_of(length, kernel, dilation, stride, false));
          visit(dim_of(length, kernel, dilation, stride, true));
        }
      }
    }
  }
}

TEST(KeyRows, AreThoseOfTheWindowsAndNoOthers) {
  for_all_dims([](NeighborhoodDim dim) {
    for (int64_t begin = 0; begin <= dim.length; ++begin) {
      for (int64_t end = std::max<int64_t>(begin, 1); end < dim.length; ++end) {
        dim.queries = {begin, end};
        std::set<int64_t> expected;
        for (int64_t query = begin; query < end; ++query) {
          const auto rows = rows_of(dim, query);
          expected.insert(rows.begin(), rows.end());
        }
        ASSERT_EQ(key_rows(dim), Keys(expected.begin(), expected.end()));
      }
    }
  });
}

TEST(LocalWindows, SayWhereTheKeysOfAPieceAre) {
  for_all_dims([](NeighborhoodDim dim) {
    dim.queries = {1, dim.length - 1};
    const auto held = key_rows(dim);
    const LocalWindows local(dim);
    ASSERT_EQ(local.queries(), dim.length - 2);
    ASSERT_EQ(local.keys(), static_cast<int64_t>(held.size()));
    for (int64_t query = 0; query < local.queries(); ++query) {
      Keys rows;
      for (int64_t i = 0; i < local.count(query); ++i) {
        rows.push_back(held[local.key(query, i)]);
      }
      ASSERT_EQ(rows, rows_of(dim, query + 1));
    }
  });
}

TEST(SplitByOwner, NamesEachQueryOnceAndTheRowsItSees) {
  for_all_dims([](NeighborhoodDim dim) {
    dim.queries = {1, dim.length - 1};
    const auto others = rows_of_others(dim);
    Keys queries;
    for (const auto& part : split_by_owner(dim)) {
      Keys seen;
      for (const int64_t place : part.before) {
        seen.push_back(others[place]);
      }
      for (const int64_t row : part.own) {
        seen.push_back(row + dim.queries.begin);
      }
      for (const int64_t place : part.after) {
        seen.push_back(others[place]);
      }
      ASSERT_EQ(seen, key_rows(part.dim));
      for (auto i = part.dim.queries.begin; i < part.dim.queries.end; ++i) {
        queries.push_back(i);
      }
    }
    std::sort(queries.begin(), queries.end());
    Keys expected(dim.queries.extent());
    std::iota(expected.begin(), expected.end(), 1);
    ASSERT_EQ(queries, expected);
  });
  auto dim = dim_of(12, 3);
  dim.queries = {4, 8};
  const auto parts = split_by_owner(dim);
  ASSERT_EQ(parts.size(), 3);
  EXPECT_EQ(parts[0].dim.queries, (Interval{5, 7}));
  EXPECT_EQ(parts[1].before, Keys{0});
  EXPECT_EQ(parts[2].after, Keys{1});
}

TEST(LocalWindows, OfNoQueriesHoldNoKeys) {
  auto dim = dim_of(8, 3);
  dim.queries = {5, 5};
  const LocalWindows local(dim);
  EXPECT_EQ(local.queries(), 0);
  EXPECT_EQ(local.keys(), 0);
}

TEST(NeighborhoodCode, BringsTheDimsBack) {
  std::vector<NeighborhoodDim> dims{dim_of(9, 3, 2, 1, true), dim_of(4, 2)};
  dims[0].queries = {3, 7};
  EXPECT_EQ(decode_neighborhood(encode(dims)), dims);
}

} // namespace
} // namespace shardtensor::detail
