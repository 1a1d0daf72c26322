#include "shardtensor/rules/attention/work_op.h"

#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "shardtensor/comm/own_operator.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;
using Optional = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

/// All but scale, group and what dropout draws with, as the integers that an
/// operator takes: meeting, flags, rank, number of ranks, then the intervals of
/// every rank's queries, and of its keys, each list with its length, and where
/// dropout's numbers stand.
Numbers encode(const AttentionWork& work) {
  Numbers code{
      static_cast<int64_t>(work.meeting),
      work.causal,
      work.balanced,
      work.rank,
      static_cast<int64_t>(work.keys.size())};
  for (const auto* ranks : {&work.queries, &work.keys}) {
    for (const auto& rows : *ranks) {
      code.push_back(static_cast<int64_t>(rows.size()));
      for (const auto& interval : rows) {
        code.insert(code.end(), {interval.begin, interval.end});
      }
    }
  }
  const auto& [probability, key, heads, all_queries, all_keys] = work.dropout;
  code.insert(code.end(), {all_queries, all_keys, heads.offset});
  code.push_back(static_cast<int64_t>(heads.sizes.size()));
  code.insert(code.end(), heads.sizes.begin(), heads.sizes.end());
  code.insert(code.end(), heads.strides.begin(), heads.strides.end());
  return code;
}

AttentionWork decode(
    c10::IntArrayRef code,
    double scale,
    double dropout,
    const Optional& dropout_key,
    std::string group) {
  const auto* next = code.begin();
  AttentionWork work;
  work.meeting = static_cast<Meeting>(*next++);
  work.causal = *next++ != 0;
  work.balanced = *next++ != 0;
  work.rank = *next++;
  const int64_t ranks = *next++;
  for (auto* lists : {&work.queries, &work.keys}) {
    lists->resize(ranks);
    for (auto& rows : *lists) {
      rows.resize(*next++);
      for (auto& interval : rows) {
        interval.begin = *next++;
        interval.end = *next++;
      }
    }
  }
  work.dropout.probability = dropout;
  work.dropout.key = dropout_key.value_or(Tensor());
  work.dropout.queries = *next++;
  work.dropout.keys = *next++;
  work.dropout.heads.offset = *next++;
  const int64_t dims = *next++;
  work.dropout.heads.sizes.assign(next, next + dims);
  work.dropout.heads.strides.assign(next + dims, next + 2 * dims);
  work.scale = scale;
  work.group = std::move(group);
  return work;
}

Mask mask_for(const Optional& mask, const Tensor& query) {
  const auto added = mask.value_or(Tensor());
  return {added, hidden_rows(added, query)};
}

Tensor contiguous(const Tensor& x) {
  return x.contiguous();
}

Tensors forward_kernel(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Optional& mask,
    c10::IntArrayRef code,
    double scale,
    double dropout,
    const Optional& dropout_key,
    std::string group) {
  const auto all = attend_all(
      query,
      {key, value},
      mask_for(mask, query),
      decode(code, scale, dropout, dropout_key, std::move(group)));
  return {contiguous(all.output), contiguous(all.log_sum)};
}

Tensors forward_meta(
    const Tensor& query,
    const Tensor&,
    const Tensor& value,
    const Optional&,
    c10::IntArrayRef,
    double,
    double,
    const Optional&,
    std::string) {
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  const auto options = query.options();
  const auto output = at::empty(sizes, options);
  sizes.pop_back();
  return {
      output,
      at::empty(sizes, options.dtype(at::toOpMathType(query.scalar_type())))};
}

Tensors backward_kernel(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Optional& mask,
    const Tensor& output,
    const Tensor& log_sum,
    bool wants_mask,
    c10::IntArrayRef code,
    double scale,
    double dropout,
    const Optional& dropout_key,
    std::string group) {
  const auto grads = attend_all_backward(
      {query, {output, log_sum}, grad},
      {key, value},
      mask_for(mask, query),
      wants_mask,
      decode(code, scale, dropout, dropout_key, std::move(group)));
  Tensors results{
      contiguous(grads.query), contiguous(grads.key), contiguous(grads.value)};
  if (wants_mask) {
    results.push_back(contiguous(grads.mask));
  }
  return results;
}

Tensors backward_meta(
    const Tensor&,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Optional& mask,
    const Tensor&,
    const Tensor&,
    bool wants_mask,
    c10::IntArrayRef,
    double,
    double,
    const Optional&,
    std::string) {
  const auto like = [](const Tensor& x) {
    return at::empty(x.sizes(), x.options());
  };
  Tensors results{like(query), like(key), like(value)};
  if (wants_mask) {
    results.push_back(like(*mask));
  }
  return results;
}

Optional optional(const Tensor& x) {
  return x.defined() ? Optional(x) : std::nullopt;
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("attention", forward_kernel);
  m.impl("attention_backward", backward_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("attention", forward_meta);
  m.impl("attention_backward", backward_meta);
}

} // namespace

Attended attend_as_operator(
    const Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work) {
  static const auto op =
      find_own_operator<decltype(forward_kernel)>("shardtensor::attention");
  const auto result = op.call(
      query,
      keys.key,
      keys.value,
      optional(mask.added),
      encode(work),
      work.scale,
      work.dropout.probability,
      optional(work.dropout.key),
      work.group);
  return {result[0], result[1]};
}

AttentionGradients backward_as_operator(
    const AttendedQueries& queries,
    const Keys& keys,
    const Mask& mask,
    bool wants_mask,
    const AttentionWork& work) {
  static const auto op = find_own_operator<decltype(backward_kernel)>(
      "shardtensor::attention_backward");
  const auto result = op.call(
      queries.grad,
      queries.query,
      keys.key,
      keys.value,
      optional(mask.added),
      queries.all.output,
      queries.all.log_sum,
      wants_mask,
      encode(work),
      work.scale,
      work.dropout.probability,
      optional(work.dropout.key),
      work.group);
  return {result[0], result[1], result[2], wants_mask ? result[3] : Tensor()};
}

} // namespace shardtensor::detail
