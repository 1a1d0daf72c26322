#include "shardtensor/mpi/backend.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "shardtensor/mpi/call.h"
#include "shardtensor/mpi/session.h"

namespace shardtensor::detail {

namespace {

using c10d::OpType;
using Limit = std::chrono::milliseconds;

// ---- groups -----------------------------------------------------------------

MPI_Comm make_communicator(const std::vector<int>& ranks, int tag) {
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check_mpi(
      MPI_Group_incl(
          world, static_cast<int>(ranks.size()), ranks.data(), &group),
      "MPI_Group_incl");
  check_mpi(
      MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &comm),
      "MPI_Comm_create_group");
  check_mpi(
      MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN),
      "MPI_Comm_set_errhandler");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  return comm;
}

int place_among(const std::vector<int>& ranks) {
  const int me = MpiSession::get().rank();
  const auto found = std::find(ranks.begin(), ranks.end(), me);
  TORCH_CHECK_VALUE(
      found != ranks.end(),
      "mpi: this is rank ",
      me,
      ", which is not in the group of ranks ",
      c10::ArrayRef<int>(ranks));
  return static_cast<int>(found - ranks.begin());
}

} // namespace

MpiBackend::MpiBackend(const std::vector<int>& ranks, Limit limit)
    : Backend(place_among(ranks), static_cast<int>(ranks.size())),
      limit_(limit) {
  const std::lock_guard lock(MpiSession::get().mutex());
  collectives_ = make_communicator(ranks, /*tag=*/1);
  messages_ = make_communicator(ranks, /*tag=*/2);
}

// Note [Communicators are not freed]
// MPI_Comm_free is collective, and groups of PyTorch are dropped by each rank
// when it pleases, also after a failure. They are few; MPI_Finalize frees them.
MpiBackend::~MpiBackend() = default;

// ---- collectives ------------------------------------------------------------

MpiCall MpiBackend::call(const char* name, OpType type, Limit limit) {
  return {
      name,
      type,
      collectives_,
      limit > Limit(0) ? limit : limit_,
      ++calls_,
      rank_,
      size_};
}

MpiBackend::WorkPtr MpiBackend::broadcast(
    Tensors& tensors,
    const c10d::BroadcastOptions& options) {
  auto call = this->call("broadcast", OpType::BROADCAST, options.timeout);
  const auto& x = call.only(tensors);
  const int root = call.checked_rank(options.rootRank);
  if (root == rank_) {
    call.returns(x);
    call.send_all(Tensors(size_, call.reads(x)));
  } else {
    call.receive(call.writes(x), root);
  }
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& options) {
  auto call = this->call("allreduce", OpType::ALLREDUCE, options.timeout);
  call.all_reduce(call.changes(call.only(tensors)), options.reduceOp);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& options) {
  auto call = this->call(
      "allreduce_coalesced", OpType::ALLREDUCE_COALESCED, options.timeout);
  for (const auto& x : tensors) {
    call.all_reduce(call.changes(x), options.reduceOp);
  }
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::reduce(
    Tensors& tensors,
    const c10d::ReduceOptions& options) {
  auto call = this->call("reduce", OpType::REDUCE, options.timeout);
  const auto& x = call.only(tensors);
  const int root = call.checked_rank(options.rootRank);
  if (root == rank_) {
    call.reduce(call.changes(x), root, options.reduceOp);
  } else {
    call.returns(x);
    call.reduce(call.reads(x), root, options.reduceOp);
  }
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(
    Tensors& outputs,
    std::vector<Tensors>& inputs,
    const c10d::ReduceScatterOptions& options) {
  auto call =
      this->call("reduce_scatter", OpType::REDUCE_SCATTER, options.timeout);
  call.reduce_part(
      call.reads_all(call.one_per_rank(inputs)),
      call.writes(call.only(outputs)),
      options.reduceOp);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  auto call = this->call(
      "reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, options.timeout);
  call.reduce_part(call.parts_of(input), call.writes(output), options.reduceOp);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  auto call = this->call(
      "reduce_scatter_tensor_coalesced", OpType::COALESCED, options.timeout);
  for (size_t i = 0; i < outputs.size(); ++i) {
    call.reduce_part(
        call.parts_of(inputs.at(i)), call.writes(outputs[i]), options.reduceOp);
  }
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::allgather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  auto call = this->call("allgather", OpType::ALLGATHER, options.timeout);
  call.all_gather(
      call.writes_all(call.one_per_rank(outputs)),
      call.reads(call.only(inputs)));
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  auto call = this->call(
      "all_gather_into_tensor", OpType::_ALLGATHER_BASE, options.timeout);
  call.all_gather(call.rows_of(output), call.reads(input));
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  auto call = this->call(
      "allgather_into_tensor_coalesced", OpType::COALESCED, options.timeout);
  for (size_t i = 0; i < outputs.size(); ++i) {
    call.all_gather(call.rows_of(outputs[i]), call.reads(inputs.at(i)));
  }
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::gather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::GatherOptions& options) {
  auto call = this->call("gather", OpType::GATHER, options.timeout);
  const auto x = call.reads(call.only(inputs));
  const int root = call.checked_rank(options.rootRank);
  if (root != rank_) {
    call.send(x, root);
    return call.started();
  }
  const auto rows = call.writes_all(call.one_per_rank(outputs));
  rows[rank_].copy_(x);
  call.receive_all(rows);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::scatter(
    Tensors& outputs,
    std::vector<Tensors>& inputs,
    const c10d::ScatterOptions& options) {
  auto call = this->call("scatter", OpType::SCATTER, options.timeout);
  const auto x = call.writes(call.only(outputs));
  const int root = call.checked_rank(options.rootRank);
  if (root != rank_) {
    call.receive(x, root);
    return call.started();
  }
  const auto parts = call.reads_all(call.one_per_rank(inputs));
  x.copy_(parts[rank_]);
  call.send_all(parts);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  auto call =
      this->call("alltoall_base", OpType::ALLTOALL_BASE, options.timeout);
  const auto sent = call.parts_of(input, input_splits);
  call.exchange(call.parts_of(call.writes(output), output_splits), sent);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::alltoall(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllToAllOptions& options) {
  auto call = this->call("alltoall", OpType::ALLTOALL, options.timeout);
  const auto sent = call.reads_all(call.one_per_rank(inputs));
  call.exchange(call.writes_all(call.one_per_rank(outputs)), sent);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  auto call = this->call("barrier", OpType::BARRIER, options.timeout);
  call.barrier();
  return call.started();
}

// ---- point to point ---------------------------------------------------------

MpiCall MpiBackend::message(const char* name, OpType type) const {
  return {name, type, messages_, limit_, /*call=*/0, rank_, size_};
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int rank, int tag) {
  auto call = message("send", OpType::SEND);
  const auto x = call.reads(call.only(tensors));
  call.send(x, call.checked_rank(rank), tag);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int rank, int tag) {
  auto call = message("recv", OpType::RECV);
  const auto x = call.writes(call.only(tensors));
  call.receive(x, call.checked_rank(rank), tag);
  return call.started();
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  auto call = message("recvAnysource", OpType::RECVANYSOURCE);
  call.receive(call.writes(call.only(tensors)), MPI_ANY_SOURCE, tag);
  return call.started();
}

} // namespace shardtensor::detail
