#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/plans/transfer.h"

namespace shardtensor::detail {

/// The rows of a sequence that a rank holds: global intervals in the order of
/// its local rows.
using Rows = std::vector<Interval>;

int64_t extent(const Rows& rows);

/// One call of a local kernel: queries and keys that it takes, as local rows.
/// Causal: the i-th of these queries sees the first i + 1 of these keys; else
/// each sees all.
struct Product {
  Interval queries;
  Interval keys;
  Interval columns; // the keys as rows of the whole sequence, for masks
  Interval rows; // the queries as rows of the whole sequence
  bool causal = false;

  bool operator==(const Product&) const = default;
};

/// What a rank with these queries computes with a block of these keys. Causal:
/// query i sees the keys j <= i, by global rows. Never an empty product.
///
/// Example: queries [4, 8) and keys [2, 6), causal: all four queries see keys 2
/// and 3, and keys 4 and 5 causally.
std::vector<Product> plan_products(
    const Rows& queries,
    const Rows& keys,
    bool causal);

/// The first and the last of what is left of 2 * ranks chunks, rank by rank:
/// under a causal mask the same work on every rank, with the keys of any rank.
///
/// Example: 8 rows on 2 ranks are [0, 2), [6, 8) and [2, 4), [4, 6).
std::vector<Rows> zigzag(int64_t extent, int64_t ranks);

/// Gives every rank of a group the rows of dim that `to` names, of which
/// `from` says who holds them; `sizes` are those of this rank's tensor. A row
/// that several ranks want goes to each of them.
ExchangePlan plan_rows(
    std::vector<int64_t> sizes,
    int64_t dim,
    const std::vector<Rows>& from,
    const std::vector<Rows>& to,
    int64_t rank);

} // namespace shardtensor::detail
