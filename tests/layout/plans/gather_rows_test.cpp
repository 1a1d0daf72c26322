#include <gtest/gtest.h>

#include "shardtensor/layout/plans/transfer.h"

#include "../support.h"

namespace shardtensor {
namespace {

using namespace testing;

using Rows = std::function<RowSource(int64_t dim, int64_t position)>;

const std::vector<Placement> kPlacements{
    Placement::shard(0),
    Placement::shard(1),
    Placement::replicate(),
    Placement::partial()};

std::vector<ExchangePlan> gather_plans(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const Rows& rows) {
  return plans_of(spec->mesh()->ranks(), [&](int64_t position) {
    return plan_gather_rows(spec, dims, rows, position);
  });
}

std::vector<int64_t> listed(const RowSource& source) {
  std::vector<int64_t> rows;
  for (const auto& [begin, extent] : source.runs()) {
    for (int64_t i = 0; i < extent; ++i) {
      rows.push_back(begin < 0 ? -1 : begin + i);
    }
  }
  return rows;
}

/// Every position holds the rows it named, and its own rows of other dims.
void check_gather(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const Rows& rows,
    std::mt19937& random) {
  SCOPED_TRACE(to_string(*spec));
  const Mesh& mesh = *spec->mesh();
  const Values global = index_filled(spec->sizes());
  std::vector<Values> locals;
  std::vector<Values> expected;
  for (int64_t position = 0; position < mesh.ranks(); ++position) {
    auto wanted = rows_of(*spec, position);
    locals.push_back(take(global, wanted));
    for (int64_t dim : dims) {
      wanted[dim] = listed(rows(dim, position));
    }
    expected.push_back(take(global, wanted));
  }
  const std::vector<ExchangePlan> plans = gather_plans(spec, dims, rows);
  ASSERT_EQ(apply(mesh, plans, locals), expected);
  ASSERT_EQ(plans.front().largest_message, largest_message(plans));
  check_adjoint(mesh, plans, random);
}

// ---- halos ------------------------------------------------------------------

enum class Boundary { Zeros, Periodic, Reflect, Replicate };

const std::vector<Boundary> kBoundaries{
    Boundary::Zeros,
    Boundary::Periodic,
    Boundary::Reflect,
    Boundary::Replicate};

/// The row that stands for one outside [0, extent).
int64_t inside(int64_t row, int64_t extent, Boundary boundary) {
  const auto wrapped = [](int64_t value, int64_t period) {
    return (value % period + period) % period;
  };
  switch (boundary) {
    case Boundary::Zeros:
      return row < 0 || row >= extent ? -1 : row;
    case Boundary::Periodic:
      return wrapped(row, extent);
    case Boundary::Reflect: {
      const int64_t folded = wrapped(row, std::max<int64_t>(1, 2 * extent - 2));
      return std::min(folded, 2 * extent - 2 - folded);
    }
    case Boundary::Replicate:
      return std::clamp<int64_t>(row, 0, extent - 1);
  }
  return -1;
}

/// A position's rows with `before` and `after` more at their ends.
Rows halo(
    const SpecPtr& spec,
    int64_t before,
    int64_t after,
    Boundary boundary) {
  return [=](int64_t dim, int64_t position) {
    const Interval own = spec->interval(dim, position);
    RowSource rows;
    for (int64_t row = own.begin - before; row < own.end + after; ++row) {
      rows.push_back(inside(row, spec->size(dim), boundary));
    }
    return rows;
  };
}

TEST(PlanGatherRows, GivesEveryHaloOnEveryMesh) {
  std::mt19937 random(3);
  // No halo, one side only, and one wider than any shard.
  const std::vector<std::pair<int64_t, int64_t>> widths{
      {0, 0}, {1, 1}, {0, 2}, {6, 1}};
  const std::vector<std::vector<int64_t>> some_dims{{0}, {1}, {0, 1}};
  for (const auto& shape : mesh_shapes()) {
    const MeshPtr mesh = mesh_of(shape);
    for (const auto& placements : combinations(mesh->axes(), kPlacements)) {
      for (const Boundary boundary : kBoundaries) {
        const auto [before, after] = widths[random() % widths.size()];
        const auto& dims = some_dims[random() % some_dims.size()];
        const SpecPtr spec = random_spec(random, mesh, {5, 4}, placements);
        check_gather(spec, dims, halo(spec, before, after, boundary), random);
      }
    }
  }
}

TEST(PlanGatherRows, GivesEveryWidthOnALine) {
  std::mt19937 random(3);
  const MeshPtr mesh = mesh_of({3});
  const std::vector<Partition> partitions{
      Partition({2, 2, 1}),
      Partition({0, 4, 1}),
      Partition({5, 0, 0}),
      Partition({1, 0, 4})};
  for (const Partition& partition : partitions) {
    const SpecPtr spec =
        make_spec(mesh, {5}, {Placement::shard(0)}, {partition});
    for (const Boundary boundary : kBoundaries) {
      for (int64_t before = 0; before < 8; ++before) {
        for (int64_t after = 0; after < 8; ++after) {
          check_gather(spec, {0}, halo(spec, before, after, boundary), random);
        }
      }
    }
  }
}

TEST(PlanGatherRows, GivesACornerInOneMessage) {
  const SpecPtr spec = make_spec(
      mesh_of({2, 2}), {4, 6}, {Placement::shard(0), Placement::shard(1)});
  const ExchangePlan plan =
      plan_gather_rows(spec, {0, 1}, halo(spec, 1, 1, Boundary::Zeros), 0);
  EXPECT_EQ(plan.target_sizes, (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(
      between(plan.receives, 3, 0),
      (std::vector<Transfer>{{3, 0, {{0, 1}, {0, 1}}, {{3, 4}, {4, 5}}}}));
  EXPECT_EQ(plan.receives.size(), 4);
  EXPECT_EQ(plan.axis, -1); // along both axes
  EXPECT_EQ(plan.largest_message, 3);
  const ExchangePlan rows =
      plan_gather_rows(spec, {0}, halo(spec, 1, 1, Boundary::Zeros), 0);
  EXPECT_EQ(rows.axis, 0);
}

TEST(PlanGatherRows, GivesEachRankItsHalo) {
  const SpecPtr spec = make_spec(mesh_of({2}), {6, 2}, {Placement::shard(0)});
  const ExchangePlan plan =
      plan_gather_rows(spec, {0}, halo(spec, 1, 1, Boundary::Zeros), 0);
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
  EXPECT_FALSE(plan.covers); // the row before the first is zero
  EXPECT_EQ(plan.axis, 0);
  EXPECT_EQ(plan.largest_message, 2);
}

TEST(PlanGatherRows, PeriodicNeighboursOnTwoRanksShareOneMessage) {
  const SpecPtr spec = make_spec(mesh_of({2}), {6}, {Placement::shard(0)});
  const ExchangePlan plan =
      plan_gather_rows(spec, {0}, halo(spec, 1, 1, Boundary::Periodic), 0);
  EXPECT_EQ(
      between(plan.receives, 1, 0),
      (std::vector<Transfer>{
          {1, 0, {{2, 3}}, {{0, 1}}}, {1, 0, {{0, 1}}, {{4, 5}}}}));
  EXPECT_TRUE(plan.covers);
  EXPECT_EQ(plan.largest_message, 2);
}

// ---- any rows ---------------------------------------------------------------

/// Rows of up to three runs, some zero, some repeated; the same for all
/// positions of a piece.
Rows random_rows(const SpecPtr& spec, uint32_t seed) {
  return [=](int64_t dim, int64_t position) {
    std::mt19937 random(seed + 100 * dim + spec->piece(dim, position));
    const int64_t extent = spec->size(dim);
    RowSource rows;
    for (int64_t runs = random() % 4; runs > 0; --runs) {
      int64_t row = static_cast<int64_t>(random() % (extent + 1)) - 1;
      for (int64_t left = random() % 5; left > 0 && row < extent; --left) {
        rows.push_back(row++);
      }
    }
    return rows;
  };
}

TEST(PlanGatherRows, GivesAnyRowsOfAnyLayout) {
  std::mt19937 random(5);
  const std::vector<std::vector<int64_t>> some_dims{{}, {0}, {1}, {0, 1}};
  for (const auto& shape : mesh_shapes()) {
    const MeshPtr mesh = mesh_of(shape);
    for (const auto& placements : combinations(mesh->axes(), kPlacements)) {
      for (const auto& dims : some_dims) {
        const SpecPtr spec =
            random_spec(random, mesh, {6, 4}, placements, true);
        check_gather(spec, dims, random_rows(spec, random()), random);
      }
    }
  }
}

TEST(PlanGatherRows, KeepsTheRowsOfOtherDims) {
  const SpecPtr spec = make_spec(
      mesh_of({2, 2}), {4, 6}, {Placement::shard(0), Placement::shard(1)});
  const ExchangePlan plan = plan_gather_rows(spec, {}, nullptr, 1);
  EXPECT_EQ(
      plan.receives,
      (std::vector<Transfer>{{1, 1, {{0, 2}, {0, 3}}, {{0, 2}, {0, 3}}}}));
  EXPECT_EQ(plan.largest_message, 0);
  EXPECT_TRUE(plan.covers);
}

TEST(PlanGatherRows, CostsAsManyNumbersAsThereAreRuns) {
  const int64_t rows = int64_t{1} << 42;
  const SpecPtr spec = make_spec(mesh_of({3}), {rows}, {Placement::shard(0)});
  const Rows ring = [&](int64_t dim, int64_t position) {
    const Interval own = spec->interval(dim, position);
    RowSource source;
    source.push_back((own.begin + rows - 1) % rows);
    source.append(own);
    source.push_back(own.end % rows);
    return source;
  };
  const ExchangePlan plan = plan_gather_rows(spec, {0}, ring, 1);
  EXPECT_EQ(plan.sends.size(), 3);
  EXPECT_EQ(plan.receives.size(), 3);
  EXPECT_EQ(
      plan.target_sizes,
      (std::vector<int64_t>{spec->interval(0, 1).extent() + 2}));
  EXPECT_EQ(plan.largest_message, 1);
}

// ---- rows -------------------------------------------------------------------

TEST(RowSource, JoinsWhatFollowsEachOther) {
  using Runs = std::vector<RowSource::Run>;
  RowSource source{5, 6, -1, -1};
  EXPECT_EQ(source.runs(), (Runs{{5, 2}, {-1, 2}}));
  source.append_zeros(3);
  source.append(Interval{0, 4});
  source.append(Interval{4, 4});
  source.append(RowSource{4, 4});
  EXPECT_EQ(source.runs(), (Runs{{5, 2}, {-1, 5}, {0, 5}, {4, 1}}));
  EXPECT_EQ(source.extent(), 13);
  EXPECT_EQ(source.shifted(2).runs(), (Runs{{7, 2}, {-1, 5}, {2, 5}, {6, 1}}));
  EXPECT_EQ(source, RowSource(listed(source)));
}

// ---- refusals ---------------------------------------------------------------

TEST(PlanGatherRows, RefusesWhatIsNotThere) {
  const SpecPtr spec = make_spec(mesh_of({2}), {4}, {Placement::shard(0)});
  const Rows first = [](int64_t, int64_t) { return RowSource{0}; };
  for (int64_t row : {-2, 4}) {
    expect_error<c10::IndexError>(
        [&] {
          plan_gather_rows(
              spec, {0}, [&](int64_t, int64_t) { return RowSource{row}; }, 0);
        },
        "plan_gather_rows: row " + std::to_string(row) +
            " of dim 0, expected -1 (zero) or 0 <= row < 4");
  }
  for (int64_t dim : {-1, 1}) {
    expect_error<c10::IndexError>(
        [&] { plan_gather_rows(spec, {dim}, first, 0); },
        "plan_gather_rows: dim " + std::to_string(dim) +
            ", expected 0 <= dim < 1");
  }
  expect_error<c10::IndexError>(
      [&] { plan_gather_rows(spec, {0}, first, 2); },
      "plan_gather_rows: position 2, expected 0 <= position < 2");
}

} // namespace
} // namespace shardtensor
