#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/interval.h"
#include "shardtensor/rules/random/counter_numbers.h"

namespace shardtensor::detail {

/// The weights that an attention drops, by Note [Counter numbers]: those that
/// dropout drops of all weights, in whichever block they are computed.
struct AttentionDropout {
  double probability = 0;
  at::Tensor key; // undefined where nothing is dropped
  GlobalIndex heads; // where this rank's batch dims and heads stand among all
  int64_t queries = 0; // of all ranks
  int64_t keys = 0;

  explicit operator bool() const {
    return key.defined();
  }
};

/// What a block of weights is multiplied by: 0 where one is dropped, else
/// 1 / (1 - probability). `rows` and `columns` are those of the whole
/// sequences.
at::Tensor kept_in_block(
    const at::Tensor& weights,
    const AttentionDropout& dropout,
    const Interval& rows,
    const Interval& columns);

/// The same of all weights, a ShardTensor; `dropout` needs a key alone.
at::Tensor kept_in_all(
    const at::Tensor& weights,
    const AttentionDropout& dropout);

} // namespace shardtensor::detail
