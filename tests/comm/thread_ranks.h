#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "shardtensor/layout/mesh.h"

namespace shardtensor::testing {

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

/// How many collectives the ranks have run so far, all ranks together.
int64_t collectives_run();

} // namespace shardtensor::testing
