#include "shardtensor/rules/attention/meetings.h"

#include <algorithm>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/collectives/ring.h"
#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/primitives/exchange_code.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

// ---- keys and values as one block -------------------------------------------

/// Side by side: one head after another, or feature by feature where their
/// numbers differ.
Tensor packed(const Keys& keys) {
  const bool alike = keys.key.size(3) == keys.value.size(3);
  return at::cat({keys.key, keys.value}, alike ? kHeads : 3);
}

Keys unpacked(const Tensor& block, const Keys& like) {
  const bool alike = like.key.size(3) == like.value.size(3);
  const int64_t dim = alike ? kHeads : 3;
  const int64_t count = like.key.size(dim);
  return {
      block.narrow(dim, 0, count),
      block.narrow(dim, count, block.size(dim) - count)};
}

std::vector<std::vector<int64_t>> block_sizes(
    const Tensor& own,
    const AttentionWork& work) {
  std::vector<std::vector<int64_t>> sizes;
  for (const auto& rows : work.keys) {
    sizes.push_back(own.sizes().vec());
    sizes.back()[kRows] = extent(rows);
  }
  return sizes;
}

/// All keys on every rank, in order.
std::vector<Rows> all_keys(const AttentionWork& work) {
  return std::vector<Rows>(
      work.keys.size(), Rows{{0, whole_extent(work.keys)}});
}

/// The own block in two parts, to hide messages at both ends of a tour. The
/// second may be empty, as it is where numbers are those of all heads.
struct Halves {
  int64_t dim;
  Interval first;
  Interval second;
};

Halves halves_of(const Tensor& key, const AttentionWork& work) {
  const int64_t dim = key.size(kHeads) > 1 ? kHeads : 0;
  const int64_t all = key.size(dim);
  const int64_t half = work.dropout ? all : (all + 1) / 2;
  return {dim, {0, half}, {half, all}};
}

// ---- a tour of the ring -----------------------------------------------------

Attended attend_on_tour(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  const auto own = packed(keys);
  Attention attention(query, mask, work);
  RingStops stops;
  stops.own = [&] { attention.meet(keys, work.keys[work.rank]); };
  stops.other = [&](int64_t owner, const Tensor& block) {
    attention.meet(unpacked(block, keys), work.keys[owner]);
    return Tensor();
  };
  ring_tour_of_agreed(own, block_sizes(own, work), work.group, stops);
  return attention.result(keys.value.size(3));
}

Keys tour_backward(
    Queries& queries,
    const Keys& keys,
    const AttentionWork& work) {
  const auto own = packed(keys);
  const auto halves = halves_of(keys.key, work);
  const auto options = own.options().dtype(at::toOpMathType(own.scalar_type()));
  const auto sum = at::zeros_like(own, options);
  const auto sums = unpacked(sum, keys);
  const auto meet_own = [&](const Interval& part) {
    auto of_part = queries.part(halves.dim, part, keys.key.size(halves.dim));
    const auto grads = meet_backward(
        of_part, rows_of(keys, part, halves.dim), work.keys[work.rank], work);
    const auto target = rows_of(sums, part, halves.dim);
    target.key.add_(grads.key);
    target.value.add_(grads.value);
  };
  RingStops stops;
  stops.own = [&] { meet_own(halves.first); };
  stops.other = [&](int64_t owner, const Tensor& block) {
    return packed(meet_backward(
                      queries, unpacked(block, keys), work.keys[owner], work))
        .to(own.scalar_type());
  };
  stops.returned = [&](const Tensor& term) { Tensor(sum).add_(term); };
  stops.own_rest = [&] { meet_own(halves.second); };
  ring_tour_of_agreed(own, block_sizes(own, work), work.group, stops);
  return sums;
}

// Note [Tours of some heads]
// A tour holds several blocks at a time: the own one, the one that it computes
// with, the one that comes next, and two of gradients on their way. Long blocks
// go in several tours, each of some heads, so that these are parts of blocks. A
// core loses nothing by that; a GPU's kernels want more heads at a time.
int64_t bytes_of_tour(const Tensor& keys) {
  return int64_t{keys.is_cpu() ? 4 : 16} << 20; // of a block
}

