#include "shardtensor/layout/shard_spec.h"

#include <thread>

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor {
namespace {

using namespace testing;

using Sizes = std::vector<int64_t>;

const Placement kRows = Placement::shard(0);
const Placement kColumns = Placement::shard(1);
const Placement kWhole = Placement::replicate();
const Placement kTerm = Placement::partial();

SpecPtr two_axes_shard_one_dim() {
  return make_spec(
      mesh_of({2, 2}, 2),
      {10, 4},
      {kRows, kRows},
      {Partition({3, 3, 2, 2}), std::nullopt});
}

// ---- who owns what ----------------------------------------------------------

TEST(ShardSpec, SeveralAxesShardOneDim) {
  const SpecPtr spec = two_axes_shard_one_dim();
  EXPECT_EQ(spec->box(2), (Box{{6, 8}, {0, 4}}));
  EXPECT_EQ(spec->interval(0), (Interval{6, 8}));
  EXPECT_EQ(spec->local_sizes(), (Sizes{2, 4}));
  EXPECT_EQ(spec->axes(0), (Sizes{0, 1}));
  EXPECT_EQ(spec->axes(1), Sizes{});
  EXPECT_EQ(spec->piece(0, 3), 3);
  EXPECT_EQ(spec->piece(1, 3), 0);
}

TEST(ShardSpec, EveryElementIsOwnedOncePerCopy) {
  std::mt19937 random(5);
  const Sizes sizes{6, 4, 3};
  for (const auto& shape : mesh_shapes()) {
    const MeshPtr mesh = mesh_of(shape);
    for (const auto& placements :
         combinations(mesh->axes(), {kRows, kColumns, kWhole, kTerm})) {
      const SpecPtr spec = random_spec(random, mesh, sizes, placements, true);
      SCOPED_TRACE(to_string(*spec));
      int64_t copies = mesh->ranks();
      for (int64_t axis : spec->sharded_axes()) {
        copies /= mesh->ranks(axis);
      }
      Values owners = zeros(sizes);
      for (int64_t position = 0; position < mesh->ranks(); ++position) {
        const auto rows = rows_of(*spec, position);
        Sizes local;
        for (const Sizes& of_dim : rows) {
          local.push_back(static_cast<int64_t>(of_dim.size()));
        }
        ASSERT_EQ(spec->local_sizes(position), local);
        for_each_index(local, [&](const Sizes& index) {
          const Sizes at{
              rows[0][index[0]], rows[1][index[1]], rows[2][index[2]]};
          ++owners.data[flat(sizes, at)];
        });
        if (spec->is_contiguous()) {
          ASSERT_EQ(extents(spec->box(position)), local);
        }
      }
      ASSERT_EQ(owners.data, std::vector<double>(72, double(copies)));
    }
  }
}

TEST(ShardSpec, MergedDimsOwnSeveralStretches) {
  // (2, 5) with 5 cut as [3, 2], merged into 10 rows.
  const SpecPtr spec = make_spec(
      mesh_of({2}, 1), {10}, {kRows}, {Partition({3, 2}).repeated(2)});
  EXPECT_FALSE(spec->is_contiguous());
  EXPECT_EQ(spec->local_sizes(), Sizes{4});
  EXPECT_EQ(spec->interval(0), (Interval{3, 5}));
  EXPECT_EQ(
      to_string(*spec), "ShardSpec((10) on Mesh(2): Shard(dim=0) 2 x [3, 2])");
  expect_error<c10::NotImplementedError>(
      [&] { spec->box(0); },
      "ShardSpec: a rank owns several boxes of ShardSpec((10) on Mesh(2): "
      "Shard(dim=0) 2 x [3, 2]), expected contiguous partitions");
}

TEST(ShardSpec, KnowsItsAxesAndDims) {
  const SpecPtr spec = make_spec(
      mesh_of({2, 2, 2, 2}), {4, 4, 4}, {kTerm, kColumns, kWhole, kColumns});
  EXPECT_EQ(spec->sharded_axes(), (Sizes{1, 3}));
  EXPECT_EQ(spec->partial_axes(), Sizes{0});
  EXPECT_EQ(spec->sharded_dims(), Sizes{1});
  EXPECT_EQ(spec->axes(1), (Sizes{1, 3}));
  EXPECT_TRUE(spec->is_sharded());
  EXPECT_TRUE(spec->is_sharded(1));
  EXPECT_FALSE(spec->is_sharded(0));
  EXPECT_TRUE(spec->has_partial());
  EXPECT_FALSE(spec->is_replicated());
  EXPECT_EQ(spec->numel(), 64);
  EXPECT_EQ(spec->dim(), 3);
  EXPECT_TRUE(replicated(spec)->is_replicated());
}

TEST(ShardSpec, ANumberHasNoDims) {
  const SpecPtr spec = make_spec(mesh_of({3}), {}, {kTerm});
  EXPECT_EQ(spec->numel(), 1);
  EXPECT_EQ(spec->box(1), Box{});
  EXPECT_EQ(spec->local_sizes(), Sizes{});
  EXPECT_EQ(to_string(*spec), "ShardSpec(() on Mesh(3): Partial(sum))");
}

TEST(ShardSpec, RanksOutsideTheMeshOwnNothing) {
  const SpecPtr spec = make_spec(mesh_of({2}, -1), {5, 4}, {kRows});
  EXPECT_EQ(spec->local_sizes(), (Sizes{0, 0}));
  EXPECT_EQ(spec->interval(0), (Interval{0, 0}));
  EXPECT_EQ(spec->interval(1), (Interval{0, 0}));
  EXPECT_EQ(spec->local_sizes(0), (Sizes{3, 4}));
}

TEST(ShardSpec, PrintsEachPartitionOnce) {
  EXPECT_EQ(
      to_string(*two_axes_shard_one_dim()),
      "ShardSpec((10, 4) on Mesh(2x2): Shard(dim=0), Shard(dim=0) "
      "[3, 3, 2, 2])");
  EXPECT_EQ(
      printed(*make_spec(mesh_of({2, 2}), {10, 4}, {kColumns, kRows})),
      "ShardSpec((10, 4) on Mesh(2x2): Shard(dim=1) [2, 2], Shard(dim=0) "
      "[5, 5])");
}

// ---- make_spec --------------------------------------------------------------

TEST(MakeSpec, ChunksAsDTensorDoes) {
  const SpecPtr spec = make_spec(mesh_of({2, 2}), {10, 5}, {kRows, kRows});
  EXPECT_EQ(spec->partition(0).sizes(), (Sizes{3, 2, 3, 2}));
  const SpecPtr columns = make_spec(mesh_of({4}), {10, 5}, {kColumns});
  EXPECT_EQ(columns->partition(1).sizes(), (Sizes{2, 2, 1, 0}));
}

TEST(MakeSpec, EqualSpecsAreOnePointer) {
  const MeshPtr mesh = mesh_of({2});
  const SpecPtr chunked = make_spec(mesh, {5, 4}, {Placement::shard(-2)});
  const SpecPtr explicitly =
      make_spec(mesh, {5, 4}, {kRows}, {Partition({3, 2}), Partition({9, 9})});
  EXPECT_EQ(chunked, explicitly);
  EXPECT_TRUE(*chunked == *explicitly);
}

TEST(MakeSpec, DifferentSpecsAreDifferentPointers) {
  const MeshPtr mesh = mesh_of({2});
  const std::vector<SpecPtr> specs{
      make_spec(mesh, {6, 6}, {kRows}),
      make_spec(mesh, {6, 6}, {kColumns}),
      make_spec(mesh, {6, 6}, {kWhole}),
      make_spec(mesh, {6, 6}, {kTerm}),
      make_spec(mesh, {6, 6}, {Placement::partial(Reduce::Max)}),
      make_spec(mesh, {6, 7}, {kRows}),
      make_spec(mesh_of({2}, 1), {6, 6}, {kRows}),
      make_spec(mesh, {6, 6}, {kRows}, {Partition({4, 2}), std::nullopt}),
      make_spec(
          mesh, {6, 6}, {kRows}, {Partition({2, 1}).repeated(2), std::nullopt}),
      make_spec(
          mesh, {6, 6}, {kRows}, {Partition({1, 1}).repeated(3), std::nullopt}),
  };
  for (size_t i = 0; i < specs.size(); ++i) {
    for (size_t j = 0; j < specs.size(); ++j) {
      EXPECT_EQ(specs[i] == specs[j], i == j) << i << ' ' << j;
      EXPECT_EQ(*specs[i] == *specs[j], i == j) << i << ' ' << j;
    }
  }
}

TEST(MakeSpec, IgnoresFieldsThatAPlacementDoesNotUse) {
  const MeshPtr mesh = mesh_of({2});
  const Placement odd_shard{Placement::Kind::Shard, 0, Reduce::Max};
  const Placement odd_whole{Placement::Kind::Replicate, 7, Reduce::Max};
  EXPECT_EQ(make_spec(mesh, {4}, {odd_shard}), make_spec(mesh, {4}, {kRows}));
  EXPECT_EQ(make_spec(mesh, {4}, {odd_whole}), make_spec(mesh, {4}, {kWhole}));
}

TEST(MakeSpec, ForgetsUnusedSpecs) {
  const int64_t before = interned_specs();
  const MeshPtr mesh = mesh_of({2});
  for (int64_t rows = 0; rows < 1000; ++rows) {
    make_spec(mesh, {rows, 4}, {kRows});
  }
  EXPECT_EQ(interned_specs(), before);
  const SpecPtr held = make_spec(mesh, {7, 4}, {kRows});
  EXPECT_EQ(interned_specs(), before + 1);
}

TEST(MakeSpec, ThreadsGetTheSamePointer) {
  const int64_t before = interned_specs();
  const MeshPtr mesh = mesh_of({2, 2});
  const SpecPtr kept = make_spec(mesh, {0, 4}, {kRows, kTerm});
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < wrong.size(); ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 5000; ++i) {
        const auto once = make_spec(mesh, {i % 5, 4}, {kRows, kTerm});
        const auto twice = with_sizes(kept, {i % 5, 4});
        wrong[thread] += once != twice || once->size(0) != i % 5;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
  EXPECT_EQ(interned_specs(), before + 1);
}

TEST(MakeSpec, RefusesPlacementsThatDoNotFit) {
  const MeshPtr mesh = mesh_of({2, 2});
  expect_error<c10::ValueError>(
      [&] { make_spec(nullptr, {4}, {kRows}); },
      "make_spec: no mesh, expected one");
  expect_error<c10::ValueError>(
      [&] { make_spec(mesh, {4}, {kRows}); },
      "make_spec: 1 placements (Shard(dim=0)) for Mesh(2x2), expected one for "
      "each of its 2 axes");
  for (int64_t dim : {1, -2}) {
    expect_error<c10::IndexError>(
        [&] { make_spec(mesh, {4}, {kWhole, Placement::shard(dim)}); },
        "make_spec: Shard(dim=" + std::to_string(dim) +
            ") of a tensor with 1 dims, expected a dim from -1 to 0");
  }
  expect_error<c10::IndexError>(
      [&] { make_spec(mesh, {}, {kWhole, kRows}); },
      "make_spec: Shard(dim=0) of a tensor without dims");
}

TEST(MakeSpec, RefusesSizesAndPartitionsThatDoNotFit) {
  const MeshPtr mesh = mesh_of({2});
  expect_error<c10::ValueError>(
      [&] { make_spec(mesh, {4, -1}, {kRows}); },
      "make_spec: size -1 in (4, -1), expected at least 0");
  expect_error<c10::ValueError>(
      [&] { make_spec(mesh, {4, 4}, {kRows}, {Partition({2, 2})}); },
      "make_spec: 1 partitions, expected none or one for each of 2 dims");
  expect_error<c10::ValueError>(
      [&] { make_spec(mesh, {4}, {kRows}, {Partition({2, 1, 1})}); },
      "make_spec: partition [2, 1, 1] of dim 0 has 3 pieces, expected 2");
  expect_error<c10::ValueError>(
      [&] { make_spec(mesh, {4}, {kRows}, {Partition({2, 1}, 2)}); },
      "make_spec: partition 2 x [2, 1] of dim 0 has extent 6, expected 4");
}

TEST(ShardSpec, RefusesQuestionsOutOfRange) {
  const SpecPtr spec = make_spec(mesh_of({2}), {4, 4}, {kRows});
  expect_error<c10::ValueError>(
      [&] { spec->partition(1); },
      "ShardSpec: dim 1 of ShardSpec((4, 4) on Mesh(2): Shard(dim=0) [2, 2]) "
      "has no partition, expected a sharded dim");
  expect_error<c10::IndexError>(
      [&] { spec->box(2); }, "Mesh: position 2, expected 0 <= position < 2");
  const auto no_dim = "ShardSpec: dim 5, expected 0 <= dim < 2";
  expect_error<c10::IndexError>([&] { spec->size(5); }, no_dim);
  expect_error<c10::IndexError>([&] { spec->is_sharded(5); }, no_dim);
  expect_error<c10::IndexError>([&] { spec->partition(5); }, no_dim);
  expect_error<c10::IndexError>([&] { spec->axes(5); }, no_dim);
  expect_error<c10::IndexError>([&] { spec->interval(5); }, no_dim);
  expect_error<c10::IndexError>(
      [&] { spec->placement(1); }, "ShardSpec: axis 1, expected 0 <= axis < 1");
}

// ---- relatives of a spec ----------------------------------------------------

TEST(Replicated, KeepsMeshAndSizes) {
  const SpecPtr spec = two_axes_shard_one_dim();
  const SpecPtr whole = replicated(spec);
  EXPECT_EQ(whole, make_spec(spec->mesh(), {10, 4}, {kWhole, kWhole}));
  EXPECT_EQ(whole, make_replicated(spec->mesh(), {10, 4}));
  EXPECT_EQ(whole, replicated(whole));
  expect_error<c10::ValueError>(
      [] { make_replicated(nullptr, {1}); },
      "make_replicated: no mesh, expected one");
}

TEST(WithoutPartial, ReplicatesThePartialAxes) {
  const MeshPtr mesh = mesh_of({2, 2});
  const ShardSpec::Partitions uneven{Partition({3, 1}), std::nullopt};
  const SpecPtr spec = make_spec(mesh, {4, 4}, {kTerm, kRows}, uneven);
  const SpecPtr gradient = make_spec(mesh, {4, 4}, {kWhole, kRows}, uneven);
  EXPECT_EQ(without_partial(spec), gradient);
  EXPECT_EQ(without_partial(gradient), gradient);
}

TEST(WithPlacements, KeepsPartitionsOfDimsThatKeepTheirAxes) {
  const MeshPtr mesh = mesh_of({2, 2});
  const Partition uneven({4, 1});
  const SpecPtr spec = make_spec(mesh, {5, 6}, {kRows, kWhole}, {uneven, {}});
  EXPECT_EQ(
      with_placements(spec, {kRows, Placement::shard(-1)}),
      make_spec(mesh, {5, 6}, {kRows, kColumns}, {uneven, {}}));
  EXPECT_EQ(
      with_placements(spec, {kRows, kRows}),
      make_spec(mesh, {5, 6}, {kRows, kRows}));
  EXPECT_EQ(
      with_placements(spec, {kTerm, kWhole}),
      make_spec(mesh, {5, 6}, {kTerm, kWhole}));
  EXPECT_EQ(with_placements(spec, {Placement::shard(-2), kWhole}), spec);
}

TEST(WithPlacements, TakesAGivenPartition) {
  const MeshPtr mesh = mesh_of({2, 2});
  const Partition given({1, 4});
  const SpecPtr spec =
      make_spec(mesh, {5, 6}, {kRows, kWhole}, {Partition({4, 1}), {}});
  EXPECT_EQ(
      with_placements(spec, {kRows, kWhole}, {given, {}}),
      make_spec(mesh, {5, 6}, {kRows, kWhole}, {given, {}}));
  expect_error<c10::ValueError>(
      [&] { with_placements(spec, {kRows, kWhole}, {given}); },
      "make_spec: 1 partitions, expected none or one for each of 2 dims");
}

TEST(WithoutShard, ReplicatesTheDimsAxes) {
  const SpecPtr spec = two_axes_shard_one_dim();
  EXPECT_EQ(without_shard(spec, 0), replicated(spec));
  EXPECT_EQ(without_shard(spec, 1), spec);
  expect_error<c10::IndexError>(
      [&] { without_shard(spec, 2); },
      "without_shard: dim 2, expected 0 <= dim < 2");
}

TEST(WithSizes, ChunksTheChangedDimsAnew) {
  const MeshPtr mesh = mesh_of({2, 2});
  const Partition rows({4, 1});
  const Partition columns({1, 5});
  const SpecPtr spec =
      make_spec(mesh, {5, 6}, {kRows, kColumns}, {rows, columns});
  EXPECT_EQ(
      with_sizes(spec, {7, 6}),
      make_spec(mesh, {7, 6}, {kRows, kColumns}, {std::nullopt, columns}));
  EXPECT_EQ(with_sizes(spec, {5, 6}), spec);
  expect_error<c10::ValueError>(
      [&] { with_sizes(spec, {5}); },
      "with_sizes: sizes (5) for ShardSpec((5, 6) on Mesh(2x2): Shard(dim=0) "
      "[4, 1], Shard(dim=1) [1, 5]), expected 2 dims");
}

TEST(WithPartition, SetsTheSize) {
  const MeshPtr mesh = mesh_of({2});
  const SpecPtr spec = make_spec(mesh, {5, 6}, {kRows});
  const SpecPtr wider = with_partition(spec, 0, Partition({1, 8}));
  EXPECT_EQ(wider->sizes(), (Sizes{9, 6}));
  EXPECT_EQ(wider->partition(0).sizes(), (Sizes{1, 8}));
  for (int64_t dim : {-1, 1, 2}) {
    expect_error<c10::ValueError>(
        [&] { with_partition(spec, dim, Partition({1, 5})); },
        "with_partition: dim " + std::to_string(dim) +
            " of ShardSpec((5, 6) on Mesh(2): Shard(dim=0) [3, 2]), expected a "
            "sharded dim");
  }
}

// ---- with_dims --------------------------------------------------------------

TEST(WithDims, EveryRankKeepsItsRowsOfTheDimsThatStay) {
  std::mt19937 random(11);
  const std::vector<int64_t> given{4, 6, 3};
  const auto all = combinations(
      2,
      {Placement::replicate(),
       Placement::partial(),
       Placement::shard(0),
       Placement::shard(1),
       Placement::shard(2)});
  for (int trial = 0; trial < 20; ++trial) {
    for (const auto& placements : all) {
      const auto spec =
          random_spec(random, mesh_of({2, 3}), given, placements, true);
      std::vector<int64_t> from{-1, 0, -1, 1, 2};
      std::shuffle(from.begin(), from.end(), random);
      from.resize(random() % 6);
      std::vector<int64_t> sizes;
      for (const int64_t dim : from) {
        sizes.push_back(dim < 0 ? 5 : given[dim]);
      }
      const auto moved =
          with_dims(spec, sizes, from, Placement::partial(Reduce::Max));
      ASSERT_EQ(moved->sizes(), sizes);
      for (int64_t axis = 0; axis < 2; ++axis) {
        const auto& before = spec->placement(axis);
        const auto to = std::find(from.begin(), from.end(), before.dim);
        ASSERT_EQ(
            moved->placement(axis),
            !before.is_shard()     ? before
                : to == from.end() ? Placement::partial(Reduce::Max)
                                   : Placement::shard(to - from.begin()));
      }
      for (int64_t position = 0; position < 6; ++position) {
        const auto rows = rows_of(*spec, position);
        for (size_t dim = 0; dim < from.size(); ++dim) {
          ASSERT_EQ(
              rows_of(*moved, dim, position),
              from[dim] < 0 ? (std::vector<int64_t>{0, 1, 2, 3, 4})
                            : rows[from[dim]]);
        }
      }
    }
  }
}

TEST(WithDims, GivenPartitionsReplaceTheOldOnes) {
  const auto spec = make_spec(
      mesh_of({2}),
      {5, 2},
      {Placement::shard(0)},
      {Partition({3, 2}), std::nullopt});
  const auto twice = with_dims(
      spec,
      {2, 10},
      {1, 0},
      {},
      {std::nullopt, Partition({3, 2}, /*repeat=*/2)});
  EXPECT_EQ(
      printed(*twice),
      "ShardSpec((2, 10) on Mesh(2): Shard(dim=1) 2 x [3, 2])");
  expect_error<c10::ValueError>(
      [&] { with_dims(spec, {2}, {1, 0}); },
      "with_dims: dims (1, 0) for sizes (2), expected as many");
  EXPECT_THROW(with_dims(spec, {4}, {0}), c10::ValueError);
}

} // namespace
} // namespace shardtensor
