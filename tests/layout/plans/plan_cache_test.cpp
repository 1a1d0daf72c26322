#include "shardtensor/layout/plans/layout_memory.h"
#include "shardtensor/layout/plans/plan_cache.h"

#include <gtest/gtest.h>

#include "../support.h"

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

struct Large {
  std::shared_ptr<int> alive;
  int64_t bytes() const {
    return 10 << 20;
  }
};

TEST(PlanCache, ForgetsPlansThatTakeTooMuchMemory) {
  static PlanCache<Large> cache; // caches are never destroyed
  const auto alive = std::make_shared<int>(0);
  for (int64_t i = 0; i < 100; ++i) {
    PlanKey key;
    key.add(i);
    cache.find(key, [&] { return Large{alive}; });
    EXPECT_NE(cache.get(key), nullptr);
    EXPECT_LE(alive.use_count(), 13); // 128 MiB of them, and ours
  }
}

TEST(PlanCache, CountsWhatIsReplacedOnce) {
  static PlanCache<Large> cache; // caches are never destroyed
  PlanKey key;
  PlanKey other;
  key.add(int64_t{1});
  other.add(int64_t{2});
  cache.put(other, Large{});
  for (int i = 0; i < 100; ++i) {
    cache.put(key, Large{});
  }
  EXPECT_NE(cache.get(other), nullptr);
}

TEST(LayoutMemory, ForgetsMeshByMesh) {
  static LayoutMemory memory;
  const auto mesh = mesh_of({3});
  const auto other = mesh_of({2});
  const auto layout = make_spec(mesh, {5}, {Placement::shard(0)});
  const auto key = key_of(layout);
  EXPECT_EQ(memory.find(mesh, key), nullptr);
  memory.note(mesh, key, layout);
  // What this rank does on a mesh of its own, and other ranks do not.
  for (int64_t i = 0; i < 10000; ++i) {
    PlanKey another;
    another.add(i);
    memory.note(other, another, layout);
  }
  EXPECT_EQ(memory.find(mesh, key), layout);
  EXPECT_EQ(memory.find(other, key), nullptr);
}

} // namespace
} // namespace shardtensor::detail
