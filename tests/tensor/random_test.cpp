#include "shardtensor/tensor/random.h"

#include <ATen/Context.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "../layout/parts.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {
namespace {

using namespace testing;

TEST(Random, FactoriesDrawWhatOneDeviceDrawsInAnyLayout) {
  std::mt19937 random(1);
  for (const auto& shape : mesh_shapes()) {
    for (int trial = 0; trial < 10; ++trial) {
      const auto spec = random_spec(
          random,
          mesh_of(shape),
          {6, 10},
          random_placements(random, shape.size(), 2),
          true);
      at::manual_seed(trial);
      const auto uniform = at::rand({6, 10}, at::kDouble);
      const auto normal = at::randn({6, 10}, at::kFloat);
      const auto next = at::rand({2});
      for (int64_t position = 0; position < spec->mesh()->ranks(); ++position) {
        const auto own = seen_from(spec, position);
        at::manual_seed(trial);
        const auto x = rand(own, at::kDouble);
        const auto y = randn(own, at::kFloat);
        EXPECT_TRUE(at::rand({2}).equal(next)); // generators advance alike
        EXPECT_TRUE(to_local(x).equal(part_of(uniform, *own, position)));
        EXPECT_TRUE(to_local(y).equal(part_of(normal, *own, position)));
      }
    }
  }
}

TEST(Random, FactoriesRefusePartial) {
  const auto spec = make_spec(mesh_of({2}), {3}, {Placement::partial()});
  EXPECT_THROW(rand(spec), c10::ValueError);
  EXPECT_THROW(randn(spec), c10::ValueError);
}

} // namespace
} // namespace shardtensor
