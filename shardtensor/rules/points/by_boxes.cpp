#include "shardtensor/rules/points/by_boxes.h"

#include <algorithm>
#include <cmath>

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/points/boxes.h"
#include "shardtensor/rules/points/query_set.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;

// ---- whether it pays --------------------------------------------------------

// Of all other pieces, which a ring searches: to send a query and its answer
// costs about as much as to search.
constexpr double kWorthSending = 0.5;

/// Which share of the queries in a box is within `reach` of another box.
double share_near(
    const double* queries,
    const double* points,
    int64_t dims,
    double reach) {
  double share = 1;
  for (int64_t dim = 0; dim < dims; ++dim) {
    const double low = queries[dim];
    const double high = queries[dims + dim];
    const double begin = std::max(low, points[dim] - reach);
    const double end = std::min(high, points[dims + dim] + reach);
    if (!(begin <= end)) {
      return 0;
    }
    share *= high > low ? (end - begin) / (high - low) : 1;
  }
  return share;
}

/// How far neighbours are, if points are spread evenly in their box.
double typical_reach(
    const Tensor& boxes,
    const Wanted& wanted,
    int64_t points) {
  if (wanted.radius) {
    return *wanted.radius;
  }
  const auto low = at::amin(boxes.select(1, 0), {0});
  const auto extents = at::amax(boxes.select(1, 1), {0}).sub(low);
  const auto* const extent = extents.const_data_ptr<double>();
  double volume = 1;
  int64_t dims = 0;
  for (int64_t dim = 0; dim < extents.numel(); ++dim) {
    if (extent[dim] > 0) {
      volume *= extent[dim];
      ++dims;
    }
  }
  const auto share = static_cast<double>(*wanted.most) /
      static_cast<double>(std::max<int64_t>(points, 1));
  return dims == 0 ? 0
                   : std::pow(volume * share, 1.0 / static_cast<double>(dims));
}

// ---- queries on the way -----------------------------------------------------

/// Queries of one batch entry that reach one rank's points.
struct Letter {
  int64_t rank;
  int64_t entry;
  Tensor places;
  Tensor rows; // queries with their limits, (n, D + 1)
};

/// What goes to other ranks, rank by rank, of each entry by entry. Most ranks
/// of many are far away: nothing is made for these.
struct Mail {
  std::vector<Letter> letters;
  Tensor counts; // (ranks, B), rows
};

/// Which queries reach which rank's points.
Mail address(
    const QuerySet& set,
    int64_t batch,
    const Tensor& boxes,
    const CloudPieces& cloud) {
  const int64_t ranks = boxes.size(0);
  Mail mail{{}, at::zeros({ranks, batch}, boxes.options().dtype(at::kLong))};
  auto* const counts = mail.counts.mutable_data_ptr<int64_t>();
  for (int64_t entry = 0; entry < batch; ++entry) {
    const auto queries = set.open_queries(entry);
    const QueryBlocks blocks(queries);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (rank == cloud.rank || cloud.rows[rank].empty()) {
        continue;
      }
      const auto places = blocks.near(boxes.select(0, rank));
      if (places.numel() > 0) {
        const auto limits = queries.limits.index_select(0, places);
        const auto points = queries.points.index_select(0, places);
        mail.letters.push_back(
            {rank, entry, places, at::cat({points, limits.unsqueeze(1)}, 1)});
        counts[rank * batch + entry] = places.numel();
      }
    }
  }
  std::ranges::stable_sort(mail.letters, {}, &Letter::rank);
  return mail;
}

/// One number for each rank and batch entry goes there: (ranks, B).
Tensor swap_counts(const Tensor& counts, const CloudPieces& cloud) {
  const Numbers one(cloud.rows.size(), 1);
  return all_to_all_rows(counts, 0, one, one, cloud.group);
}

Numbers row_sums(const Tensor& counts) {
  const auto sums = counts.sum(1);
  const auto* const values = sums.const_data_ptr<int64_t>();
  return {values, values + sums.numel()};
}

class ByBoxes {
 public:
  ByBoxes(
      const Tensor& points,
      const Tensor& queries,
      const Wanted& wanted,
      const CloudPieces& cloud)
      : wanted_(wanted),
        cloud_(cloud),
        batch_(points.size(0)),
        dims_(points.size(2)),
        options_(points.options()),
        set_(queries, wanted),
        trees_(make_trees(points, cloud.own().begin)) {}

  Neighbours run(const Tensor& boxes) {
    set_.meet(trees_);
    mail_ = address(set_, batch_, boxes, cloud_);
    send_queries();
    if (wanted_.most) {
      answer_nearest();
    } else {
      answer_pairs();
    }
    return set_.neighbours();
  }

 private:
  /// Calls work(i, entry, begin, rows) for what came of each rank and entry,
  /// the i-th of all, that sent anything.
  template <class Work>
  void each_guest(const Work& work) const {
    const auto* const values = came_.const_data_ptr<int64_t>();
    int64_t begin = 0;
    for (int64_t i = 0; i < came_.numel(); ++i) {
      if (values[i] > 0) {
        work(i, i % batch_, begin, values[i]);
        begin += values[i];
      }
    }
  }

