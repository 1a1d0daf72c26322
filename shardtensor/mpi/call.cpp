#include "shardtensor/mpi/call.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include <ATen/DeviceAccelerator.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>

namespace shardtensor::detail {

using Tensors = MpiCall::Tensors;

namespace {

constexpr int64_t kSmall = 16 << 10; // bytes

auto kind_of(const c10d::ReduceOp& op) {
  return static_cast<c10d::ReduceOp::RedOpType>(op);
}

void check_reduction(
    const char* name,
    const at::Tensor& x,
    const c10d::ReduceOp& op) {
  const auto kind = kind_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::AVG ||
          kind == c10d::ReduceOp::PRODUCT || kind == c10d::ReduceOp::MAX ||
          kind == c10d::ReduceOp::MIN,
      "mpi: ",
      name,
      " knows sum, avg, product, max and min only");
  TORCH_CHECK_VALUE(
      kind != c10d::ReduceOp::AVG || x.is_floating_point() || x.is_complex(),
      "mpi: ",
      name,
      " (avg) of a ",
      x.scalar_type(),
      " tensor, expected a floating-point or complex one");
}

at::Tensor combine(
    const at::Tensor& a,
    const at::Tensor& b,
    const c10d::ReduceOp& op) {
  switch (kind_of(op)) {
    case c10d::ReduceOp::PRODUCT:
      return at::mul(a, b);
    case c10d::ReduceOp::MAX:
      return at::maximum(a, b);
    case c10d::ReduceOp::MIN:
      return at::minimum(a, b);
    default:
      return at::add(a, b);
  }
}

/// In rank order, so that every rank and every run gets the same bits.
at::Tensor combine_rows(const Tensors& rows, const c10d::ReduceOp& op) {
  at::Tensor result = rows[0];
  for (size_t i = 1; i < rows.size(); ++i) {
    result = combine(result, rows[i], op);
  }
  return kind_of(op) == c10d::ReduceOp::AVG
      ? result / static_cast<double>(rows.size())
      : result;
}

void send_each(
    MpiOperation& operation,
    int rank,
    int ranks,
    const Tensors& parts) {
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks;
    operation.send(parts[to], to);
  }
}

void receive_each(
    MpiOperation& operation,
    int rank,
    int ranks,
    const Tensors& parts) {
  for (int step = 1; step < ranks; ++step) {
    const int from = (rank - step + ranks) % ranks;
    operation.receive(parts[from], from);
  }
}

/// Whether MPI may read x's elements from its memory, and write them there.
bool travels_as_it_is(const at::Tensor& x) {
  return x.is_cpu() && x.is_contiguous();
}

// Note [Device tensors travel through the host]
// As gloo's do: MPI gets host memory, pinned if the device pins any. An MPI
// that reads a device's memory by itself knows nothing of its streams.
at::Tensor host_memory_like(const at::Tensor& x) {
  const bool pinned = x.device().type() == at::getAccelerator();
  return at::empty(
      x.sizes(), x.options().device(at::kCPU).pinned_memory(pinned));
}

} // namespace

MpiCall::MpiCall(
    const char* name,
    c10d::OpType type,
    MPI_Comm comm,
    std::chrono::milliseconds limit,
    uint64_t call,
    int rank,
    int ranks)
    : MpiOperation(type, comm, limit, call),
      name_(name),
      rank_(rank),
      ranks_(ranks) {}

// ---- checks -----------------------------------------------------------------

const at::Tensor& MpiCall::dense(const at::Tensor& x) const {
  TORCH_CHECK_VALUE(
      x.layout() == at::kStrided && !x.is_meta(),
      "mpi: ",
      name_,
      " of a ",
      x.layout(),
      " tensor on ",
      x.device(),
      ", expected a dense one with memory");
  return x;
}

const at::Tensor& MpiCall::only(const Tensors& list) const {
  TORCH_CHECK_VALUE(
      list.size() == 1,
      "mpi: ",
      name_,
      " of ",
      list.size(),
      " tensors, expected 1");
  return dense(list[0]);
}

const Tensors& MpiCall::one_per_rank(const std::vector<Tensors>& lists) const {
  TORCH_CHECK_VALUE(
      lists.size() == 1,
      "mpi: ",
      name_,
      " of ",
      lists.size(),
      " lists of tensors, expected 1");
  return one_per_rank(lists[0]);
}

const Tensors& MpiCall::one_per_rank(const Tensors& list) const {
  TORCH_CHECK_VALUE(
      static_cast<int>(list.size()) == ranks_,
      "mpi: ",
      name_,
      " of a list of ",
      list.size(),
      " tensors, expected ",
      ranks_,
      ", one per rank");
  for (const auto& x : list) {
    dense(x);
  }
  return list;
}

int MpiCall::checked_rank(int64_t rank) const {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < ranks_,
      "mpi: ",
      name_,
      " with rank ",
      rank,
      ", expected one of the group's ",
      ranks_);
  return static_cast<int>(rank);
}

