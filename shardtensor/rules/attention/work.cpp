#include "shardtensor/rules/attention/work.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include "shardtensor/rules/attention/meetings.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

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

// ---- rows where they are ----------------------------------------------------

Attended attend_in_place(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  const auto attend = work.meeting == Meeting::Ring ? attend_in_ring
      : work.meeting == Meeting::AllGather          ? attend_to_gathered
      : work.meeting == Meeting::Merge              ? attend_and_merge
                                                    : attend_here;
  auto all = attend(query, keys, mask, work);
  all.output = all.output.to(query.scalar_type());
  return all;
}

AttentionGradients backward_in_place(
    const AttendedQueries& queries,
    const Keys& keys,
    const Mask& mask,
    bool wants_mask,
    const AttentionWork& work) {
  const auto type = queries.query.scalar_type();
  const auto options = queries.query.options().dtype(at::toOpMathType(type));
  Queries meeting{
      queries,
      mask,
      Tensor(),
      wants_mask ? at::zeros_like(mask.added, options) : Tensor()};
  const auto backward = work.meeting == Meeting::Ring ? ring_backward
      : work.meeting == Meeting::AllGather            ? gathered_backward
                                                      : backward_here;
  const auto of_keys = backward(meeting, keys, work);
  meeting.start_grad(); // where no query met a key
  return {
      meeting.query_grad.to(type),
      of_keys.key.to(keys.key.scalar_type()),
      of_keys.value.to(keys.value.scalar_type()),
      wants_mask ? meeting.mask_grad.to(mask.added.scalar_type()) : Tensor()};
}

// ---- rows in zigzag ---------------------------------------------------------

/// The work on them, and the ways there and back.
struct Zigzag {
  explicit Zigzag(const AttentionWork& given) : from(given), work(given) {
    const auto ranks = static_cast<int64_t>(given.keys.size());
    work.queries = zigzag(whole_extent(given.queries), ranks);
    work.keys = zigzag(whole_extent(given.keys), ranks);
  }
  Tensor queries(const Tensor& x) const {
    return move_rows(x, from.queries, work.queries, work);
  }
  Keys keys(const Keys& x) const {
    return {
        move_rows(x.key, from.keys, work.keys, work),
        move_rows(x.value, from.keys, work.keys, work)};
  }
  Attended queries(const Attended& x) const {
    return {queries(x.output), queries(x.log_sum.unsqueeze(-1)).squeeze(-1)};
  }
  Tensor queries_back(const Tensor& x) const {
    return move_rows(x, work.queries, from.queries, work);
  }
  Attended queries_back(const Attended& x) const {
    return {
        queries_back(x.output),
        queries_back(x.log_sum.unsqueeze(-1)).squeeze(-1)};
  }
  Tensor key_back(const Tensor& x) const {
    return move_rows(x, work.keys, from.keys, work);
  }

  const AttentionWork& from;
  AttentionWork work;
};

/// A causal attention has no mask.
Attended attend_balanced(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  const Zigzag moved(work);
  return moved.queries_back(attend_in_place(
      moved.queries(query), moved.keys(keys), mask, moved.work));
}

AttentionGradients backward_balanced(
    const AttendedQueries& queries,
    const Keys& keys,
    const Mask& mask,
    bool wants_mask,
    const AttentionWork& work) {
  const Zigzag moved(work);
  const auto grads = backward_in_place(
      {moved.queries(queries.query),
       moved.queries(queries.all),
       moved.queries(queries.grad)},
      moved.keys(keys),
      mask,
      wants_mask,
      moved.work);
  return {
      moved.queries_back(grads.query),
      moved.key_back(grads.key),
      moved.key_back(grads.value),
      grads.mask};
}

} // namespace

Attended attend_all(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  RECORD_FUNCTION(name_of(work.meeting, false), std::vector<c10::IValue>());
  const auto attend = work.balanced ? attend_balanced : attend_in_place;
  return attend(query, keys, mask, work);
}

AttentionGradients attend_all_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    const Mask& mask,
    bool wants_mask,
    const AttentionWork& work) {
  RECORD_FUNCTION(name_of(work.meeting, true), std::vector<c10::IValue>());
  const auto backward = work.balanced ? backward_balanced : backward_in_place;
  return backward(queries, keys, mask, wants_mask, work);
}

} // namespace shardtensor::detail
