#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "shardtensor/layout/plans/plan_cache.h"

namespace shardtensor::detail {

/// Layouts that later calls ask for and no argument tells. They decide about
/// messages, so they are bounded mesh by mesh: a rank forgets when the other
/// ranks of the mesh do, whatever else it does. Shared by all threads, for
/// backward may run on another one than forward.
class LayoutMemory {
 public:
  /// The layout that was noted last; null where none was, or is forgotten.
  SpecPtr find(const MeshPtr& mesh, const PlanKey& key) {
    const auto found = of(mesh).get(key);
    return found ? *found : nullptr;
  }
  void note(const MeshPtr& mesh, const PlanKey& key, SpecPtr layout) {
    of(mesh).put(key, std::move(layout));
  }

 private:
  struct OfMesh {
    MeshPtr mesh; // kept alive, or another could take its address
    PlanCache<SpecPtr> layouts;
  };
  PlanCache<SpecPtr>& of(const MeshPtr& mesh) {
    const std::lock_guard<std::mutex> lock(state_.mutex);
    auto& own = state_.by_mesh[mesh.get()];
    own.mesh = mesh;
    return own.layouts;
  }

  struct State {
    std::mutex mutex;
    std::map<const Mesh*, OfMesh> by_mesh;
  };
  State& state_ = *new State(); // a backward may outlive the program
};

} // namespace shardtensor::detail
