#include "thread_ranks.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardtensor/comm/group.h"

namespace shardtensor::testing {

using namespace detail;

namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

std::atomic<int64_t> collectives{0};

// ---- where the ranks of one group meet --------------------------------------

/// Each rank shows a value to the others and sees theirs.
class MeetingPoint {
 public:
  MeetingPoint(int64_t ranks, std::shared_ptr<std::atomic<bool>> failed)
      : shown_(ranks), failed_(std::move(failed)) {}

  /// Calls use(what each rank shows) once all are here; returns once all have
  /// used it.
  template <typename T, typename Use>
  void meet(int64_t rank, const T& value, Use use) {
    ++collectives;
    shown_[rank] = &value;
    wait_for_all();
    std::vector<const T*> all;
    for (const void* shown : shown_) {
      all.push_back(static_cast<const T*>(shown));
    }
    std::exception_ptr error;
    try {
      use(all);
    } catch (...) {
      error = std::current_exception();
    }
    wait_for_all(); // others may still read this rank's value
    if (error) {
      std::rethrow_exception(error);
    }
  }

 private:
  void wait_for_all() {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    if (++arrived_ == static_cast<int64_t>(shown_.size())) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    for (int tries = 0; round_ == round; ++tries) {
      TORCH_CHECK(!*failed_, "another rank failed");
      TORCH_CHECK(tries < 2000, "another rank did not come");
      changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrived_ = 0;
  int64_t round_ = 0;
  std::vector<const void*> shown_;
  std::shared_ptr<std::atomic<bool>> failed_;
};

// ---- a backend between threads ----------------------------------------------

struct Done : c10d::Work {
  Done() {
    finish();
  }
};

at::Tensor combine(
    const at::Tensor& a,
    const at::Tensor& b,
    const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return a + b;
    case c10d::ReduceOp::PRODUCT:
      return a * b;
    case c10d::ReduceOp::MAX:
      return at::where(a < b, b, a); // as gloo does: loses some NaNs
    case c10d::ReduceOp::MIN:
      return at::where(b < a, b, a);
    default:
      TORCH_CHECK(false, "no such reduction between threads");
  }
}

struct Splitted {
  at::Tensor tensor;
  std::vector<int64_t> splits;

  at::Tensor part(int64_t rank) const {
    const auto begin =
        std::accumulate(splits.begin(), splits.begin() + rank, int64_t{0});
    return tensor.narrow(0, begin, splits[rank]);
  }
};

class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(int rank, int ranks, std::shared_ptr<MeetingPoint> point)
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
    const Splitted received{out, out_splits};
    point_->meet(rank_, Splitted{in, in_splits}, [&](const auto& sent) {
      for (int64_t peer = 0; peer < size_; ++peer) {
        received.part(peer).copy_(sent[peer]->part(rank_));
      }
    });
    return c10::make_intrusive<Done>();
  }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    at::Tensor result;
    point_->meet(rank_, tensors[0], [&](const auto& all) {
      result = all[0]->clone();
      for (size_t i = 1; i < all.size(); ++i) {
        result = combine(result, *all[i], options.reduceOp);
      }
    });
    tensors[0].copy_(result);
    return c10::make_intrusive<Done>();
  }

  Work allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions&) override {
    point_->meet(rank_, inputs[0], [&](const auto& all) {
      for (size_t i = 0; i < all.size(); ++i) {
        outputs[0][i].copy_(*all[i]);
      }
    });
    return c10::make_intrusive<Done>();
  }

 private:
  std::shared_ptr<MeetingPoint> point_;
};

// ---- groups and meshes ------------------------------------------------------

/// Registers process groups under unique names, and forgets them at the end.
class Registry {
 public:
  std::string add(int rank, int ranks, std::shared_ptr<MeetingPoint> point) {
    static std::atomic<int64_t> count{0};
    names_.push_back("threads" + std::to_string(count++));
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, ranks);
    const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
    group->setBackend(
        c10::DeviceType::CPU,
        custom,
        c10::make_intrusive<ThreadBackend>(rank, ranks, std::move(point)));
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
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<MeetingPoint>> lines;
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

int64_t collectives_run() {
  return collectives;
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
