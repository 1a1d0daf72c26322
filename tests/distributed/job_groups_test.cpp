#include "shardtensor/distributed/job_groups.h"

#include <chrono>
#include <string_view>
#include <thread>

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "../comm/thread_ranks.h"

namespace shardtensor::detail {
namespace {

// ---- leaving ----------------------------------------------------------------

struct Ending {
  int shutdowns = 0;
  int aborts = 0; // gone without
  std::chrono::seconds waits{0}; // for other ranks
};

/// As NCCL's: it aborts what is under way unless it is shut down.
class EndingBackend : public c10d::Backend {
 public:
  explicit EndingBackend(Ending& ending) : Backend(0, 1), ending_(ending) {}
  ~EndingBackend() override {
    ending_.aborts += is_shut_down_ ? 0 : 1;
  }
  const std::string getBackendName() const override {
    return "ending";
  }
  void shutdown() override {
    std::this_thread::sleep_for(ending_.waits);
    is_shut_down_ = true;
    ++ending_.shutdowns;
  }

 private:
  Ending& ending_;
  bool is_shut_down_ = false;
};

c10::intrusive_ptr<c10d::ProcessGroup> make_ending_group(Ending& ending) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 1);
  const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
  group->setBackend(
      c10::DeviceType::CPU, custom, c10::make_intrusive<EndingBackend>(ending));
  group->setDefaultBackend(custom);
  return group;
}

TEST(JobGroups, AreShutDownWhenTheyGo) {
  Ending ending;
  {
    JobGroups groups(std::chrono::seconds(60));
    groups.add("ending.world", make_ending_group(ending));
    groups.add("ending.axis", make_ending_group(ending));
    EXPECT_TRUE(c10d::resolve_process_group("ending.axis"));
    EXPECT_EQ(ending.shutdowns, 0);
  }
  EXPECT_EQ(ending.shutdowns, 2);
  EXPECT_EQ(ending.aborts, 0);
  EXPECT_THROW(c10d::resolve_process_group("ending.axis"), c10::Error);
}

TEST(JobGroupsDeathTest, DoNotWaitForOtherRanksForEver) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto leave = [] {
    Ending ending;
    ending.waits = std::chrono::seconds(60);
    JobGroups groups(std::chrono::milliseconds(500));
    groups.add("ending.world", make_ending_group(ending));
  };
  EXPECT_EXIT(
      leave(),
      ::testing::ExitedWithCode(1),
      "the other ranks have not left the job within 500 ms");
}

// ---- the barrier ------------------------------------------------------------

thread_local int numbers_read = 0;

std::unique_ptr<at::ObserverContext> count_number(
    const at::RecordFunction& call) {
  numbers_read +=
      std::string_view(call.name()) == "aten::_local_scalar_dense" ? 1 : 0;
  return nullptr;
}

/// The host waits for a device's queue where it reads a number of it, and in no
/// collective.
TEST(WaitForAll, ReadsWhatWasReduced) {
  testing::run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(count_number)
            .scopes({at::RecordScope::FUNCTION}));
    const auto before = testing::collectives_run();
    wait_for_all(Group(mesh->group()), at::kCPU);
    at::removeCallback(handle);
    EXPECT_GT(testing::collectives_run(), before);
    EXPECT_EQ(numbers_read, 1);
  });
}

} // namespace
} // namespace shardtensor::detail
