#include "shardtensor/distributed/launch.h"

#include <map>

#include <gtest/gtest.h>

namespace shardtensor {

namespace {

using Variables = std::map<std::string, std::string>;

Launch detect(const Variables& variables) {
  return detect_launch([&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt
                                    : std::optional(found->second);
  });
}

std::string error_of(const Variables& variables) {
  try {
    detect(variables);
  } catch (const LaunchError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

const Variables kTorchrun{
    {"RANK", "3"},
    {"WORLD_SIZE", "8"},
    {"LOCAL_RANK", "1"},
    {"MASTER_ADDR", "gpu7"},
    {"MASTER_PORT", "1234"}};

const Variables kSlurm{
    {"SLURM_PROCID", "5"},
    {"SLURM_NTASKS", "6"},
    {"SLURM_LOCALID", "2"},
    {"SLURM_JOB_ID", "123456"},
    {"SLURM_JOB_NODELIST", "gpu[03-05,9],cpu1"}};

const Variables kOpenMpi{
    {"OMPI_COMM_WORLD_RANK", "1"},
    {"OMPI_COMM_WORLD_SIZE", "4"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};

TEST(Launch, ReadsTorchrunsVariables) {
  const auto launch = detect(kTorchrun);
  EXPECT_EQ(launch.method, "env");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "gpu7");
  EXPECT_EQ(launch.port, 1234);
}

TEST(Launch, ReadsSlurmsVariables) {
  const auto launch = detect(kSlurm);
  EXPECT_EQ(launch.method, "slurm");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 6);
  EXPECT_EQ(launch.local_rank, 2);
  EXPECT_EQ(launch.address, "gpu03");
  EXPECT_EQ(launch.port, 20000 + 123456 % 12000);
}

TEST(Launch, ReadsOpenMpisVariables) {
  const auto launch = detect(kOpenMpi);
  EXPECT_EQ(launch.method, "openmpi");
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "localhost");
  auto several = kOpenMpi;
  several["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  EXPECT_EQ(detect(several).address, ""); // MPI needs none
  EXPECT_THROW(address_of_rank_0(detect(several)), LaunchError);
  several["MASTER_ADDR"] = "gpu7";
  EXPECT_EQ(address_of_rank_0(detect(several)), "gpu7");
}

TEST(Launch, GivesOpenMpisJobsPortsOfTheirOwn) {
  EXPECT_EQ(detect(kOpenMpi).port, 29500);
  auto job = kOpenMpi;
  job["PMIX_NAMESPACE"] = "prterun-node7-100@1";
  const auto port = detect(job).port;
  EXPECT_GE(port, 20000);
  EXPECT_LT(port, 32000);
  job["OMPI_COMM_WORLD_RANK"] = "2";
  EXPECT_EQ(detect(job).port, port);
  job["PMIX_NAMESPACE"] = "prterun-node7-101@1";
  EXPECT_NE(detect(job).port, port);
  job["MASTER_PORT"] = "77";
  EXPECT_EQ(detect(job).port, 77);
}

TEST(Launch, FindsTheNodeOfRank0UnderSlurm) {
  auto variables = kSlurm;
  variables["SLURM_LAUNCH_NODE_IPADDR"] = "10.0.0.1";
  EXPECT_EQ(detect(variables).address, "gpu03");
  variables["SLURM_STEP_NODELIST"] = "gpu04,gpu05";
  EXPECT_EQ(detect(variables).address, "gpu04");
  variables["MASTER_ADDR"] = "here";
  variables["MASTER_PORT"] = "77";
  EXPECT_EQ(detect(variables).address, "here");
  EXPECT_EQ(detect(variables).port, 77);
  for (const auto* name :
       {"MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    variables.erase(name);
  }
  EXPECT_EQ(detect(variables).address, "10.0.0.1");
}

TEST(Launch, TorchrunComesBeforeSlurmBeforeOpenMpi) {
  auto all = kOpenMpi;
  all.insert(kSlurm.begin(), kSlurm.end());
  EXPECT_EQ(detect(all).method, "slurm");
  all.insert(kTorchrun.begin(), kTorchrun.end());
  EXPECT_EQ(detect(all).method, "env");
  all["PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"] = "slurm";
  EXPECT_EQ(detect(all).method, "slurm");
  all["SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD"] = "openmpi";
  EXPECT_EQ(detect(all).method, "openmpi");
}

TEST(Launch, IsASingleProcessWithoutALauncher) {
  EXPECT_EQ(detect({}).method, "single");
  EXPECT_EQ(detect({}).world_size, 1);
}

TEST(Launch, SaysWhatIsWrong) {
  auto wrong = kTorchrun;
  wrong["WORLD_SIZE"] = "2";
  EXPECT_EQ(error_of(wrong), "env: rank 3 is outside a job of 2 processes");
  wrong["WORLD_SIZE"] = "8x";
  EXPECT_EQ(error_of(wrong), "env: WORLD_SIZE='8x' is not an integer");
  wrong = kTorchrun;
  wrong["LOCAL_RANK"] = "-1";
  EXPECT_EQ(error_of(wrong), "env: local rank -1 < 0");
  const auto method = "SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD";
  EXPECT_EQ(
      error_of({{method, "slurm"}}),
      "slurm: SLURM_PROCID is not set; was the program started by this "
      "launcher?");
  EXPECT_EQ(
      error_of({{method, "pigeon"}}),
      std::string(method) + "='pigeon': expected one of ENV, SLURM, OPENMPI");
  wrong = kSlurm;
  wrong.erase("SLURM_JOB_NODELIST");
  EXPECT_EQ(
      error_of(wrong),
      "slurm: no address of rank 0; expected MASTER_ADDR or "
      "SLURM_JOB_NODELIST");
}

TEST(FirstHost, ReadsNodeLists) {
  EXPECT_EQ(first_host("gpu[03-05,9],cpu1"), "gpu03");
  EXPECT_EQ(first_host("gpu3"), "gpu3");
  EXPECT_EQ(first_host("gpu3,gpu4"), "gpu3");
  EXPECT_EQ(first_host("gpu[7]"), "gpu7");
  EXPECT_EQ(first_host("gpu[7,9]-x[2-3],y"), "gpu7-x2");
}

} // namespace

} // namespace shardtensor