Tensors MpiCall::parts_of(const at::Tensor& x, std::vector<int64_t> splits)
    const {
  dense(x);
  if (splits.empty()) {
    splits.assign(ranks_, x.dim() > 0 ? x.size(0) / ranks_ : 0);
  }
  const auto total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == ranks_ && x.dim() > 0 &&
          total == x.size(0) && x.is_contiguous(),
      "mpi: ",
      name_,
      " of a tensor ",
      x.sizes(),
      " in parts ",
      c10::IntArrayRef(splits),
      ", expected a contiguous one and ",
      ranks_,
      " parts that add up to its first dim");
  return reads(x).split_with_sizes(splits);
}

// ---- what a collective is made of -------------------------------------------

at::Tensor MpiCall::reads(const at::Tensor& x) const {
  const at::Tensor plain = dense(x).detach();
  return travels_as_it_is(plain) ? plain : host_memory_like(plain).copy_(plain);
}

Tensors MpiCall::reads_all(const Tensors& list) const {
  Tensors result;
  std::transform(
      list.begin(), list.end(), std::back_inserter(result), [&](const auto& x) {
        return reads(x);
      });
  return result;
}

at::Tensor MpiCall::writes(const at::Tensor& x) {
  returns(dense(x));
  const at::Tensor plain = x.detach();
  if (travels_as_it_is(plain)) {
    return plain;
  }
  return copies_.emplace_back(plain, host_memory_like(plain)).second;
}

at::Tensor MpiCall::changes(const at::Tensor& x) {
  const at::Tensor result = writes(x);
  return travels_as_it_is(x) ? result : result.copy_(x.detach());
}

Tensors MpiCall::writes_all(const Tensors& list) {
  Tensors result;
  for (const auto& x : list) {
    result.push_back(writes(x));
  }
  return result;
}

Tensors MpiCall::rows_of(const at::Tensor& x) {
  TORCH_CHECK_VALUE(
      x.numel() % ranks_ == 0,
      "mpi: ",
      name_,
      " into a tensor ",
      x.sizes(),
      ", expected one row for each of the ",
      ranks_,
      " ranks");
  return writes(x).view({ranks_, -1}).unbind(0);
}

void MpiCall::send_all(const Tensors& parts) {
  send_each(*this, rank_, ranks_, parts);
}

void MpiCall::receive_all(const Tensors& parts) {
  receive_each(*this, rank_, ranks_, parts);
}

void MpiCall::all_gather(const Tensors& rows, const at::Tensor& x) {
  rows[rank_].copy_(x.reshape_as(rows[rank_]));
  receive_all(rows);
  send_all(Tensors(ranks_, x));
}

void MpiCall::exchange(const Tensors& received, const Tensors& parts) {
  received[rank_].copy_(parts[rank_]);
  receive_all(received);
  send_all(parts);
}

void MpiCall::all_reduce(const at::Tensor& x, const c10d::ReduceOp& op) {
  const auto flat = x.view({-1});
  if (static_cast<int64_t>(x.nbytes()) <= kSmall) {
    reduce_part(Tensors(ranks_, flat), flat, op);
    return;
  }
  const auto parts = flat.tensor_split(ranks_);
  reduce_part(parts, parts[rank_], op);
  then([rank = rank_, ranks = ranks_, parts](MpiOperation& operation) {
    receive_each(operation, rank, ranks, parts);
    send_each(operation, rank, ranks, Tensors(ranks, parts[rank]));
  });
}

void MpiCall::reduce_part(
    const Tensors& parts,
    const at::Tensor& mine,
    const c10d::ReduceOp& op) {
  check_reduction(name_, mine, op);
  auto rows = at::empty({ranks_, mine.numel()}, mine.options()).unbind(0);
  rows[rank_].copy_(parts[rank_].reshape({-1}));
  receive_all(rows);
  send_all(parts);
  then([rows, mine, op](MpiOperation&) {
    mine.copy_(combine_rows(rows, op).view(mine.sizes()));
  });
}

void MpiCall::reduce(const at::Tensor& x, int root, const c10d::ReduceOp& op) {
  check_reduction(name_, x, op);
  if (root != rank_) {
    send(x, root);
    return;
  }
  auto rows = at::empty({ranks_, x.numel()}, x.options()).unbind(0);
  rows[rank_].copy_(x.view({-1}));
  receive_all(rows);
  then([rows, x, op](MpiOperation&) {
    x.copy_(combine_rows(rows, op).view(x.sizes()));
  });
}

c10::intrusive_ptr<c10d::Work> MpiCall::started() {
  if (!copies_.empty()) {
    then([copies = std::move(copies_)](MpiOperation& operation) {
      for (const auto& [original, copy] : copies) {
        original.copy_(copy, /*non_blocking=*/true);
        operation.queued_for(original);
      }
    });
  }
  return c10::make_intrusive<MpiWork>(
      rank_, static_cast<MpiOperation&&>(*this));
}

} // namespace shardtensor::detail
