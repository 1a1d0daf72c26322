#include "shardtensor/comm/messages.h"

#include <exception>
#include <mutex>
#include <unordered_map>

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/debug.h>

namespace shardtensor::detail {
namespace {

constexpr int64_t kSmallBytes = 4096;
constexpr int kFewRanks = 8;
// With more peers than this share of a group, a collective is as good.
constexpr int64_t kRanksPerPeer = 4;

// Note [Messages in PyTorch's debug level]
// Under TORCH_DISTRIBUTED_DEBUG=DETAIL PyTorch compares before each collective
// how many calls each rank has made of the group, messages among them. All
// ranks make the same collectives, but have their own number of peers.
bool counts_messages() {
  return c10d::debug_level() == c10d::DebugLevel::Detail;
}

/// gloo's collectives take CUDA tensors by way of the host, its messages do
/// not.
bool sends_over_gloo(c10d::ProcessGroup& group, const at::Tensor& x) {
  return x.is_cpu() && group.getBackend(c10::kCPU)->getBackendName() == "gloo";
}

// Note [Tags over gloo]
// gloo takes a shorter message than expected for a good one, and a longer one
// ends the process. So a message's tag says its size: where ranks make
// different calls nothing is taken, and the time limit says so.
int tag_of(const at::Tensor& message) {
  constexpr int64_t kFirst = 1 << 16; // apart from what users send
  constexpr int64_t kTags = int64_t{1} << 30;
  return static_cast<int>(
      kFirst + static_cast<int64_t>(message.nbytes()) % kTags);
}

/// False where the group is new.
bool note_meeting(c10d::ProcessGroup& group) {
  using Met = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  static std::mutex mutex;
  static auto& met = *new std::unordered_map<c10d::ProcessGroup*, Met>();
  const std::lock_guard lock(mutex);
  const auto self =
      c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(
          &group);
  const auto [entry, is_new] = met.try_emplace(&group, self);
  if (is_new || entry->second.lock() != self) {
    entry->second = Met(self);
    return false;
  }
  return true;
}

// Note [First messages]
// NCCL makes a group's communicator in its first operation, which all ranks
// must take part in; ranks without peers have no messages. So a number is
// reduced first. An all-to-all would connect all pairs of ranks.
void meet(c10d::ProcessGroup& group, const at::Tensor& x) {
  if (note_meeting(group)) {
    return;
  }
  std::vector<at::Tensor> number{at::zeros({1}, x.options().dtype(at::kFloat))};
  if (const auto work = group.allreduce(number)) {
    work->wait();
  }
}

} // namespace

bool is_queued(c10d::ProcessGroup& group, const at::Tensor& x) {
  try {
    return group.getBackend(x.device().type())->supportsCoalescing();
  } catch (const c10::Error&) {
    const auto known = group.getDeviceTypes();
    TORCH_CHECK_VALUE(
        false,
        "shardtensor: the process group has no messages for tensors on ",
        x.device().type(),
        ", but for those on ",
        known.empty() ? "no device" : c10::str(known.front()));
  }
}

bool prefers_messages(
    c10d::ProcessGroup& group,
    const at::Tensor& x,
    Traffic traffic) {
  if (counts_messages()) {
    return false;
  }
  const int64_t ranks = group.getSize();
  if (sends_over_gloo(group, x)) {
    const auto size = static_cast<int64_t>(x.element_size());
    return !traffic.largest || *traffic.largest * size <= kSmallBytes ||
        ranks > kFewRanks;
  }
  if (is_queued(group, x)) {
    return traffic.peers >= 0 && traffic.peers < ranks;
  }
  return ranks > kFewRanks && traffic.peers >= 0 &&
      traffic.peers * kRanksPerPeer <= ranks;
}

bool prefers_messages_of_all(c10d::ProcessGroup& group, const at::Tensor& x) {
  return !counts_messages() && sends_over_gloo(group, x) &&
      static_cast<int64_t>(x.nbytes()) <= kSmallBytes &&
      group.getSize() <= kFewRanks;
}

Works start_messages(
    c10d::ProcessGroup& group,
    const at::Tensor& x,
    const RankTensors& out,
    const RankTensors& in) {
  Works works;
  const bool together = is_queued(group, x);
  if (together) {
    meet(group, x);
    group.startCoalescing(x.device().type());
  }
  std::exception_ptr error;
  const auto start = [&](const RankTensors& messages, const auto& start_one) {
    for (const auto& [rank, tensor] : messages) {
      std::vector<at::Tensor> message{tensor};
      try {
        works.push_back({start_one(message, static_cast<int>(rank)), rank});
      } catch (...) {
        // A rank that is gone: those that are left shall not wait for us.
        error = error ? error : std::current_exception();
      }
    }
  };
  start(out, [&](auto& message, int peer) {
    return group.recv(message, peer, tag_of(message[0]));
  });
  start(in, [&](auto& message, int peer) {
    return group.send(message, peer, tag_of(message[0]));
  });
  if (together) {
    try {
      works = {{group.endCoalescing(x.device().type())}};
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return works;
}

void reduce_rows(
    const at::Tensor& x,
    const std::vector<at::Tensor>& rows,
    Reduce reduce) {
  at::Tensor result = x;
  result.copy_(rows[0]);
  for (size_t rank = 1; rank < rows.size(); ++rank) {
    switch (reduce) {
      case Reduce::Prod:
        result.mul_(rows[rank]);
        break;
      case Reduce::Max:
        at::maximum_out(result, result, rows[rank]);
        break;
      case Reduce::Min:
        at::minimum_out(result, result, rows[rank]);
        break;
      default:
        result.add_(rows[rank]);
    }
  }
}

} // namespace shardtensor::detail
