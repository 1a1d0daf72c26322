// Runs the tests of this folder on every rank of an mpirun. Rank 0 reports; the
// others speak only about what fails on them.
#include <iostream>

#include <gtest/gtest.h>

#include "shardtensor/distributed/manager.h"

namespace {

class FailuresOnly : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) {
      std::cerr << "rank " << shardtensor::DistributedManager::get().rank()
                << ": " << result.file_name() << ':' << result.line_number()
                << ": " << result.message() << '\n';
    }
  }
};

} // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  using shardtensor::DistributedManager;
  DistributedManager::initialize();
  if (DistributedManager::get().rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly());
  }
  const int failed = RUN_ALL_TESTS();
  DistributedManager::cleanup(/*wait=*/true);
  return failed;
}
