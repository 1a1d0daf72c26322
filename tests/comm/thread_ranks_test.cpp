#include "thread_ranks.h"

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>

#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "late_backend.h"
#include "shardtensor/comm/group.h"

namespace shardtensor::testing {

using namespace detail;

namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

std::atomic<int64_t> collectives{0};
std::atomic<RankBackend> backend{RankBackend::Threads};

// ---- a backend between threads ----------------------------------------------

struct Done : c10d::Work {
  Done() {
    finish();
  }
};

class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(int rank, int ranks, MeetingPointPtr point)
      : Backend(rank, ranks), point_(std::move(point)) {}

  const std::string getBackendName() const override {
    return "threads";
  }

  Work alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions&) override {
    count_collective();
    const Splitted received{out, out_splits};
    point_->meet(rank_, Splitted{in, in_splits}, [&](const auto& sent) {
      take_parts(received, sent, rank_);
    });
    return c10::make_intrusive<Done>();
  }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    count_collective();
    at::Tensor result;
    point_->meet(rank_, tensors[0], [&](const auto& all) {
      result = reduce_shown(all, options.reduceOp);
    });
    tensors[0].copy_(result);
    return c10::make_intrusive<Done>();
  }

  Work allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions&) override {
    count_collective();
    point_->meet(rank_, inputs[0], [&](const auto& all) {
      for (size_t i = 0; i < all.size(); ++i) {
        outputs[0][i].copy_(*all[i]);
      }
    });
    return c10::make_intrusive<Done>();
  }

 private:
  MeetingPointPtr point_;
};

c10::intrusive_ptr<c10d::Backend> make_backend(
    int rank,
    int ranks,
    MeetingPointPtr point) {
  if (backend == RankBackend::Late) {
    return make_late_backend(rank, ranks, std::move(point));
  }
  return c10::make_intrusive<ThreadBackend>(rank, ranks, std::move(point));
}

// ---- groups and meshes ------------------------------------------------------

/// Registers process groups under unique names, and forgets them at the end.
class Registry {
 public:
  std::string add(int rank, int ranks, MeetingPointPtr point) {
    static std::atomic<int64_t> count{0};
    names_.push_back("threads" + std::to_string(count++));
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, ranks);
    const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
    group->setBackend(
        c10::DeviceType::CPU,
        custom,
        make_backend(rank, ranks, std::move(point)));
    group->setDefaultBackend(custom);
    c10d::register_process_group(names_.back(), group);
    groups_.push_back(group); // c10d keeps weak references
    return names_.back();
  }
  ~Registry() {
    for (const auto& name : names_) {
      c10d::unregister_process_group(name);
    }
  }

 private:
  std::vector<std::string> names_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

/// Each position's view of one mesh.
std::vector<MeshPtr> make_meshes(
    const std::vector<int64_t>& shape,
    const std::shared_ptr<std::atomic<bool>>& failed,
    Registry& registry) {
  Mesh::Options options;
  options.shape = shape;
  options.ranks.resize(
      std::accumulate(
          shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
  std::iota(options.ranks.begin(), options.ranks.end(), 0);
  const Mesh grid(options);
  const auto whole = std::make_shared<MeetingPoint>(grid.ranks(), failed);
  // One meeting point for each line of positions along an axis.
  std::map<std::pair<int64_t, int64_t>, MeetingPointPtr> lines;
  std::vector<MeshPtr> meshes;
  for (int64_t position = 0; position < grid.ranks(); ++position) {
    options.position = position;
    options.group =
        registry.add(position, static_cast<int>(grid.ranks()), whole);
    options.axis_groups.clear();
    for (int64_t axis = 0; axis < grid.axes(); ++axis) {
      auto& line = lines[{axis, grid.with_coordinate(position, axis, 0)}];
      if (!line) {
        line = std::make_shared<MeetingPoint>(grid.ranks(axis), failed);
      }
      options.axis_groups.push_back(registry.add(
          static_cast<int>(grid.coordinate(position, axis)),
          static_cast<int>(grid.ranks(axis)),
          line));
    }
    meshes.push_back(make_mesh(options));
  }
  return meshes;
}

} // namespace

void run_on_mesh(
    const std::vector<int64_t>& shape,
    const std::function<void(const MeshPtr& mesh)>& body) {
  const auto failed = std::make_shared<std::atomic<bool>>(false);
  Registry registry;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (const auto& mesh : make_meshes(shape, failed, registry)) {
    threads.emplace_back([&, mesh] {
      try {
        body(mesh);
      } catch (...) {
        if (!failed->exchange(true)) {
          first = std::current_exception();
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void use_backend(RankBackend wanted) {
  backend = wanted;
}

int64_t collectives_run() {
  return collectives;
}

void count_collective() {
  ++collectives;
}

// ---- tests ------------------------------------------------------------------

TEST(ThreadRanks, GiveEachPositionItsGroups) {
  run_on_mesh({2, 3}, [](const MeshPtr& mesh) {
    const Group whole(mesh->group());
    EXPECT_EQ(whole.ranks(), 6);
    EXPECT_EQ(whole.rank(), mesh->position());
    for (int64_t axis = 0; axis < 2; ++axis) {
      const Group group(mesh->group(axis));
      EXPECT_EQ(group.ranks(), mesh->ranks(axis));
      EXPECT_EQ(group.rank(), mesh->coordinate(axis));
      const at::Tensor rows = group.all_gather(
          at::full({1}, mesh->position(), at::kLong), [] { return "test"; });
      for (int64_t i = 0; i < group.ranks(); ++i) {
        EXPECT_EQ(
            rows[i].item<int64_t>(),
            mesh->with_coordinate(mesh->position(), axis, i));
      }
    }
  });
}

TEST(ThreadRanks, AFailingRankEndsTheOthersToo) {
  const auto fail_on_rank_1 = [](const MeshPtr& mesh) {
    TORCH_CHECK_VALUE(mesh->position() != 1, "rank 1 fails");
    Group(mesh->group()).all_gather(at::full({1}, 0.0), [] { return "test"; });
  };
  EXPECT_THROW(run_on_mesh({3}, fail_on_rank_1), c10::ValueError);
}

} // namespace shardtensor::testing
