#include "shardtensor/distributed/manager.h"

#include <cstdlib>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/distributed/backends.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

namespace {

// Jobs of several processes: tests/ranks/groups_test.cpp.

class Manager : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const auto* name :
         {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MASTER_PORT"}) {
      unsetenv(name);
    }
  }
  void TearDown() override {
    DistributedManager::cleanup();
    unsetenv("SHARDTENSOR_DISTRIBUTED_TIMEOUT");
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
  }
};

TEST_F(Manager, WorksInASingleProcess) {
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  EXPECT_EQ(manager.rank(), 0);
  EXPECT_EQ(manager.world_size(), 1);
  EXPECT_EQ(manager.backend(), "none");
  const auto mesh = manager.initialize_mesh({1, -1}, {"data", "domain"});
  EXPECT_EQ(mesh->shape(), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(mesh->axis_name(1), "domain");
  const auto spec =
      make_spec(mesh, {4}, {Placement::replicate(), Placement::shard(0)});
  const auto x = from_local(at::arange(4), spec);
  EXPECT_EQ(full_tensor(x.sum()).item<int64_t>(), 6);
  EXPECT_EQ(all_reduce(at::ones({2}), Reduce::Sum, manager.group()).numel(), 2);
}

TEST_F(Manager, CanLeaveAndJoinAgain) {
  DistributedManager::initialize();
  const auto group = DistributedManager::get().group();
  DistributedManager::cleanup(/*wait=*/true);
  EXPECT_FALSE(DistributedManager::is_initialized());
  EXPECT_THROW(all_reduce(at::ones({2}), Reduce::Sum, group), c10::ValueError);
  DistributedManager::initialize();
  EXPECT_TRUE(DistributedManager::is_initialized());
}

TEST_F(Manager, SaysWhatIsWrong) {
  EXPECT_THROW(DistributedManager::get(), c10::Error);
  setenv("SHARDTENSOR_DISTRIBUTED_TIMEOUT", "soon", 1);
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "1", 1);
  EXPECT_THROW(DistributedManager::initialize(), c10::ValueError);
  setenv("SHARDTENSOR_DISTRIBUTED_TIMEOUT", "9", 1);
  EXPECT_THROW(DistributedManager::initialize("pigeon"), c10::ValueError);
  if (!has_nccl()) {
    EXPECT_THROW(
        DistributedManager::initialize("nccl"), c10::NotImplementedError);
  } else if (!at::hasCUDA()) {
    EXPECT_THROW(DistributedManager::initialize("nccl"), c10::ValueError);
  }
  unsetenv("RANK"); // WORLD_SIZE is still set
  EXPECT_THROW(DistributedManager::initialize(), c10::ValueError);
  unsetenv("WORLD_SIZE");
  DistributedManager::initialize();
  EXPECT_THROW(DistributedManager::initialize(), c10::Error);
  auto& manager = DistributedManager::get();
  EXPECT_THROW(manager.global_mesh(), c10::Error);
  EXPECT_THROW(manager.initialize_mesh({2}, {"a"}), c10::ValueError);
}

} // namespace

} // namespace shardtensor
