#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/attention/work.h"

namespace shardtensor::detail {

// What a rank's queries compute with one block of keys after another; no
// communication.

constexpr int64_t kHeads = 1;
constexpr int64_t kRows = 2;

at::Tensor rows_of(
    const at::Tensor& x,
    const Interval& rows,
    int64_t dim = kRows);
Keys rows_of(const Keys& keys, const Interval& rows, int64_t dim = kRows);

/// The attention of this rank's queries to the keys met so far.
class Attention {
 public:
  Attention(
      const at::Tensor& query,
      const Mask& mask,
      const AttentionWork& work)
      : query_(query), mask_(mask), work_(work) {}

  void meet(const Keys& keys, const Rows& rows);

  /// Of these features, the sum in the type of sums.
  Attended result(int64_t features);

 private:
  void add(const Product& product, const Attended& part);
  void start(int64_t features);

  at::Tensor query_;
  Mask mask_;
  const AttentionWork& work_;
  Attended all_;
};

/// Queries with all that their gradients come from, and those that grow.
struct Queries : AttendedQueries {
  Mask mask;
  at::Tensor query_grad; // undefined: nothing yet
  at::Tensor mask_grad; // undefined unless wanted

  /// For parts of it.
  void start_grad();

  /// Those that meet keys [begin, end) of `of` along a dim of batch or heads.
  Queries part(int64_t dim, const Interval& keys, int64_t of) const;
};

/// What queries contribute to the gradients of a block's keys and values; adds
/// to their own.
Keys meet_backward(
    Queries& queries,
    const Keys& keys,
    const Rows& rows,
    const AttentionWork& work);

} // namespace shardtensor::detail
