#include "shardtensor/comm/ring.h"

#include <utility>

#include <torch/library.h>

#include "shardtensor/comm/exchange.h"
#include "shardtensor/comm/exchange_code.h"
#include "shardtensor/comm/group.h"

namespace shardtensor {

using namespace detail;

namespace {

/// In [0, ranks), as Python's % has it.
int64_t modulo(int64_t rank, int64_t ranks) {
  return (rank % ranks + ranks) % ranks;
}

} // namespace

at::Tensor ring_step(
    const at::Tensor& x,
    int64_t step,
    c10::IntArrayRef receive_sizes,
    const std::string& group_name) {
  const Group group(group_name);
  const int64_t next = modulo(group.rank() + step, group.ranks());
  const int64_t last = modulo(group.rank() - step, group.ranks());
  TORCH_CHECK_VALUE(
      next != group.rank() || x.sizes() == receive_sizes,
      "ring_step: a rank that sends to itself receives a tensor of sizes ",
      x.sizes(),
      ", receive_sizes is ",
      receive_sizes);
  const Box sent = whole_box(x.sizes());
  const Box received = whole_box(receive_sizes);
  ExchangePlan plan;
  plan.source_sizes = x.sizes().vec();
  plan.target_sizes = receive_sizes.vec();
  plan.sends.push_back({group.rank(), next, sent, sent});
  plan.receives.push_back({last, group.rank(), received, received});
  plan.covers = true;
  // No rank knows the others' sizes: one round, whatever the size.
  plan.largest_message = next == group.rank() ? 0 : 1;
  return exchange(x, encode(std::move(plan), group));
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("ring_step", ring_step);
}

} // namespace shardtensor
