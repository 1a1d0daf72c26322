#include "shardtensor/rules/attention/dropout.h"

#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

at::Tensor draw_kept(
    const at::Tensor& like,
    const AttentionDropout& dropout,
    const GlobalIndex& index) {
  const double kept = 1 - dropout.probability;
  const Distribution stays{Distribution::Kind::Bernoulli, kept};
  return counter_numbers(like.sizes(), at::kBool, dropout.key, stays, index)
      .to(like.scalar_type())
      .mul_(1 / kept);
}

} // namespace

at::Tensor kept_in_block(
    const at::Tensor& weights,
    const AttentionDropout& dropout,
    const Interval& rows,
    const Interval& columns) {
  auto index = dropout.heads;
  const int64_t scores = dropout.queries * dropout.keys; // of one head
  for (auto& stride : index.strides) {
    stride *= scores;
  }
  index.offset =
      index.offset * scores + rows.begin * dropout.keys + columns.begin;
  index.sizes.insert(index.sizes.end(), {rows.extent(), columns.extent()});
  index.strides.insert(index.strides.end(), {dropout.keys, 1});
  return draw_kept(weights, dropout, index);
}

at::Tensor kept_in_all(
    const at::Tensor& weights,
    const AttentionDropout& dropout) {
  const auto& own = spec(weights);
  const auto& local = impl_of(weights)->local();
  return wrap(draw_kept(local, dropout, global_index(*own)), own);
}

} // namespace shardtensor::detail
