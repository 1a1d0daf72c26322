#include "shardtensor/layout/plans/split_repeats.h"

#include <gtest/gtest.h>

#include "../support.h"

namespace shardtensor::detail {
namespace {

using namespace testing;

SpecPtr cut(const MeshPtr& mesh, int64_t size, const Partition& partition) {
  return make_spec(mesh, {size, 3}, {Placement::shard(0)}, {partition, {}});
}

/// Both layouts are those that were told, with the same local elements in the
/// same order, and no cut is repeated.
void check_split(const SpecPtr& from, const SpecPtr& to) {
  const auto split = split_repeats(from, to);
  ASSERT_TRUE(split) << *from << " -> " << *to;
  const auto whole = index_filled(from->sizes());
  for (const auto& [told, made] :
       {std::pair(from, split->from), {to, split->to}}) {
    ASSERT_TRUE(made->is_contiguous()) << *told << " -> " << *made;
    for (int64_t p = 0; p < from->mesh()->ranks(); ++p) {
      ASSERT_EQ(
          take(whole, rows_of(*told, p)).data,
          take({made->sizes(), whole.data}, rows_of(*made, p)).data)
          << *told << " -> " << *made;
    }
  }
  ASSERT_EQ(moved_elements(split->from, split->to), moved_elements(from, to));
}

TEST(SplitRepeats, AnyTwoLayoutsAreAFewStepsWithoutRepeats) {
  const auto mesh = mesh_of({2});
  const std::vector<Partition> cuts{
      Partition({2, 1}, 4),
      Partition({1, 2}, 4),
      Partition({0, 2}, 6),
      Partition({3, 3}, 2),
      Partition({1, 5}, 2),
      Partition({1, 3}, 3),
      Partition({6, 6}),
      Partition({7, 5}),
      Partition({0, 12})};
  for (const auto& before : cuts) {
    for (const auto& after : cuts) {
      auto from = cut(mesh, 12, before);
      const auto to = cut(mesh, 12, after);
      int steps = 1;
      std::vector<SpecPtr> left{to};
      while (!left.empty()) {
        if (!split_repeats(from, left.back())) {
          left.push_back(layout_between(from, left.back()));
          ASSERT_LE(++steps, 4) << *from << " -> " << *to;
        } else {
          check_split(from, left.back());
          from = left.back();
          left.pop_back();
        }
      }
    }
  }
}

TEST(SplitRepeats, OtherDimsAndPlacementsStay) {
  const auto mesh = mesh_of({2, 2, 2});
  const auto from = make_spec(
      mesh,
      {12, 4},
      {Placement::shard(0), Placement::shard(1), Placement::partial()},
      {Partition({2, 1}, 4), Partition({1, 3})});
  const auto to = make_spec(
      mesh,
      {12, 4},
      {Placement::replicate(), Placement::shard(1), Placement::shard(0)},
      {Partition({9, 3}), Partition({3, 1})});
  const auto split = split_repeats(from, to);
  ASSERT_TRUE(split);
  const std::vector<int64_t> sizes{1, 4, 3, 4};
  EXPECT_EQ(
      split->from,
      make_spec(
          mesh,
          sizes,
          {Placement::shard(2), Placement::shard(3), Placement::partial()},
          {{}, {}, Partition({2, 1}), Partition({1, 3})}));
  EXPECT_EQ(
      split->to,
      make_spec(
          mesh,
          sizes,
          {Placement::replicate(), Placement::shard(3), Placement::shard(1)},
          {{}, Partition({3, 1}), {}, Partition({3, 1})}));
}

TEST(SplitRepeats, APlanHasABoxForEachPeer) {
  const auto mesh = mesh_of({2});
  const int64_t rows = 30'000'000;
  const auto fine = cut(mesh, rows, Partition({2, 1}, rows / 3));
  const auto even = cut(mesh, rows, Partition({15'000'001, 14'999'999}));
  const auto between = layout_between(fine, even);
  EXPECT_EQ(moved_elements(between, even), 3);
  for (const auto& [from, to] : {std::pair(fine, between), {between, even}}) {
    const auto split = split_repeats(from, to);
    ASSERT_TRUE(split);
    EXPECT_LE(plan_redistribute(split->from, split->to, 0).sends.size(), 2);
  }
}

} // namespace
} // namespace shardtensor::detail
