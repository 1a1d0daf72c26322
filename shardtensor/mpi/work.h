#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mpi.h>

namespace shardtensor::detail {

/// What an operation does: messages, and steps that run one after the other
/// whenever all messages so far have arrived. A step may start more messages.
class MpiOperation {
 public:
  using Step = std::function<void(MpiOperation&)>;

  /// `call` is the number of a collective among those of its group.
  MpiOperation(
      c10d::OpType type,
      MPI_Comm comm,
      std::chrono::milliseconds limit,
      uint64_t call);

  /// Starts one message of a contiguous tensor; none if it is empty. Without a
  /// tag only a message of the same call and size is taken, see Note [Tags are
  /// sizes].
  void send(const at::Tensor& x, int rank, std::optional<int> tag = {});
  void receive(const at::Tensor& x, int rank, std::optional<int> tag = {});
  void barrier();
  void then(Step step) {
    steps_.push_back(std::move(step));
  }
  /// x is among the results of the operation.
  void returns(const at::Tensor& x) {
    results_.push_back(x);
  }
  /// What the current stream of x's device has been given: a stream that waits
  /// for the operation waits for it.
  void queued_for(const at::Tensor& x);

 private:
  friend class MpiWork;

  MPI_Request* next(const at::Tensor& x, int rank, int received);
  std::string missing() const;
  std::string strays() const;

  c10d::OpType type_;
  MPI_Comm comm_;
  std::chrono::milliseconds limit_; // of a wait
  uint64_t call_;
  std::vector<MPI_Request> requests_;
  std::vector<int> received_; // bytes per request; -1: receives nothing
  std::vector<int> ranks_; // per request; -1: all or any
  std::vector<at::Tensor> tensors_; // kept alive
  std::vector<at::Tensor> results_;
  std::deque<Step> steps_;
  std::vector<c10::Event> queued_;
};

/// A started operation. wait() polls, so that it can give up at the time limit;
/// the job cannot communicate any more then, for MPI may still write into the
/// tensors, which are therefore never freed.
class MpiWork : public c10d::Work {
 public:
  MpiWork(int rank, MpiOperation operation);
  ~MpiWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  /// `limit` of 0 leaves the limit of the operation.
  bool wait(std::chrono::milliseconds limit = kNoTimeout) override;
  void synchronize() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  /// Waits: nothing else makes progress. DDP asks for it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  using Clock = std::chrono::steady_clock;

  bool test();
  bool test_messages();
  void check_sizes(const std::vector<MPI_Status>& statuses);
  [[noreturn]] void fail(const std::string& cause);

  MpiOperation operation_;
  int source_ = -1; // of a receive
  bool done_ = false;
};

} // namespace shardtensor::detail
