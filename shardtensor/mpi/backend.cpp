#include "shardtensor/mpi/backend.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "shardtensor/mpi/session.h"
#include "shardtensor/mpi/work.h"

namespace shardtensor {

namespace {

using c10d::OpType;
using Limit = std::chrono::milliseconds;

// ---- checks -----------------------------------------------------------------

const at::Tensor& on_cpu(const at::Tensor& x, const char* call) {
  TORCH_CHECK_VALUE(
      x.is_cpu() && x.layout() == at::kStrided,
      "mpi: ",
      call,
      " of a tensor on ",
      x.device(),
      ", expected a dense one on cpu");
  return x;
}

const at::Tensor& only(const std::vector<at::Tensor>& list, const char* call) {
  TORCH_CHECK_VALUE(
      list.size() == 1,
      "mpi: ",
      call,
      " of ",
      list.size(),
      " tensors, expected 1");
  return on_cpu(list[0], call);
}

void check_one_per_rank(
    const std::vector<std::vector<at::Tensor>>& lists,
    int ranks,
    const char* call) {
  TORCH_CHECK_VALUE(
      lists.size() == 1 && static_cast<int>(lists[0].size()) == ranks,
      "mpi: ",
      call,
      " expects one list of ",
      ranks,
      " tensors, one per rank");
}

int checked_rank(int64_t rank, int ranks, const char* call) {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < ranks,
      "mpi: ",
      call,
      " with rank ",
      rank,
      ", expected one of the group's ",
      ranks);
  return static_cast<int>(rank);
}

// ---- steps ------------------------------------------------------------------

void check_reduction(const c10d::ReduceOp& op) {
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::PRODUCT ||
          kind == c10d::ReduceOp::MAX || kind == c10d::ReduceOp::MIN,
      "mpi: allreduce knows sum, product, max and min only");
}

at::Tensor combine(
    const at::Tensor& a,
    const at::Tensor& b,
    const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return at::add(a, b);
    case c10d::ReduceOp::PRODUCT:
      return at::mul(a, b);
    case c10d::ReduceOp::MAX:
      return at::maximum(a, b);
    default:
      return at::minimum(a, b);
  }
}

/// In rank order, so that every rank and every run gets the same bits.
at::Tensor combine_rows(
    const std::vector<at::Tensor>& rows,
    const c10d::ReduceOp& op) {
  at::Tensor result = rows[0];
  for (size_t i = 1; i < rows.size(); ++i) {
    result = combine(result, rows[i], op);
  }
  return result;
}

/// One call: which ranks there are, and tensors made ready to travel.
class Start : public MpiOperation {
 public:
  Start(OpType type, MPI_Comm comm, Limit limit, int rank = 0, int ranks = 1)
      : MpiOperation(type, comm, limit), rank_(rank), ranks_(ranks) {}

  /// A contiguous tensor of which x becomes a copy at the end.
  at::Tensor writes(const at::Tensor& x) {
    if (x.is_contiguous()) {
      return x;
    }
    at::Tensor copy = x.contiguous();
    copies_.emplace_back(x, copy);
    return copy;
  }

  /// parts[p] goes to each other rank p.
  void send_all(const std::vector<at::Tensor>& parts) {
    send_each(*this, rank_, ranks_, parts);
  }
  void receive_all(const std::vector<at::Tensor>& parts) {
    receive_each(*this, rank_, ranks_, parts);
  }

  // Note [Reductions of our own]
  // Open MPI's non-blocking reductions end the process when the ranks' sizes
  // differ, and know no fp16 or bf16. Ours are messages that are checked: small
  // tensors go to everybody at once; of larger ones each rank reduces a part
  // and gives everybody the result, which moves the least.

  void all_reduce(const at::Tensor& x, const c10d::ReduceOp& op) {
    const auto flat = x.view({-1});
    if (static_cast<int64_t>(x.nbytes()) <= kSmall) {
      reduce_part(std::vector<at::Tensor>(ranks_, flat), flat, op);
      return;
    }
    const auto parts = flat.tensor_split(ranks_);
    reduce_part(parts, parts[rank_], op);
    then([rank = rank_, ranks = ranks_, parts](MpiOperation& operation) {
      receive_each(operation, rank, ranks, parts);
      send_each(
          operation, rank, ranks, std::vector<at::Tensor>(ranks, parts[rank]));
    });
  }

  MpiBackend::WorkPtr started(int rank) {
    if (!copies_.empty()) {
      then([copies = std::move(copies_)](MpiOperation&) {
        for (const auto& [original, copy] : copies) {
          original.copy_(copy);
        }
      });
    }
    return c10::make_intrusive<MpiWork>(
        rank, static_cast<MpiOperation&&>(*this));
  }

 private:
  static constexpr int64_t kSmall = 16 << 10; // bytes

  static void send_each(
      MpiOperation& operation,
      int rank,
      int ranks,
      const std::vector<at::Tensor>& parts) {
    for (int step = 1; step < ranks; ++step) {
      const int to = (rank + step) % ranks;
      operation.send(parts[to].contiguous(), to);
    }
  }

  static void receive_each(
      MpiOperation& operation,
      int rank,
      int ranks,
      const std::vector<at::Tensor>& parts) {
    for (int step = 1; step < ranks; ++step) {
      const int from = (rank - step + ranks) % ranks;
      operation.receive(parts[from], from);
    }
  }

