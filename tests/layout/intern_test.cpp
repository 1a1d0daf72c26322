#include "shardtensor/layout/intern.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

using Table = InternTable<std::string>;

Table::Pointer intern(Table& table, const std::string& word, size_t hash) {
  return table.get(
      hash,
      [&](const std::string& other) { return other == word; },
      [&] { return std::make_unique<const std::string>(word); });
}

TEST(InternTable, OnePointerForEachValue) {
  Table table;
  const auto first = intern(table, "conv", 1);
  EXPECT_EQ(first, intern(table, "conv", 1));
  EXPECT_EQ(table.size(), 1);
}

TEST(InternTable, EqualHashesDoNotConfuseValues) {
  Table table;
  const auto conv = intern(table, "conv", 1);
  const auto norm = intern(table, "norm", 1);
  EXPECT_NE(conv, norm);
  EXPECT_EQ(norm, intern(table, "norm", 1));
  EXPECT_EQ(table.size(), 2);
}

TEST(InternTable, ForgetsWhatNobodyHolds) {
  Table table;
  auto conv = intern(table, "conv", 1);
  const auto norm = intern(table, "norm", 1);
  conv.reset();
  EXPECT_EQ(table.size(), 1);
  EXPECT_EQ(*intern(table, "conv", 1), "conv");
  EXPECT_EQ(norm, intern(table, "norm", 1));
  EXPECT_EQ(table.size(), 1);
}

TEST(InternTable, ThreadsThatMakeAndDropAgree) {
  Table table;
  const auto kept = intern(table, "0", 0);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t thread = 0; thread < wrong.size(); ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 20000; ++i) {
        const std::string word = std::to_string(i % 3);
        const auto once = intern(table, word, 0);
        const auto twice = intern(table, word, 0);
        wrong[thread] += once != twice || *once != word;
        wrong[thread] += word == "0" && once != kept;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
  EXPECT_EQ(table.size(), 1);
}

} // namespace
} // namespace shardtensor::detail