  void send_queries() {
    std::vector<Tensor> rows{at::empty({0, dims_ + 1}, options_)};
    for (const auto& letter : mail_.letters) {
      rows.push_back(letter.rows);
    }
    came_ = swap_counts(mail_.counts, cloud_);
    guests_ = all_to_all_rows(
        at::cat(rows),
        0,
        row_sums(mail_.counts),
        row_sums(came_),
        cloud_.group);
  }

  Tensor send_back(const Tensor& rows) {
    return all_to_all_rows(
        rows, 0, row_sums(came_), row_sums(mail_.counts), cloud_.group);
  }

  void answer_nearest() {
    const int64_t most = *wanted_.most;
    std::vector<Tensor> squares{at::empty({0, most}, options_)};
    std::vector<Tensor> rows{at::empty({0, most}, options_.dtype(at::kLong))};
    each_guest([&](int64_t, int64_t entry, int64_t begin, int64_t count) {
      const auto found =
          nearest_in(trees_[entry], guests_.narrow(0, begin, count), most);
      squares.push_back(found.squares);
      rows.push_back(found.rows);
    });
    const auto all_squares = send_back(at::cat(squares));
    const auto all_rows = send_back(at::cat(rows));
    int64_t begin = 0;
    for (const auto& [rank, entry, places, sent] : mail_.letters) {
      const int64_t n = places.numel();
      set_.take(
          entry,
          places,
          Nearest{
              all_squares.narrow(0, begin, n), all_rows.narrow(0, begin, n)});
      begin += n;
    }
  }

  void answer_pairs() {
    std::vector<Tensor> counts{at::empty({0}, options_.dtype(at::kLong))};
    std::vector<Tensor> squares{at::empty({0}, options_)};
    std::vector<Tensor> rows{at::empty({0}, options_.dtype(at::kLong))};
    const auto own = at::zeros_like(came_); // pairs for each rank and entry
    auto* const pairs = own.mutable_data_ptr<int64_t>();
    each_guest([&](int64_t i, int64_t entry, int64_t begin, int64_t count) {
      const auto found =
          pairs_in(trees_[entry], guests_.narrow(0, begin, count));
      counts.push_back(found.counts);
      squares.push_back(found.squares);
      rows.push_back(found.rows);
      pairs[i] = found.rows.numel();
    });
    const auto theirs = swap_counts(own, cloud_);
    const auto give = row_sums(own);
    const auto get = row_sums(theirs);
    const auto all_counts = send_back(at::cat(counts));
    const auto all_squares =
        all_to_all_rows(at::cat(squares), 0, give, get, cloud_.group);
    const auto all_rows =
        all_to_all_rows(at::cat(rows), 0, give, get, cloud_.group);
    const auto* const found = theirs.const_data_ptr<int64_t>();
    int64_t query = 0;
    int64_t pair = 0;
    for (const auto& [rank, entry, places, sent] : mail_.letters) {
      const int64_t n = found[rank * batch_ + entry];
      set_.take(
          entry,
          places,
          Pairs{
              all_counts.narrow(0, query, places.numel()),
              all_rows.narrow(0, pair, n),
              all_squares.narrow(0, pair, n)});
      query += places.numel();
      pair += n;
    }
  }

  Wanted wanted_;
  const CloudPieces& cloud_;
  int64_t batch_;
  int64_t dims_;
  at::TensorOptions options_;
  QuerySet set_;
  Trees trees_;
  Mail mail_;
  Tensor came_; // queries of each rank, of each entry
  Tensor guests_; // those queries
};

} // namespace

RankBoxes gather_boxes(
    const Tensor& points,
    const Tensor& queries,
    const CloudPieces& cloud) {
  const Numbers one(cloud.rows.size(), 1);
  const auto own = at::stack(
      {box_of(points.flatten(0, 1).contiguous()),
       box_of(queries.flatten(0, 1).contiguous())});
  const auto all = all_gather_rows(own.unsqueeze(0), 0, one, cloud.group);
  return {all.select(1, 0).contiguous(), all.select(1, 1).contiguous()};
}

bool are_apart(
    const RankBoxes& boxes,
    const Wanted& wanted,
    const CloudPieces& cloud) {
  const auto points = boxes.points.to(at::kDouble);
  const auto queries = boxes.queries.to(at::kDouble);
  const int64_t ranks = points.size(0);
  const int64_t dims = points.size(2);
  const double reach = typical_reach(points, wanted, cloud.points());
  const auto* const to = points.const_data_ptr<double>();
  const auto* const own =
      queries.const_data_ptr<double>() + cloud.rank * 2 * dims;
  double leaving = 0;
  for (int64_t other = 0; other < ranks; ++other) {
    if (other != cloud.rank) {
      leaving += share_near(own, to + other * 2 * dims, dims, reach);
    }
  }
  const auto of_all =
      all_reduce(at::full({}, leaving, at::kDouble), Reduce::Sum, cloud.group);
  return of_all.item<double>() <
      kWorthSending * static_cast<double>(ranks * (ranks - 1));
}

Neighbours find_by_boxes(
    const Tensor& points,
    const Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud,
    const RankBoxes& boxes) {
  return ByBoxes(points, queries, wanted, cloud).run(boxes.points);
}

} // namespace shardtensor::detail