  /// Sends parts[p] to each rank p and reduces what arrives into `mine`.
  void reduce_part(
      const std::vector<at::Tensor>& parts,
      const at::Tensor& mine,
      const c10d::ReduceOp& op) {
    auto rows = at::empty({ranks_, mine.numel()}, mine.options()).unbind(0);
    rows[rank_] = mine;
    receive_all(rows);
    send_all(parts);
    then([rows, mine, op](MpiOperation&) {
      mine.copy_(combine_rows(rows, op));
    });
  }

  int rank_;
  int ranks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

Limit limit_of(Limit asked, Limit otherwise) {
  return asked > Limit(0) ? asked : otherwise;
}

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

/// Part r of x is the elements for or from rank r.
std::vector<at::Tensor> parts_of(
    const at::Tensor& x,
    std::vector<int64_t> splits,
    int ranks) {
  if (splits.empty()) {
    splits.assign(ranks, x.numel() / ranks);
  }
  const auto total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == ranks && total == x.size(0) &&
          x.is_contiguous(),
      "mpi: alltoall_base of a tensor ",
      x.sizes(),
      " in parts ",
      c10::IntArrayRef(splits),
      ", expected a contiguous one and ",
      ranks,
      " parts that add up to its first dim");
  return x.split_with_sizes(splits);
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

MpiBackend::WorkPtr MpiBackend::broadcast(
    Tensors& tensors,
    const c10d::BroadcastOptions& options) {
  const auto& x = only(tensors, "broadcast");
  const int root = checked_rank(options.rootRank, size_, "broadcast");
  Start start(
      OpType::BROADCAST,
      collectives_,
      limit_of(options.timeout, limit_),
      rank_,
      size_);
  const auto flat = start.writes(x);
  if (root == rank_) {
    start.send_all(Tensors(size_, flat));
  } else {
    start.receive(flat, root);
  }
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& options) {
  const auto& x = only(tensors, "allreduce");
  check_reduction(options.reduceOp);
  Start start(
      OpType::ALLREDUCE,
      collectives_,
      limit_of(options.timeout, limit_),
      rank_,
      size_);
  start.all_reduce(start.writes(x), options.reduceOp);
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::allgather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  const auto& x = only(inputs, "allgather");
  check_one_per_rank(outputs, size_, "allgather");
  Start start(
      OpType::ALLGATHER,
      collectives_,
      limit_of(options.timeout, limit_),
      rank_,
      size_);
  Tensors rows;
  for (const auto& output : outputs[0]) {
    rows.push_back(start.writes(on_cpu(output, "allgather")));
  }
  rows[rank_].copy_(x);
  start.receive_all(rows);
  start.send_all(Tensors(size_, x.contiguous()));
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::gather(
    std::vector<Tensors>& outputs,
    Tensors& inputs,
    const c10d::GatherOptions& options) {
  const auto& x = only(inputs, "gather");
  const int root = checked_rank(options.rootRank, size_, "gather");
  Start start(
      OpType::GATHER,
      collectives_,
      limit_of(options.timeout, limit_),
      rank_,
      size_);
  if (root != rank_) {
    start.send(x.contiguous(), root);
    return start.started(rank_);
  }
  check_one_per_rank(outputs, size_, "gather");
  Tensors rows;
  for (const auto& output : outputs[0]) {
    rows.push_back(start.writes(on_cpu(output, "gather")));
  }
  rows[rank_].copy_(x);
  start.receive_all(rows);
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::scatter(
    Tensors& outputs,
    std::vector<Tensors>& inputs,
    const c10d::ScatterOptions& options) {
  const auto& x = only(outputs, "scatter");
  const int root = checked_rank(options.rootRank, size_, "scatter");
  Start start(
      OpType::SCATTER,
      collectives_,
      limit_of(options.timeout, limit_),
      rank_,
      size_);
  if (root != rank_) {
    start.receive(start.writes(x), root);
    return start.started(rank_);
  }
  check_one_per_rank(inputs, size_, "scatter");
  for (const auto& input : inputs[0]) {
    on_cpu(input, "scatter");
  }
  x.copy_(inputs[0][rank_]);
  start.send_all(inputs[0]);
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  const auto sent =
      parts_of(on_cpu(input, "alltoall_base"), input_splits, size_);
  const auto received =
      parts_of(on_cpu(output, "alltoall_base"), output_splits, size_);
  Start start(
      OpType::ALLTOALL_BASE,
      collectives_,
      limit_of(options.timeout, limit_),
      rank_,
      size_);
  start.receive_all(received);
  start.send_all(sent);
  received[rank_].copy_(sent[rank_]);
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  Start start(
      OpType::BARRIER,
      collectives_,
      limit_of(options.timeout, limit_),
      rank_,
      size_);
  start.barrier();
  return start.started(rank_);
}

// ---- point to point ---------------------------------------------------------

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int rank, int tag) {
  const auto& x = only(tensors, "send");
  Start start(OpType::SEND, messages_, limit_);
  start.send(x.contiguous(), checked_rank(rank, size_, "send"), tag);
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int rank, int tag) {
  const auto& x = only(tensors, "recv");
  Start start(OpType::RECV, messages_, limit_);
  start.receive(start.writes(x), checked_rank(rank, size_, "recv"), tag);
  return start.started(rank_);
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  const auto& x = only(tensors, "recvAnysource");
  Start start(OpType::RECVANYSOURCE, messages_, limit_);
  start.receive(start.writes(x), MPI_ANY_SOURCE, tag);
  return start.started(rank_);
}

} // namespace shardtensor
