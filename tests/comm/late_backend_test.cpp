#include "late_backend.h"

#include <algorithm>
#include <functional>
#include <mutex>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardtensor/comm/messages.h"
#include "thread_ranks.h"

namespace shardtensor::testing {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr uint8_t kPoison = 0xCD;
constexpr int kCallsPerCallAtOnce = 3;

struct Counters {
  std::atomic<int64_t> sends{0};
  std::atomic<int64_t> empty_sends{0};
  std::atomic<int64_t> gathers{0};
  std::atomic<int64_t> works{0};
  std::atomic<int64_t> bounded_waits{0};
};
Counters counters;

/// Memory that all-reduces have seen.
class Seen {
 public:
  void add(const at::Tensor& x) {
    const std::lock_guard lock(mutex_);
    storages_.push_back(x.storage().getWeakStorageImpl());
  }
  int64_t alive() {
    const std::lock_guard lock(mutex_);
    return std::count_if(storages_.begin(), storages_.end(), [](auto& seen) {
      return !seen.expired();
    });
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    storages_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};
Seen seen;

void count_send(int64_t bytes) {
  ++counters.sends;
  counters.empty_sends += bytes == 0 ? 1 : 0;
}

// ---- memory that a work does not own ----------------------------------------

void check_tensor(const at::Tensor& x) {
  TORCH_CHECK(
      x.is_contiguous(), "late: expected a contiguous tensor, as NCCL does");
  constexpr at::ScalarType kKnown[] = {
      at::kChar,
      at::kByte,
      at::kInt,
      at::kLong,
      at::kHalf,
      at::kBFloat16,
      at::kFloat,
      at::kDouble};
  TORCH_CHECK(
      std::find(std::begin(kKnown), std::end(kKnown), x.scalar_type()) !=
          std::end(kKnown),
      "late: NCCL has no ",
      x.scalar_type());
}

/// Where a tensor lies.
class Place {
 public:
  explicit Place(const at::Tensor& x)
      : storage_(x.storage().getWeakStorageImpl()),
        sizes_(x.sizes().vec()),
        offset_(x.storage_offset()),
        options_(x.options()) {
    check_tensor(x);
  }

  at::Tensor tensor() const {
    auto storage = storage_.lock();
    TORCH_CHECK(storage, "late: a tensor was freed before the wait");
    std::vector<int64_t> strides(sizes_.size(), 1);
    for (size_t dim = sizes_.size(); dim-- > 1;) {
      strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes_[dim], 1);
    }
    return at::empty({0}, options_)
        .set_(c10::Storage(std::move(storage)), offset_, sizes_, strides);
  }

  at::Tensor bytes() const {
    return tensor().view({-1}).view(at::kByte);
  }
  void poison() const {
    bytes().fill_(kPoison);
  }
  void expect_poison() const {
    EXPECT_TRUE(bytes().eq(kPoison).all().item<bool>())
        << "an output was written before its wait";
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::vector<int64_t> sizes_;
  int64_t offset_;
  at::TensorOptions options_;
};

class LateWork : public c10d::Work {
 public:
  LateWork(std::function<void()> finish, std::shared_ptr<int64_t> pending)
      : finish_(std::move(finish)), pending_(std::move(pending)) {
    ++*pending_;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    ++counters.works;
    counters.bounded_waits += timeout.count() > 0 ? 1 : 0;
    if (finish_) {
      --*pending_;
      std::exchange(finish_, nullptr)();
    }
    return true;
  }

 private:
  std::function<void()> finish_;
  std::shared_ptr<int64_t> pending_;
};

// ---- the backend ------------------------------------------------------------

class LateBackend : public c10d::Backend {
 public:
  LateBackend(int rank, int ranks, MeetingPointPtr point)
      : Backend(rank, ranks), point_(std::move(point)) {}

  ~LateBackend() override {
    EXPECT_TRUE(*pending_ == 0 || point_->failed())
        << "the group went with work pending, which NCCL aborts";
  }

