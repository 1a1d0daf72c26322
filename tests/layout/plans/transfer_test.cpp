#include "shardtensor/layout/plans/transfer.h"

#include <gtest/gtest.h>

#include "../support.h"

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
    const std::vector<Placement>& choices,
    bool may_repeat) {
  std::mt19937 random(7);
  const MeshPtr mesh = mesh_of(shape);
  const auto all = combinations(mesh->axes(), choices);
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

// ---- every layout to every other --------------------------------------------

TEST(PlanRedistribute, MovesEveryLayoutToEveryOther) {
  for (const auto& shape : mesh_shapes()) {
    sweep(shape, {5, 4, 2}, kMovable, false);
  }
}

TEST(PlanRedistribute, MovesAllWaysToCutOneDim) {
  // All partitions of 4 rows over 3 ranks, empty pieces anywhere.
  std::mt19937 random(7);
  const MeshPtr mesh = mesh_of({3});
  std::vector<SpecPtr> specs;
  for (int64_t a = 0; a <= 4; ++a) {
    for (int64_t b = 0; a + b <= 4; ++b) {
      specs.push_back(make_spec(
          mesh, {4}, {Placement::shard(0)}, {Partition({a, b, 4 - a - b})}));
    }
  }
  for (const SpecPtr& from : specs) {
    for (const SpecPtr& to : specs) {
      check_redistribute(from, to, random);
    }
  }
}

TEST(PlanRedistribute, MovesRepeatedPartitions) {
  for (const auto& shape : mesh_shapes()) {
    sweep(shape, {6, 4}, kMovable, true);
  }
}

TEST(PlanRedistribute, MovesTensorsWithoutElements) {
  for (const auto& shape : mesh_shapes()) {
    sweep(shape, {0, 3}, kMovable, false);
  }
}

TEST(PlanRedistribute, MovesNumbers) {
  for (const auto& shape : mesh_shapes()) {
    sweep(shape, {}, {Placement::replicate(), Placement::partial()}, false);
  }
}

TEST(PlanRedistribute, LeavesAnyEqualPartialAsItIs) {
  std::mt19937 random(7);
  const MeshPtr mesh = mesh_of({2, 2});
  const Placement max = Placement::partial(Reduce::Max);
  check_redistribute(
      make_spec(mesh, {5, 4}, {max, Placement::shard(0)}),
      make_spec(mesh, {5, 4}, {max, Placement::shard(1)}),
      random);
}

// ---- how much moves ---------------------------------------------------------

/// The elements of `to` that their position does not hold in `from`.
int64_t missing_elements(const ShardSpec& from, const ShardSpec& to) {
  int64_t missing = 0;
  for (int64_t position = 0; position < from.mesh()->ranks(); ++position) {
    int64_t wanted = 1;
    int64_t held = 1;
    for (int64_t dim = 0; dim < from.dim(); ++dim) {
      const auto before = rows_of(from, dim, position);
      const auto after = rows_of(to, dim, position);
      wanted *= static_cast<int64_t>(after.size());
      held *= std::count_if(after.begin(), after.end(), [&](int64_t row) {
        return std::count(before.begin(), before.end(), row) == 1;
      });
    }
    missing += wanted - held;
  }
  return missing;
}

int64_t sent_elements(const std::vector<ExchangePlan>& plans) {
  int64_t elements = 0;
  for (const ExchangePlan& plan : plans) {
    for (const Transfer& transfer : plan.sends) {
      elements += transfer.src == transfer.dst ? 0 : numel(transfer.source);
    }
  }
  return elements;
}

TEST(PlanRedistribute, SendsWhatIsMissingOnceAndNothingElse) {
  std::mt19937 random(11);
  const std::vector<Placement> choices{
      Placement::shard(0), Placement::shard(1), Placement::replicate()};
  for (const auto& shape : mesh_shapes()) {
    const MeshPtr mesh = mesh_of(shape);
    for (const auto& before : combinations(mesh->axes(), choices)) {
      for (const auto& after : combinations(mesh->axes(), choices)) {
        const SpecPtr from = random_spec(random, mesh, {6, 4}, before, true);
        const SpecPtr to = random_spec(random, mesh, {6, 4}, after, true);
        SCOPED_TRACE(to_string(*from) + " -> " + to_string(*to));
        const int64_t missing = missing_elements(*from, *to);
        ASSERT_EQ(sent_elements(redistribute_plans(from, to)), missing);
        ASSERT_EQ(moved_elements(from, to), missing);
      }
    }
  }
}

TEST(MovedElements, CountsEveryTermOfASum) {
  const MeshPtr mesh = mesh_of({3});
  const SpecPtr terms = make_spec(mesh, {6, 4}, {Placement::partial()});
  const SpecPtr rows = make_spec(mesh, {6, 4}, {Placement::shard(0)});
  EXPECT_EQ(moved_elements(terms, rows), 2 * 24);
  EXPECT_EQ(moved_elements(terms, replicated(terms)), 3 * 2 * 24);
  EXPECT_EQ(moved_elements(terms, terms), 0);
}

TEST(MovedElements, NothingMovesWhereATermIsAddedOrAverage) {
  const MeshPtr mesh = mesh_of({3});
  const SpecPtr rows = make_spec(mesh, {6, 4}, {Placement::shard(0)});
  const SpecPtr average =
      make_spec(mesh, {6, 4}, {Placement::partial(Reduce::Avg)});
  const SpecPtr terms = make_spec(mesh, {6, 4}, {Placement::partial()});
  EXPECT_EQ(moved_elements(rows, terms), 0);
  EXPECT_EQ(moved_elements(replicated(rows), terms), 0);
  EXPECT_EQ(moved_elements(average, rows), 2 * 24);
}

TEST(MovedElements, LooksAtNoRepetition) {
  const MeshPtr mesh = mesh_of({2});
  const int64_t repeats = int64_t{1} << 40;
  const SpecPtr fine = make_spec(
      mesh, {3 * repeats}, {Placement::shard(0)}, {Partition({2, 1}, repeats)});
  const SpecPtr even = make_spec(mesh, {3 * repeats}, {Placement::shard(0)});
  EXPECT_EQ(moved_elements(fine, even), 3 * repeats / 2);
  EXPECT_EQ(moved_elements(fine, replicated(fine)), 3 * repeats);
}

TEST(PlanRedistribute, RepeatedPartitionsThatStayMoveAsOneBox) {
  const MeshPtr mesh = mesh_of({2, 2});
  const Partition merged = Partition({3, 2}).repeated(4);
  const SpecPtr from = make_spec(
      mesh, {20, 4}, {Placement::shard(0), Placement::shard(1)}, {merged, {}});
  const SpecPtr to = without_shard(from, 1);
  const ExchangePlan plan = plan_redistribute(from, to, 0);
  EXPECT_EQ(
      plan.receives,
      (std::vector<Transfer>{
          {0, 0, {{0, 12}, {0, 2}}, {{0, 12}, {0, 2}}},
          {1, 0, {{0, 12}, {0, 2}}, {{0, 12}, {2, 4}}}}));
  EXPECT_EQ(plan.axis, 1);
  EXPECT_EQ(plan.largest_message, 24);
}

// ---- which group talks ------------------------------------------------------

struct AxisCase {
  std::vector<Placement> from;
  std::vector<Placement> to;
  int64_t axis;
  int64_t largest_message;
};

TEST(PlanRedistribute, TalksAlongOneAxisWhereItCan) {
  const Placement rows = Placement::shard(0);
  const Placement columns = Placement::shard(1);
  const Placement whole = Placement::replicate();
  const Placement terms = Placement::partial();
  const MeshPtr mesh = mesh_of({2, 2});
  const std::vector<AxisCase> cases{
      {{rows, columns}, {rows, whole}, 1, 16},
      {{rows, columns}, {whole, columns}, 0, 16},
      {{rows, rows}, {rows, whole}, 1, 16}, // nested: only the inner cut goes
      {{rows, rows}, {whole, rows}, -1, 16}, // row blocks change hands
      {{rows, whole}, {columns, whole}, 0, 16},
      {{rows, whole}, {whole, rows}, 0, 32},
      {{whole, terms}, {whole, rows}, 1, 32},
      {{terms, terms}, {rows, terms}, 0, 32},
      {{terms, terms}, {whole, whole}, -1, 64},
      {{rows, columns}, {whole, whole}, -1, 16},
      {{rows, columns}, {columns, rows}, -1, 16},
      {{rows, terms}, {rows, terms}, -1, 0}, // nothing moves
      {{whole, whole}, {rows, columns}, -1, 0},
  };
  for (const AxisCase& each : cases) {
    const SpecPtr from = make_spec(mesh, {8, 8}, each.from);
    const SpecPtr to = make_spec(mesh, {8, 8}, each.to);
    SCOPED_TRACE(to_string(*from) + " -> " + to_string(*to));
    for (const ExchangePlan& plan : redistribute_plans(from, to)) {
      EXPECT_EQ(plan.axis, each.axis);
      EXPECT_EQ(plan.largest_message, each.largest_message);
    }
  }
}

TEST(PlanRedistribute, OneRankThatKeepsAllStillJoinsItsGroup) {
  const MeshPtr mesh = mesh_of({3});
  const SpecPtr from =
      make_spec(mesh, {6}, {Placement::shard(0)}, {Partition({2, 2, 2})});
  const SpecPtr to = with_partition(from, 0, Partition({2, 3, 1}));
  const ExchangePlan plan = plan_redistribute(from, to, 0);
  EXPECT_EQ(plan.sends.size(), 1);
  EXPECT_EQ(plan.sends.front().dst, 0);
  EXPECT_EQ(plan.axis, 0);
  EXPECT_EQ(plan.largest_message, 1);
}

// ---- refusals ---------------------------------------------------------------

TEST(PlanRedistribute, RefusesAnotherTensor) {
  const SpecPtr spec = make_spec(mesh_of({2}), {4}, {Placement::shard(0)});
  const SpecPtr elsewhere = make_spec(mesh_of({3}), {4}, {Placement()});
  const SpecPtr longer = with_sizes(spec, {5});
  const std::string meshes =
      "redistribute: from Mesh(2) to Mesh(3), expected the same mesh";
  const std::string sizes =
      "redistribute: from sizes (4) to (5), expected the same";
  expect_error<c10::ValueError>(
      [&] { plan_redistribute(spec, elsewhere, 0); }, meshes);
  expect_error<c10::ValueError>(
      [&] { plan_redistribute(spec, longer, 0); }, sizes);
  expect_error<c10::ValueError>(
      [&] { moved_elements(spec, elsewhere); }, meshes);
  expect_error<c10::ValueError>([&] { moved_elements(spec, longer); }, sizes);
}

TEST(PlanRedistribute, RefusesPartialsThatNoExchangeMakes) {
  const MeshPtr mesh = mesh_of({2});
  const SpecPtr rows = make_spec(mesh, {4}, {Placement::shard(0)});
  const SpecPtr terms = make_spec(mesh, {4}, {Placement::partial()});
  const SpecPtr maxima =
      make_spec(mesh, {4}, {Placement::partial(Reduce::Max)});
  expect_error<c10::ValueError>(
      [&] { plan_redistribute(rows, terms, 0); },
      "plan_redistribute: Shard(dim=0) to Partial(sum) on axis 0, expected the "
      "same Partial on both sides");
  expect_error<c10::ValueError>(
      [&] { plan_redistribute(maxima, terms, 0); },
      "plan_redistribute: Partial(max) to Partial(sum) on axis 0, expected the "
      "same Partial on both sides");
  expect_error<c10::NotImplementedError>(
      [&] { plan_redistribute(maxima, rows, 0); },
      "plan_redistribute: Partial(max) to Shard(dim=0) on axis 0, expected "
      "Partial(sum): an exchange only sums");
}

TEST(PlanRedistribute, RefusesPositionsOutsideTheMesh) {
  const SpecPtr spec = make_spec(mesh_of({2}), {4}, {Placement::shard(0)});
  for (int64_t position : {-1, 2}) {
    expect_error<c10::IndexError>(
        [&] { plan_redistribute(spec, spec, position); },
        "plan_redistribute: position " + std::to_string(position) +
            ", expected 0 <= position < 2");
  }
}

} // namespace
} // namespace shardtensor
