#include "shardtensor/rules/attention/rows.h"

#include <algorithm>

namespace shardtensor::detail {
namespace {

/// The keys that all of the queries see, and below them the diagonal.
void add_causal(
    const Interval& queries,
    const Interval& keys,
    int64_t first_query,
    int64_t first_key,
    std::vector<Product>& products) {
  const int64_t first = std::max(queries.begin, keys.begin);
  if (first >= queries.end) {
    return;
  }
  const auto local = [&](int64_t begin, int64_t end) {
    return Interval{begin, end}.shifted(first_key - keys.begin);
  };
  const auto seeing =
      Interval{first, queries.end}.shifted(first_query - queries.begin);
  const int64_t diagonal = std::min(first, keys.end);
  if (diagonal > keys.begin) {
    products.push_back(
        {seeing,
         local(keys.begin, diagonal),
         {keys.begin, diagonal},
         {first, queries.end},
         false});
  }
  if (keys.end > first) {
    products.push_back(
        {seeing,
         local(first, keys.end),
         {first, keys.end},
         {first, queries.end},
         true});
  }
}

/// Boxes along dim where `mine` and `theirs` hold the same rows.
template <class Add>
void for_common_rows(const Rows& mine, const Rows& theirs, const Add& add) {
  int64_t my_row = 0;
  for (const auto& a : mine) {
    int64_t their_row = 0;
    for (const auto& b : theirs) {
      const auto common = intersect(a, b);
      if (!common.empty()) {
        add(common.shifted(my_row - a.begin),
            common.shifted(their_row - b.begin));
      }
      their_row += b.extent();
    }
    my_row += a.extent();
  }
}

Box box_of(const std::vector<int64_t>& sizes, int64_t dim, Interval rows) {
  Box box;
  for (const int64_t size : sizes) {
    box.push_back({0, size});
  }
  box[dim] = rows;
  return box;
}

} // namespace

int64_t extent(const Rows& rows) {
  int64_t result = 0;
  for (const auto& interval : rows) {
    result += interval.extent();
  }
  return result;
}

std::vector<Product> plan_products(
    const Rows& queries,
    const Rows& keys,
    bool causal) {
  std::vector<Product> products;
  int64_t query = 0;
  for (const auto& q : queries) {
    int64_t key = 0;
    for (const auto& k : keys) {
      if (q.empty() || k.empty()) {
        continue;
      }
      if (causal) {
        add_causal(q, k, query, key, products);
      } else {
        products.push_back(
            {{query, query + q.extent()},
             {key, key + k.extent()},
             k,
             q,
             false});
      }
      key += k.extent();
    }
    query += q.extent();
  }
  return products;
}

std::vector<Rows> zigzag(int64_t extent, int64_t ranks) {
  const int64_t chunks = 2 * ranks;
  const auto chunk = [&](int64_t i) {
    return Interval{extent * i / chunks, extent * (i + 1) / chunks};
  };
  std::vector<Rows> result;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    result.push_back({chunk(rank), chunk(chunks - 1 - rank)});
  }
  return result;
}

ExchangePlan plan_rows(
    std::vector<int64_t> sizes,
    int64_t dim,
    const std::vector<Rows>& from,
    const std::vector<Rows>& to,
    int64_t rank) {
  ExchangePlan plan;
  plan.source_sizes = sizes;
  plan.target_sizes = sizes;
  plan.target_sizes[dim] = extent(to[rank]);
  plan.covers = true;
  int64_t rows = 1; // between two ranks, at most
  for (const auto& r : from) {
    rows = std::max(rows, extent(r));
  }
  const int64_t row = numel(box_of(sizes, dim, {0, 1}));
  const auto ranks = static_cast<int64_t>(from.size());
  plan.largest_message = ranks > 1 ? std::max<int64_t>(rows * row, 1) : 0;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    for_common_rows(from[rank], to[peer], [&](Interval own, Interval theirs) {
      plan.sends.push_back(
          {rank, peer, box_of(sizes, dim, own), box_of(sizes, dim, theirs)});
    });
    // In the order of the sender's rows, as it packs them.
    for_common_rows(from[peer], to[rank], [&](Interval theirs, Interval own) {
      plan.receives.push_back(
          {peer, rank, box_of(sizes, dim, theirs), box_of(sizes, dim, own)});
    });
  }
  return plan;
}

} // namespace shardtensor::detail