/// Heads of the keys, tour by tour; the same on all ranks.
std::vector<Interval> plan_tours(const Keys& keys, const AttentionWork& work) {
  int64_t rows = 0;
  for (const auto& of_rank : work.keys) {
    rows = std::max(rows, extent(of_rank));
  }
  const auto& key = keys.key;
  const int64_t heads = key.size(kHeads);
  const int64_t of_head = rows * key.size(0) *
      (key.size(3) + keys.value.size(3)) *
      static_cast<int64_t>(key.element_size());
  int64_t tours = 1;
  if (!work.dropout) { // whose numbers are those of all heads
    tours = std::clamp<int64_t>(
        heads * of_head / bytes_of_tour(key), 1, std::max<int64_t>(heads, 1));
  }
  std::vector<Interval> parts;
  for (int64_t tour = 0; tour < tours; ++tour) {
    parts.push_back({heads * tour / tours, heads * (tour + 1) / tours});
  }
  return parts;
}

} // namespace

int64_t whole_extent(const std::vector<Rows>& ranks) {
  int64_t result = 0;
  for (const auto& rows : ranks) {
    result += extent(rows);
  }
  return result;
}

Tensor move_rows(
    const Tensor& x,
    const std::vector<Rows>& from,
    const std::vector<Rows>& to,
    const AttentionWork& work) {
  auto plan = plan_rows(x.sizes().vec(), kRows, from, to, work.rank);
  return exchange_during(x, encode(std::move(plan), Group(work.group)), [] {});
}

Attended attend_here(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  Attention attention(query, mask, work);
  attention.meet(keys, work.keys[work.rank]);
  return attention.result(keys.value.size(3));
}

Keys backward_here(
    Queries& queries,
    const Keys& keys,
    const AttentionWork& work) {
  return meet_backward(queries, keys, work.keys[work.rank], work);
}

Attended attend_in_ring(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  const auto tours = plan_tours(keys, work);
  if (tours.size() == 1) {
    return attend_on_tour(query, keys, mask, work);
  }
  const int64_t each = query.size(kHeads) / keys.key.size(kHeads);
  std::vector<Tensor> outputs;
  std::vector<Tensor> log_sums;
  for (const auto& heads : tours) {
    const Interval own{heads.begin * each, heads.end * each};
    const auto part = attend_on_tour(
        rows_of(query, own, kHeads),
        rows_of(keys, heads, kHeads),
        mask.part(kHeads, own),
        work);
    outputs.push_back(part.output.to(query.scalar_type()));
    log_sums.push_back(part.log_sum);
  }
  return {at::cat(outputs, kHeads), at::cat(log_sums, kHeads)};
}

Keys ring_backward(
    Queries& queries,
    const Keys& keys,
    const AttentionWork& work) {
  queries.start_grad();
  const auto tours = plan_tours(keys, work);
  if (tours.size() == 1) {
    return tour_backward(queries, keys, work);
  }
  const int64_t all = keys.key.size(kHeads);
  const Keys grads{at::empty_like(keys.key), at::empty_like(keys.value)};
  for (const auto& heads : tours) {
    auto of_heads = queries.part(kHeads, heads, all);
    const auto part =
        tour_backward(of_heads, rows_of(keys, heads, kHeads), work);
    const auto target = rows_of(grads, heads, kHeads);
    target.key.copy_(part.key);
    target.value.copy_(part.value);
  }
  return grads;
}

Attended attend_to_gathered(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  const auto all = all_keys(work);
  const auto block = move_rows(packed(keys), work.keys, all, work);
  Attention attention(query, mask, work);
  attention.meet(unpacked(block, keys), all[work.rank]);
  return attention.result(keys.value.size(3));
}

Keys gathered_backward(
    Queries& queries,
    const Keys& keys,
    const AttentionWork& work) {
  const auto all = all_keys(work);
  const auto own = packed(keys);
  const auto gather = encode(
      plan_rows(own.sizes().vec(), kRows, work.keys, all, work.rank),
      Group(work.group));
  const auto block = exchange_during(own, gather, [] {});
  const auto grads =
      meet_backward(queries, unpacked(block, keys), all[work.rank], work);
  return unpacked(
      exchange_during(
          packed(grads).to(own.scalar_type()), adjoint(gather), [] {}),
      keys);
}

Attended attend_and_merge(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  const auto own = attend_here(query, keys, mask, work);
  const std::vector<int64_t> one_each(work.keys.size(), 1);
  const auto log_sums =
      all_gather_rows(own.log_sum.unsqueeze(0), 0, one_each, work.group);
  const auto log_sum = at::logsumexp(log_sums, {0});
  const auto share = (own.log_sum - log_sum)
                         .exp_()
                         .masked_fill_(own.log_sum.isneginf(), 0)
                         .unsqueeze(-1);
  const auto output =
      all_reduce((own.output * share).contiguous(), Reduce::Sum, work.group);
  return {output, log_sum};
}

} // namespace shardtensor::detail
