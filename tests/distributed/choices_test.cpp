#include "shardtensor/distributed/choices.h"

#include <cstdlib>
#include <functional>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace shardtensor {

namespace {

using Shape = std::vector<int64_t>;

const c10::Device kCpu(c10::kCPU);
const c10::Device kCuda(c10::kCUDA, 1);

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

class Choices : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("SHARDTENSOR_DISTRIBUTED_BACKEND");
    unsetenv("SHARDTENSOR_DISTRIBUTED_TIMEOUT");
    unsetenv("CUDA_VISIBLE_DEVICES");
  }
};

TEST_F(Choices, TakeNcclForCudaThenMpiThenGloo) {
  Launch launch;
  EXPECT_EQ(choose_backend("", launch, kCpu, true), "gloo");
  launch.method = "openmpi";
  EXPECT_EQ(choose_backend("", launch, kCpu, true), "mpi");
  EXPECT_EQ(choose_backend("", launch, kCpu, false), "gloo");
  EXPECT_EQ(choose_backend("", launch, kCuda, true), "nccl");
  setenv("SHARDTENSOR_DISTRIBUTED_BACKEND", "gloo", 1);
  EXPECT_EQ(choose_backend("", launch, kCuda, true), "gloo");
  EXPECT_EQ(choose_backend("mpi", launch, kCuda, true), "mpi");
}

TEST_F(Choices, NameTheBackendsThatThereAre) {
  EXPECT_EQ(
      error_of([] { choose_backend("pigeon", {}, kCpu, true); }),
      "DistributedManager: backend 'pigeon', expected mpi, gloo or nccl");
}

TEST_F(Choices, TakeAGpuForEachRankOfNccl) {
  Launch launch;
  EXPECT_EQ(choose_device(launch, 0, ""), kCpu);
  launch.local_rank = 1;
  EXPECT_EQ(choose_device(launch, 4, ""), kCuda);
  EXPECT_EQ(choose_device(launch, 4, "nccl"), kCuda);
  EXPECT_EQ(choose_device(launch, 4, "gloo"), kCpu);
  setenv("SHARDTENSOR_DISTRIBUTED_BACKEND", "mpi", 1);
  EXPECT_EQ(choose_device(launch, 4, ""), kCpu);
  EXPECT_EQ(choose_device(launch, 4, "nccl"), kCuda);
}

TEST_F(Choices, TakeTheOneGpuThatARankMayHaveForItself) {
  const c10::Device first(c10::kCUDA, 0);
  Launch launch;
  EXPECT_EQ(choose_device(launch, 1, ""), first);
  launch.local_rank = 1;
  launch.method = "slurm";
  EXPECT_EQ(choose_device(launch, 1, ""), first);
  launch.method = "env";
  setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  EXPECT_EQ(choose_device(launch, 1, ""), first);
}

TEST_F(Choices, RefuseMoreRanksThanGpus) {
  Launch launch;
  launch.local_rank = 2;
  launch.method = "env";
  const std::string expected =
      ", expected a rank for each GPU at most, or "
      "SHARDTENSOR_DISTRIBUTED_BACKEND=gloo, for ranks on the CPU";
  EXPECT_EQ(
      error_of([&] { choose_device(launch, 2, ""); }),
      "DistributedManager: local rank 2 on a machine with 2 GPUs" + expected);
  EXPECT_EQ(
      error_of([&] { choose_device(launch, 1, ""); }),
      "DistributedManager: local rank 2 on a machine with 1 GPU" + expected);
}

TEST_F(Choices, ReadTheTimeLimit) {
  using std::chrono_literals::operator""min;
  using std::chrono_literals::operator""ms;
  const auto* name = "SHARDTENSOR_DISTRIBUTED_TIMEOUT";
  EXPECT_EQ(time_limit(), 30min);
  setenv(name, "0.5", 1);
  EXPECT_EQ(time_limit(), 500ms);
  setenv(name, "0.001", 1);
  EXPECT_EQ(time_limit(), 1ms);
  for (const auto* wrong :
       {"soon", "-1", "0", "5s", "0.0001", "inf", "nan", "1e10"}) {
    setenv(name, wrong, 1);
    EXPECT_EQ(
        error_of(time_limit),
        std::string(name) + "='" + wrong +
            "': expected a number of seconds, 0.001 to 1e9");
  }
}

TEST_F(Choices, CompleteTheMeshShape) {
  EXPECT_EQ(complete_mesh_shape({-1, 2}, {"a", "b"}, 8), (Shape{4, 2}));
  EXPECT_EQ(complete_mesh_shape({-1}, {"a"}, 1), (Shape{1}));
  EXPECT_EQ(complete_mesh_shape({2, 3}, {"a", "b"}, 6), (Shape{2, 3}));
}

TEST_F(Choices, SayWhatIsWrongWithAMeshShape) {
  using Names = std::vector<std::string>;
  const auto error = [](const Shape& shape, const Names& names) {
    return error_of([&] { complete_mesh_shape(shape, names, 4); });
  };
  const std::string where = "initialize_mesh: ";
  EXPECT_EQ(error({}, {}), where + "the mesh needs at least one axis");
  EXPECT_EQ(error({2, 2}, {"a"}), where + "2 axes (2, 2) but 1 names (a)");
  EXPECT_EQ(error({2, 2}, {"a", "a"}), where + "names (a, a) are not unique");
  for (const auto& shape :
       {Shape{3, -1}, {2, 1}, {-1, -1}, {0, -1}, {-2, -2}, {-1, 8}}) {
    EXPECT_EQ(
        error(shape, {"a", "b"}),
        c10::str(
            where,
            "a mesh of shape (",
            shape[0],
            ", ",
            shape[1],
            ") does not have the 4 ranks of the job"));
  }
}

} // namespace

} // namespace shardtensor
