#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shardtensor/mpi/work.h"

namespace shardtensor::detail {

/// One call of a backend by one rank: checks its tensors, brings them to where
/// MPI can read them and starts the messages that a collective is made of.
class MpiCall : public MpiOperation {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// `name` is what errors call it; rank and ranks are those of the group,
  /// `call` is as in MpiOperation.
  MpiCall(
      const char* name,
      c10d::OpType type,
      MPI_Comm comm,
      std::chrono::milliseconds limit,
      uint64_t call,
      int rank,
      int ranks);

  // ---- checks: c10::ValueError, before anything is sent

  const at::Tensor& dense(const at::Tensor& x) const;
  const at::Tensor& only(const Tensors& list) const;
  const Tensors& one_per_rank(const std::vector<Tensors>& lists) const;
  const Tensors& one_per_rank(const Tensors& list) const;
  int checked_rank(int64_t rank) const;
  /// Part r of x is the elements for or from rank r; no splits: even parts.
  Tensors parts_of(const at::Tensor& x, std::vector<int64_t> splits = {}) const;

  // ---- what MPI gets: contiguous host memory

  /// With x's elements as they are now on the current stream.
  at::Tensor reads(const at::Tensor& x) const;
  Tensors reads_all(const Tensors& list) const;
  /// Of x's shape; x, a result of the call, becomes a copy at the end.
  at::Tensor writes(const at::Tensor& x);
  Tensors writes_all(const Tensors& list);
  /// Both.
  at::Tensor changes(const at::Tensor& x);

  // ---- what a collective is made of

  /// writes(x), flat and cut evenly: row p is for what comes from rank p.
  Tensors rows_of(const at::Tensor& x);

  /// parts[p] goes to, or comes from, each other rank p.
  void send_all(const Tensors& parts);
  void receive_all(const Tensors& parts);

  /// rows[p] becomes rank p's x.
  void all_gather(const Tensors& rows, const at::Tensor& x);
  /// parts[p] goes to rank p, received[p] comes from it.
  void exchange(const Tensors& received, const Tensors& parts);

  // Note [Reductions of our own]
  // Open MPI's non-blocking reductions end the process when the ranks' sizes
  // differ, and know no fp16 or bf16. Ours are messages that are checked: small
  // tensors go to everybody at once; of larger ones each rank reduces a part
  // and gives everybody the result, which moves the least.

  /// x becomes the reduction of all ranks' x.
  void all_reduce(const at::Tensor& x, const c10d::ReduceOp& op);
  /// Sends parts[p] to each rank p and reduces what arrives into `mine`.
  void reduce_part(
      const Tensors& parts,
      const at::Tensor& mine,
      const c10d::ReduceOp& op);
  /// x becomes the reduction of all ranks' x on the root alone.
  void reduce(const at::Tensor& x, int root, const c10d::ReduceOp& op);

  c10::intrusive_ptr<c10d::Work> started();

 private:
  const char* name_;
  int rank_;
  int ranks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

} // namespace shardtensor::detail