  const std::string getBackendName() const override {
    return "late";
  }
  bool supportsCoalescing() const override {
    return true;
  }

  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override {
    begin_collective();
    const int64_t row = in.numel() == 0 ? 0 : in.nbytes() / in.size(0);
    for (int64_t peer = 0; peer < size_; ++peer) {
      if (peer != rank_) {
        count_send(in_splits.at(peer) * row); // NCCL sends nothing, too
      }
    }
    const Place source(in);
    const Place target(out);
    target.poison();
    return start(options.asyncOp, [=, this] {
      target.expect_poison();
      const Splitted received{target.tensor(), out_splits};
      point_->meet(
          rank_, Splitted{source.tensor(), in_splits}, [&](const auto& sent) {
            take_parts(received, sent, rank_);
          });
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    begin_collective();
    const Place place(tensors.at(0));
    seen.add(tensors[0]);
    const at::Tensor own = tensors[0].clone(); // the output's place is the same
    place.poison();
    const auto op = options.reduceOp;
    return start(options.asyncOp, [=, this] {
      place.expect_poison();
      at::Tensor result;
      point_->meet(
          rank_, own, [&](const auto& all) { result = reduce_shown(all, op); });
      place.tensor().copy_(result);
    });
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    begin_collective();
    const Place source(inputs.at(0));
    std::vector<Place> targets;
    for (const auto& output : outputs.at(0)) {
      targets.emplace_back(output);
      targets.back().poison();
    }
    return start(options.asyncOp, [=, this] {
      point_->meet(rank_, source.tensor(), [&](const auto& all) {
        for (size_t i = 0; i < all.size(); ++i) {
          targets[i].expect_poison();
          targets[i].tensor().copy_(*all[i]);
        }
      });
    });
  }

  WorkPtr _allgather_base(
      at::Tensor& out,
      at::Tensor& in,
      const c10d::AllgatherOptions& options) override {
    begin_collective();
    ++counters.gathers;
    const Place source(in);
    const Place target(out);
    target.poison();
    return start(options.asyncOp, [=, this] {
      point_->meet(rank_, source.tensor(), [&](const auto& all) {
        target.expect_poison();
        const auto rows = target.tensor().view({size_, -1});
        for (size_t i = 0; i < all.size(); ++i) {
          rows[static_cast<int64_t>(i)].copy_(all[i]->view({-1}));
        }
      });
    });
  }

  void startCoalescing() override {
    TORCH_CHECK(has_communicator_, "late: not all ranks may come here");
    TORCH_CHECK(!together_, "late: what was begun before has not ended");
    together_.emplace();
  }
  WorkPtr send(Tensors& tensors, int peer, int) override {
    count_send(static_cast<int64_t>(tensors.at(0).nbytes()));
    messages().sends.emplace_back(peer, tensors[0]);
    return nullptr;
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    messages().receives.emplace_back(peer, tensors.at(0)).second.poison();
    return nullptr;
  }
  WorkPtr endCoalescing() override {
    const auto messages = std::move(this->messages());
    together_.reset();
    if (messages.sends.empty() && messages.receives.empty()) {
      return nullptr;
    }
    return start(/*asynchronous=*/true, [=, this] {
      for (const auto& [peer, place] : messages.sends) {
        point_->leave_message(rank_, peer, place.tensor().clone());
      }
      for (const auto& [peer, place] : messages.receives) {
        place.expect_poison();
        place.tensor().copy_(point_->take_message(peer, rank_));
      }
    });
  }

 private:
  struct Messages {
    std::vector<std::pair<int, Place>> sends;
    std::vector<std::pair<int, Place>> receives;
  };

  Messages& messages() {
    TORCH_CHECK(
        together_,
        "late: a send or receive of its own makes NCCL connect two ranks anew");
    return *together_;
  }

  void begin_collective() {
    count_collective();
    has_communicator_ = true;
  }

  WorkPtr start(bool asynchronous, std::function<void()> finish) {
    if (!asynchronous || ++calls_ % kCallsPerCallAtOnce == 0) {
      finish();
      return nullptr;
    }
    return c10::make_intrusive<LateWork>(std::move(finish), pending_);
  }

  MeetingPointPtr point_;
  std::shared_ptr<int64_t> pending_ = std::make_shared<int64_t>(0);
  std::optional<Messages> together_;
  bool has_communicator_ = false;
  int64_t calls_ = 0;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_late_backend(
    int rank,
    int ranks,
    MeetingPointPtr point) {
  return c10::make_intrusive<LateBackend>(rank, ranks, std::move(point));
}

LateCounts late_counts() {
  return {
      counters.sends,
      counters.empty_sends,
      counters.gathers,
      counters.works,
      counters.bounded_waits,
      seen.alive()};
}

void reset_late_counts() {
  counters.sends = counters.empty_sends = 0;
  counters.gathers = counters.works = counters.bounded_waits = 0;
  seen.forget();
}

// ---- tests ------------------------------------------------------------------

namespace {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// `body` on two ranks that a late backend joins.
void run_late(const std::function<void(const ProcessGroup&)>& body) {
  use_backend(RankBackend::Late);
  run_on_mesh({2}, [&](const MeshPtr& mesh) {
    body(c10d::resolve_process_group(mesh->group()));
  });
  use_backend(RankBackend::Threads);
}

WorkPtr start_all_reduce(const ProcessGroup& group, const at::Tensor& x) {
  Tensors tensors{x};
  return group->allreduce(tensors);
}

TEST(LateBackend, WritesOnlyInWait) {
  run_late([](const ProcessGroup& group) {
    const auto x = at::ones({2});
    const auto work = start_all_reduce(group, x);
    EXPECT_FALSE(at::equal(x, at::ones({2})));
    work->wait();
    EXPECT_TRUE(at::equal(x, at::full({2}, 2.0)));
  });
}

TEST(LateBackend, ReadsOnlyInWait) {
  run_late([](const ProcessGroup& group) {
    Tensors in{at::ones({2})};
    std::vector<Tensors> out{{at::ones({2}), at::ones({2})}};
    const auto work = group->allgather(out, in);
    in[0].fill_(3);
    work->wait();
    EXPECT_TRUE(at::equal(out[0][1], at::full({2}, 3.0)));
  });
}

TEST(LateBackend, EveryThirdCallHasNoWork) {
  run_late([](const ProcessGroup& group) {
    for (int call = 1; call <= 6; ++call) {
      const auto x = at::ones({2});
      const auto work = start_all_reduce(group, x);
      EXPECT_EQ(work == nullptr, call % 3 == 0);
      if (work) {
        work->wait();
      }
      EXPECT_TRUE(at::equal(x, at::full({2}, 2.0)));
    }
  });
}

TEST(LateBackend, SaysThatATensorWasFreed) {
  run_late([](const ProcessGroup& group) {
    const auto work = start_all_reduce(group, at::ones({2}));
    EXPECT_THROW(work->wait(), c10::Error);
  });
}

TEST(LateBackend, RefusesWhatNcclRefuses) {
  run_late([](const ProcessGroup& group) {
    const auto refuses = [&](const at::Tensor& x) {
      EXPECT_THROW(start_all_reduce(group, x), c10::Error) << x;
    };
    refuses(at::ones({2, 3}).t());
    refuses(at::ones({2}, at::kShort));
    refuses(at::ones({2}, at::kComplexFloat));
    Tensors message{at::ones({2})};
    EXPECT_THROW(group->send(message, 1 - group->getRank(), 0), c10::Error);
  });
}

TEST(LateBackend, NeedsACollectiveBeforeMessages) {
  run_late([](const ProcessGroup& group) {
    EXPECT_THROW(group->startCoalescing(c10::kCPU), c10::Error);
  });
}

TEST(LateBackend, MessagesThatItRefusesEndAllTheSame) {
  run_late([](const ProcessGroup& group) {
    const int peer = 1 - group->getRank();
    const auto swap = [&](const at::Tensor& x, const at::Tensor& y) {
      for (const auto& started :
           detail::start_messages(*group, x, {{peer, y}}, {{peer, x}})) {
        if (started.work) {
          started.work->wait();
        }
      }
    };
    const auto refused = at::ones({2}, at::kShort);
    const auto x = at::full({2}, static_cast<double>(peer));
    const auto y = at::zeros({2});
    EXPECT_THROW(swap(refused, refused), c10::Error);
    swap(x, y);
    EXPECT_TRUE(at::equal(y, at::full({2}, 1.0 - peer)));
  });
}

} // namespace

} // namespace shardtensor::testing
