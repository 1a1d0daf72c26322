#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mpi.h>

namespace shardtensor::detail {

class MpiCall;

/// PyTorch's collectives on tensors of any dtype and size, over MPI, those of
/// devices through the host. Every
/// call starts non-blocking and returns a Work, which makes progress when it is
/// waited for or tested (getFuture() waits for it); errors of MPI, messages of
/// another size than expected and a passed time limit are raised as
/// c10::DistBackendError by its wait(). Tensors need not be contiguous, but for
/// alltoall_base. Thread safety / ordering: all ranks of the group make the
/// same calls in the same order; sends and receives are matched by rank and tag
/// instead.
class MpiBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// The group of these ranks of MPI_COMM_WORLD, in this order. Its members,
  /// this process among them, make it together; `limit` bounds every call that
  /// brings no limit of its own.
  MpiBackend(const std::vector<int>& ranks, std::chrono::milliseconds limit);
  ~MpiBackend() override;

  const std::string getBackendName() const override {
    return "mpi";
  }
  void setTimeout(std::chrono::milliseconds limit) override {
    limit_ = limit;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options)
      override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  /// Tensors of other ranks than the root stay as they are.
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& options) override;
  WorkPtr scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override;
  /// Flat, contiguous tensors; empty splits stand for even ones. One message
  /// per peer that gets something.
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int rank, int tag) override;
  WorkPtr recv(Tensors& tensors, int rank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  /// A limit of the call's own comes first.
  MpiCall call(
      const char* name,
      c10d::OpType type,
      std::chrono::milliseconds limit);
  MpiCall message(const char* name, c10d::OpType type) const;

  std::chrono::milliseconds limit_;
  std::atomic<uint64_t> calls_{0}; // of collectives
  MPI_Comm collectives_ = MPI_COMM_NULL;
  MPI_Comm messages_ = MPI_COMM_NULL; // tags of send() stay apart
};

} // namespace shardtensor::detail
