#include "shardtensor/layout/transfer.h"

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor {
namespace {

using namespace testing;

const std::vector<Placement> kMovable{
    Placement::shard(0),
    Placement::shard(1),
    Placement::replicate(),
    Placement::partial()};

/// Position's term of the sum that a Partial stands for: the global values
/// times this.
double term(const ShardSpec& spec, int64_t position) {
  double factor = 1;
  for (int64_t axis : spec.partial_axes()) {
    factor *= static_cast<double>(spec.mesh()->coordinate(position, axis) + 1);
  }
  return factor;
}

/// What position holds after the axes that only `from` has Partial are summed.
double summed_term(
    const ShardSpec& from,
    const ShardSpec& to,
    int64_t position) {
  const Mesh& mesh = *from.mesh();
  double factor = term(to, position);
  for (int64_t axis : from.partial_axes()) {
    if (!to.placement(axis).is_partial()) {
      const double ranks = static_cast<double>(mesh.ranks(axis));
      factor *= ranks * (ranks + 1) / 2; // 1 + 2 + ... + ranks
    }
  }
  return factor;
}

std::vector<ExchangePlan> redistribute_plans(
    const SpecPtr& from,
    const SpecPtr& to) {
  return plans_of(from->mesh()->ranks(), [&](int64_t position) {
    return plan_redistribute(from, to, position);
  });
}

void check_redistribute(
    const SpecPtr& from,
    const SpecPtr& to,
    std::mt19937& random) {
  SCOPED_TRACE(to_string(*from) + " -> " + to_string(*to));
  const Values global = index_filled(from->sizes());
  const Mesh& mesh = *from->mesh();
  std::vector<Values> locals;
  std::vector<Values> expected;
  for (int64_t position = 0; position < mesh.ranks(); ++position) {
    locals.push_back(
        take(global, rows_of(*from, position), term(*from, position)));
    expected.push_back(take(
        global, rows_of(*to, position), summed_term(*from, *to, position)));
  }
  const std::vector<ExchangePlan> plans = redistribute_plans(from, to);
  ASSERT_EQ(apply(mesh, plans, locals), expected);
  check_adjoint(mesh, plans, random);
}

bool has_a_meaning(
    const std::vector<Placement>& from,
    const std::vector<Placement>& to) {
  for (size_t axis = 0; axis < to.size(); ++axis) {
    if (to[axis].is_partial() && !from[axis].is_partial()) {
      return false;
    }
  }
  return true;
}

void sweep(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& sizes,
    bool may_repeat) {
  std::mt19937 random(7);
  const MeshPtr mesh = mesh_of(shape);
  const auto all = combinations(mesh->axes(), kMovable);
  for (const auto& before : all) {
    for (const auto& after : all) {
      if (has_a_meaning(before, after)) {
        check_redistribute(
            random_spec(random, mesh, sizes, before, may_repeat),
            random_spec(random, mesh, sizes, after, may_repeat),
            random);
      }
    }
  }
}

TEST(PlanRedistribute, MovesEveryLayoutToEveryOther) {
  for (const auto& shape : mesh_shapes()) {
    sweep(shape, {5, 4, 2}, false);
  }
}

TEST(PlanRedistribute, MovesRepeatedPartitions) {
  for (const auto& shape : mesh_shapes()) {
    sweep(shape, {6, 4}, true);
  }
}

TEST(PlanGatherRows, GivesEachRankItsHalo) {
  const SpecPtr spec = make_spec(mesh_of({2}), {6, 2}, {Placement::shard(0)});
  // One ghost row on each side; outside the domain there is zero.
  const auto rows = [](int64_t, int64_t position) {
    return position == 0 ? RowSource{-1, 0, 1, 2, 3}
                         : RowSource{2, 3, 4, 5, -1};
  };
  const ExchangePlan plan = plan_gather_rows(spec, {0}, rows, 0);
  EXPECT_EQ(plan.source_sizes, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(plan.target_sizes, (std::vector<int64_t>{5, 2}));
  EXPECT_EQ(
      plan.sends,
      (std::vector<Transfer>{
          {0, 0, {{0, 3}, {0, 2}}, {{1, 4}, {0, 2}}},
          {0, 1, {{2, 3}, {0, 2}}, {{0, 1}, {0, 2}}}}));
  EXPECT_EQ(
      plan.receives,
      (std::vector<Transfer>{
          {0, 0, {{0, 3}, {0, 2}}, {{1, 4}, {0, 2}}},
          {1, 0, {{0, 1}, {0, 2}}, {{4, 5}, {0, 2}}}}));
  EXPECT_FALSE(plan.covers);
  EXPECT_EQ(plan.axis, 0);
  EXPECT_EQ(plan.largest_message, 2);
}

} // namespace
} // namespace shardtensor
