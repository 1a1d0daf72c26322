#include "shardtensor/rules/attention/work.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include "shardtensor/rules/attention/meetings.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

Mask seen_by(const Tensor& query, const Tensor& mask) {
  return {mask, hidden_rows(mask, query)};
}

/// What a profile shows.
const char* name_of(Meeting meeting, bool backward) {
  switch (meeting) {
    case Meeting::Ring:
      return backward ? "shardtensor::attention_ring_backward"
                      : "shardtensor::attention_ring";
    case Meeting::AllGather:
      return backward ? "shardtensor::attention_all_gather_backward"
                      : "shardtensor::attention_all_gather";
    default:
      return backward ? "shardtensor::attention_backward"
                      : "shardtensor::attention";
  }
}

/// The work on rows in zigzag.
AttentionWork in_zigzag(const AttentionWork& work) {
  auto result = work;
  const auto ranks = static_cast<int64_t>(work.keys.size());
  result.balanced = false;
  result.queries = zigzag(whole_extent(work.queries), ranks);
  result.keys = zigzag(whole_extent(work.keys), ranks);
  return result;
}

} // namespace

Attended attend_all(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& mask,
    const AttentionWork& work) {
  RECORD_FUNCTION(name_of(work.meeting, false), std::vector<c10::IValue>());
  if (!work.balanced) {
    auto all = meet_all(query, {key, value}, seen_by(query, mask), work);
    all.output = all.output.to(query.scalar_type());
    return all;
  }
  const auto moved = in_zigzag(work);
  const Keys keys{key, value};
  const auto all = attend_all(
      move_rows(query, work.queries, moved.queries, work),
      move_rows(key, work.keys, moved.keys, work),
      move_rows(value, work.keys, moved.keys, work),
      mask,
      moved);
  const auto back = [&](const Tensor& x) {
    return move_rows(x, moved.queries, work.queries, work);
  };
  return {back(all.output), back(all.log_sum.unsqueeze(-1)).squeeze(-1)};
}

AttentionGradients attend_all_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& mask,
    const Attended& all,
    bool wants_mask,
    const AttentionWork& work) {
  RECORD_FUNCTION(name_of(work.meeting, true), std::vector<c10::IValue>());
  if (!work.balanced) {
    const auto options =
        query.options().dtype(at::toOpMathType(query.scalar_type()));
    Queries queries{
        query,
        grad,
        all,
        seen_by(query, mask),
        at::zeros_like(query, options),
        Tensor()};
    if (wants_mask) {
      queries.mask_grad = at::zeros_like(mask, options);
    }
    const auto keys = meet_all_backward(queries, {key, value}, work);
    return {
        queries.query_grad.to(query.scalar_type()),
        keys.key.to(key.scalar_type()),
        keys.value.to(value.scalar_type()),
        wants_mask ? queries.mask_grad.to(mask.scalar_type()) : Tensor()};
  }
  const auto moved = in_zigzag(work);
  const auto away = [&](const Tensor& x) {
    return move_rows(x, work.queries, moved.queries, work);
  };
  const auto keys_away = [&](const Tensor& x) {
    return move_rows(x, work.keys, moved.keys, work);
  };
  const auto keys_back = [&](const Tensor& x) {
    return move_rows(x, moved.keys, work.keys, work);
  };
  const auto grads = attend_all_backward(
      away(grad),
      away(query),
      keys_away(key),
      keys_away(value),
      mask,
      {away(all.output), away(all.log_sum.unsqueeze(-1)).squeeze(-1)},
      wants_mask,
      moved);
  return {
      move_rows(grads.query, moved.queries, work.queries, work),
      keys_back(grads.key),
      keys_back(grads.value),
      grads.mask};
}

} // namespace shardtensor::detail
