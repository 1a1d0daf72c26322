#include "shardtensor/comm/gloo_messages.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

namespace shardtensor::detail {
namespace {

constexpr int64_t kSmallBytes = 4096;
constexpr int kFewRanks = 8;

bool is_gloo(c10d::ProcessGroup& group, const at::Tensor& x) {
  return group.getBackend(x.device().type())->getBackendName() == "gloo";
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

} // namespace

bool prefers_messages(
    c10d::ProcessGroup& group,
    const at::Tensor& x,
    int64_t largest) {
  return is_gloo(group, x) &&
      (largest <= kSmallBytes || group.getSize() > kFewRanks);
}

bool prefers_reduced_messages(c10d::ProcessGroup& group, const at::Tensor& x) {
  return is_gloo(group, x) && static_cast<int64_t>(x.nbytes()) <= kSmallBytes &&
      group.getSize() <= kFewRanks;
}

Works start_messages(
    c10d::ProcessGroup& group,
    const RankTensors& out,
    const RankTensors& in) {
  Works works;
  const auto start = [&](const RankTensors& messages, const auto& start_one) {
    for (size_t rank = 0; rank < messages.size(); ++rank) {
      const auto peer = static_cast<int>(rank);
      if (messages[rank].numel() > 0 && peer != group.getRank()) {
        std::vector<at::Tensor> message{messages[rank]};
        works.push_back(start_one(message, peer));
      }
    }
  };
  start(out, [&](auto& message, int peer) {
    return group.recv(message, peer, tag_of(message[0]));
  });
  start(in, [&](auto& message, int peer) {
    return group.send(message, peer, tag_of(message[0]));
  });
  return works;
}

void reduce_rows(const at::Tensor& x, const RankTensors& rows, Reduce reduce) {
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
