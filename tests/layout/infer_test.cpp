#include "shardtensor/layout/infer.h"

#include <gtest/gtest.h>

#include "parts.h"

namespace shardtensor {
namespace {

using namespace testing;

using Sizes = std::vector<int64_t>;

std::vector<Sizes> local_sizes_of(const SpecPtr& spec) {
  std::vector<Sizes> sizes;
  for (int64_t position = 0; position < spec->mesh()->ranks(); ++position) {
    sizes.push_back(spec->local_sizes(position));
  }
  return sizes;
}

TEST(InferSpec, PiecesSayHowTheTensorIsCut) {
  std::mt19937 random(1);
  for (const auto& shape : mesh_shapes()) {
    for (int trial = 0; trial < 60; ++trial) {
      auto placements = random_placements(random, shape.size(), 3, true);
      const auto spec =
          random_spec(random, mesh_of(shape), {7, 0, 12}, placements);
      for (auto& placement : placements) {
        placement.dim -= placement.is_shard() && random() % 2 == 0 ? 3 : 0;
      }
      ASSERT_EQ(
          infer_spec(spec->mesh(), placements, local_sizes_of(spec)), spec);
    }
  }
}

TEST(InferSpec, SizesAlongEachAxisSayHowItCuts) {
  std::mt19937 random(2);
  const auto mesh = mesh_of({2, 3}, /*position=*/4);
  for (int trial = 0; trial < 60; ++trial) {
    const auto spec = random_spec(
        random, mesh, {7, 5}, {Placement::shard(1), Placement::shard(0)});
    std::vector<std::vector<Sizes>> along(2);
    for (int64_t axis = 0; axis < 2; ++axis) {
      for (int64_t rank = 0; rank < mesh->ranks(axis); ++rank) {
        along[axis].push_back(
            spec->local_sizes(mesh->with_coordinate(4, axis, rank)));
      }
    }
    ASSERT_EQ(
        infer_spec_along_axes(
            mesh, spec->placements(), spec->local_sizes(), along),
        spec);
  }
}

TEST(InferSpec, ReadsOnlyTheCutDimOfShapesAlongAnAxis) {
  const auto spec = infer_spec_along_axes(
      mesh_of({2}), {Placement::shard(0)}, {2, 4, 3}, {{{2, 9}, {5}}});
  EXPECT_EQ(spec->sizes(), (Sizes{7, 4, 3}));
  EXPECT_EQ(spec->partition(0).sizes(), (Sizes{2, 5}));
}

TEST(InferSpec, EvenPiecesNeedNoOthers) {
  const auto mesh = mesh_of({2, 3});
  const auto spec = infer_even_spec(
      mesh, {Placement::shard(-1), Placement::shard(1)}, {4, 5});
  EXPECT_EQ(spec->sizes(), (Sizes{4, 30}));
  EXPECT_EQ(spec->partition(1).sizes(), Sizes(6, 5));
}

TEST(InferSpec, RefusesPiecesThatDoNotFitTogether) {
  const auto mesh = mesh_of({2});
  const std::vector<Placement> rows{Placement::shard(0)};
  expect_error<c10::ValueError>(
      [&] { infer_spec(mesh, rows, {{2, 3}, {2, 4}}); },
      "infer_spec: dim 1 must have one extent on all ranks that hold the same "
      "piece, but by rank it is [3, 4]");
  expect_error<c10::ValueError>(
      [&] { infer_spec(mesh, rows, {{2, 3}, {2}}); },
      "infer_spec: the local tensors have different numbers of dims, by rank: "
      "[2, 1]");
  expect_error<c10::ValueError>(
      [&] { infer_spec(mesh, rows, {{2, 3}}); },
      "infer_spec: the local sizes of 1 ranks, expected those of all 2");
  expect_error<c10::IndexError>(
      [&] { infer_spec(mesh, {Placement::shard(2)}, {{2, 3}, {2, 3}}); },
      "infer_spec: Shard(dim=2) of a tensor with 2 dims");
  expect_error<c10::ValueError>(
      [&] { infer_spec_along_axes(mesh, rows, {2, 3}, {{{2, 3}}}); },
      "from_local: sharding_shapes[0]: expected 2 shapes along mesh dim 0, got "
      "1");
  expect_error<c10::ValueError>(
      [&] {
        infer_spec_along_axes(
            mesh, {Placement::shard(1)}, {2, 3}, {{{3}, {3}}});
      },
      "from_local: sharding_shapes[0] has the shape (3), expected one with dim "
      "1");
  expect_error<c10::ValueError>(
      [&] {
        infer_spec_along_axes(
            mesh_of({2, 2}),
            {Placement::shard(0), Placement::shard(0)},
            {2, 3},
            {});
      },
      "from_local: mesh dims [0, 1] all shard dim 0: shapes along one of them "
      "do not say how it is cut; use sharding_shapes='infer'");
}

} // namespace
} // namespace shardtensor
