#include "shardtensor/layout/shard_spec.h"

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor {
namespace {

using namespace testing;

TEST(ShardSpec, SeveralAxesShardOneDim) {
  const SpecPtr spec = make_spec(
      mesh_of({2, 2}, 2),
      {10, 4},
      {Placement::shard(0), Placement::shard(0)},
      {Partition({3, 3, 2, 2}), std::nullopt});
  EXPECT_EQ(spec->box(2), (Box{{6, 8}, {0, 4}}));
  EXPECT_EQ(spec->interval(0), (Interval{6, 8}));
  EXPECT_EQ(spec->local_sizes(), (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(
      to_string(*spec),
      "ShardSpec((10, 4) on Mesh(2x2): Shard(dim=0), Shard(dim=0) "
      "[3, 3, 2, 2])");
}

TEST(ShardSpec, EqualSpecsAreOnePointer) {
  const MeshPtr mesh = mesh_of({2});
  const SpecPtr chunked = make_spec(mesh, {5, 4}, {Placement::shard(-2)});
  const SpecPtr explicitly = make_spec(
      mesh, {5, 4}, {Placement::shard(0)}, {Partition({3, 2}), std::nullopt});
  EXPECT_EQ(chunked, explicitly);
  EXPECT_NE(chunked, with_partition(chunked, 0, Partition({2, 3})));
}

TEST(ShardSpec, UnusedSpecsAreForgotten) {
  const int64_t before = interned_specs();
  const MeshPtr mesh = mesh_of({2});
  for (int64_t rows = 0; rows < 1000; ++rows) {
    make_spec(mesh, {rows, 4}, {Placement::shard(0)});
  }
  EXPECT_EQ(interned_specs(), before);
}

} // namespace
} // namespace shardtensor
