#include "shardtensor/layout/plan_cache.h"

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor::detail {
namespace {

using testing::mesh_of;

PlanKey key_of(const SpecPtr& spec) {
  PlanKey key;
  key.add(spec);
  return key;
}

TEST(PlanCache, MakesAPlanOnce) {
  static PlanCache<int> cache; // caches are never destroyed
  const auto spec = make_spec(mesh_of({2}), {5}, {Placement::shard(0)});
  int made = 0;
  for (int call = 0; call < 3; ++call) {
    EXPECT_EQ(*cache.find(key_of(spec), [&] { return ++made; }), 1);
  }
  cache.put(key_of(spec), 7);
  EXPECT_EQ(*cache.get(key_of(spec)), 7);
}

TEST(PlanCache, KeepsTheLayoutsOfItsKeysAlive) {
  static PlanCache<int> cache; // caches are never destroyed
  std::weak_ptr<const ShardSpec> looked_up;
  std::weak_ptr<const ShardSpec> kept;
  {
    const auto spec = make_spec(mesh_of({2}), {17}, {Placement::shard(0)});
    const auto other = make_spec(mesh_of({2}), {19}, {Placement::shard(0)});
    looked_up = spec;
    kept = other;
    EXPECT_EQ(cache.get(key_of(spec)), nullptr);
    cache.find(key_of(other), [] { return 1; });
  }
  EXPECT_TRUE(looked_up.expired());
  EXPECT_FALSE(kept.expired());
}

} // namespace
} // namespace shardtensor::detail
