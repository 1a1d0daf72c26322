#include "shardtensor/halo/sphere.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "../comm/thread_ranks.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {
namespace {

TEST(Sphere, GoesOnHalfATurnAwayBeyondAPole) {
  const auto x = at::arange(8).view({2, 4}); // 0 1 2 3, 4 5 6 7
  const auto expected = at::tensor(
      {1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6},
      at::kLong);
  EXPECT_TRUE(pad_sphere(x, {.width = {1, 1}}).equal(expected.view({4, 6})));
  EXPECT_TRUE(
      pad_sphere(x, {.width = {1, 0}, .vector = true, .pole_rows = true})
          .equal(
              at::tensor(
                  {-6, -7, -4, -5, 0, 1, 2, 3, 4, 5, 6, 7, -2, -3, -0, -1},
                  at::kLong)
                  .view({4, 4})));
}

TEST(Sphere, ShardsGetGhostCellsAndLoseThem) {
  const auto x = at::randn({2, 6, 8});
  const SphereHalo halo{.width = {2, 1}, .vector = true};
  const auto whole = pad_sphere(x, halo);
  testing::run_on_mesh({3}, [&](const MeshPtr& mesh) {
    ShardSpec::Partitions partitions(3);
    partitions[1] = Partition({3, 1, 2});
    const auto layout =
        make_spec(mesh, {2, 6, 8}, {Placement::shard(1)}, partitions);
    const auto rows = layout->interval(1);
    const auto shard =
        from_local(x.narrow(1, rows.begin, rows.extent()).clone(), layout);
    const auto local = halo_exchange_on_sphere(shard, halo);
    EXPECT_TRUE(local.equal(whole.narrow(1, rows.begin, rows.extent() + 4)));
    const auto back = halo_trim_on_sphere(local, layout, halo);
    EXPECT_EQ(spec(back), layout);
    EXPECT_TRUE(to_local(back).equal(to_local(shard)));
  });
}

} // namespace
} // namespace shardtensor
