#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "shardtensor/layout/mesh.h"

namespace shardtensor::testing {

/// How ranks on threads talk: at once, or as NCCL does (late_backend.h).
enum class RankBackend { Threads, Late };

/// Runs `body` once for each position of a mesh, each on a thread of its own
/// with its own view of the mesh. The mesh's groups are real process groups
/// that join the threads, so that collectives work as they do between
/// processes. Raises what the first failing rank raised; the others are told
/// so where they wait.
///
/// Example: run_on_mesh({2, 2}, [](const MeshPtr& mesh) {
///   EXPECT_EQ(Group(mesh->group(0)).ranks(), 2);
/// });
void run_on_mesh(
    const std::vector<int64_t>& shape,
    const std::function<void(const MeshPtr& mesh)>& body);

/// What run_on_mesh joins the threads with from now on.
void use_backend(RankBackend backend);

/// How many collectives the ranks have run so far, all ranks together.
int64_t collectives_run();
void count_collective();

/// A suite whose tests (TEST_P) run with each backend:
///
///   class Exchange : public OnEachBackend {};
///   INSTANTIATE_TEST_SUITE_P(On, Exchange, each_backend(), backend_name);
class OnEachBackend : public ::testing::TestWithParam<RankBackend> {
 protected:
  void SetUp() override {
    use_backend(GetParam());
  }
  void TearDown() override {
    use_backend(RankBackend::Threads);
  }
};

inline auto each_backend() {
  return ::testing::Values(RankBackend::Threads, RankBackend::Late);
}

inline std::string backend_name(
    const ::testing::TestParamInfo<RankBackend>& info) {
  return info.param == RankBackend::Threads ? "Threads" : "Late";
}

} // namespace shardtensor::testing
