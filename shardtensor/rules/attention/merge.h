#pragma once

#include <limits>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// The score of a key that a query does not see, and the log_sum of a query
/// that sees none.
constexpr double kUnseen = -std::numeric_limits<double>::infinity();

/// Attention of some queries to some of the keys: the weighted mean of their
/// values, and the logarithm of the sum of the exponentiated scores (without
/// the last dim), kUnseen where a query sees none of these keys.
struct Attended {
  at::Tensor output;
  at::Tensor log_sum;
};

/// `into` becomes the attention to its keys and to those of `part`, in place,
/// in the type of `into`: fp32 for half precision. A query that sees no key at
/// all stays 0.
/// Source: Milakov and Gimelshein 2018, Online normalizer calculation for
/// softmax.
///
/// Example: means 1 and 3 with log_sums log(1) and log(3) make 2.5 and log(4).
void merge(const Attended& into, const Attended& part);

} // namespace shardtensor::detail
