#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/plans/transfer.h"
#include "shardtensor/layout/shard_spec.h"

// Every position's local tensor lives in one process: a plan is applied for
// all positions at once and compared with what each of them should then hold.
namespace shardtensor::testing {

using namespace detail;

template <class T>
std::string printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

/// Calling `function` raises an E with exactly this message.
template <class E, class Function>
void expect_error(const Function& function, const std::string& message) {
  try {
    function();
  } catch (const E& error) {
    EXPECT_EQ(std::string(error.what_without_backtrace()), message);
    return;
  }
  ADD_FAILURE() << "no error, expected: " << message;
}

/// A mesh over ranks 0, 1, ... seen from position 0.
inline MeshPtr mesh_of(std::vector<int64_t> shape, int64_t position = 0) {
  int64_t ranks = 1;
  for (int64_t along : shape) {
    ranks *= along;
  }
  Mesh::Options options;
  options.shape = std::move(shape);
  options.ranks.resize(ranks);
  std::iota(options.ranks.begin(), options.ranks.end(), 0);
  options.position = position;
  return make_mesh(std::move(options));
}

/// The meshes that every sweep visits.
inline std::vector<std::vector<int64_t>> mesh_shapes() {
  return {{1}, {2}, {3}, {4}, {2, 2}, {2, 3}, {2, 2, 2}};
}

/// A dense row-major tensor.
struct Values {
  std::vector<int64_t> sizes;
  std::vector<double> data;
  bool operator==(const Values&) const = default;
};

inline int64_t count(const std::vector<int64_t>& sizes) {
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

inline Values zeros(const std::vector<int64_t>& sizes) {
  return {sizes, std::vector<double>(count(sizes), 0.0)};
}

/// Element i is i + 1: nothing is zero, and a misplacement is readable.
inline Values index_filled(const std::vector<int64_t>& sizes) {
  Values values = zeros(sizes);
  std::iota(values.data.begin(), values.data.end(), 1.0);
  return values;
}

/// Calls visit(index) for every index of a tensor of these sizes, row-major.
inline void for_each_index(
    const std::vector<int64_t>& sizes,
    const std::function<void(const std::vector<int64_t>&)>& visit) {
  std::vector<int64_t> index(sizes.size(), 0);
  for (int64_t left = count(sizes); left > 0; --left) {
    visit(index);
    for (size_t dim = sizes.size(); dim-- > 0;) {
      if (++index[dim] < sizes[dim]) {
        break;
      }
      index[dim] = 0;
    }
  }
}

inline int64_t flat(
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& index) {
  int64_t result = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    result = result * sizes[dim] + index[dim];
  }
  return result;
}

/// The global rows of `dim` that position holds, in local order.
inline std::vector<int64_t> rows_of(
    const ShardSpec& spec,
    int64_t dim,
    int64_t position) {
  const auto& partition = spec.partitions()[dim];
  const Interval interval = spec.interval(dim, position);
  std::vector<int64_t> rows;
  for (int64_t k = 0; k < (partition ? partition->repeat() : 1); ++k) {
    const int64_t base = partition ? k * partition->period() : 0;
    for (int64_t row = interval.begin; row < interval.end; ++row) {
      rows.push_back(base + row);
    }
  }
  return rows;
}

/// Local index i holds global row rows[dim][i] of each dim; row -1 is zero.
inline Values take(
    const Values& global,
    const std::vector<std::vector<int64_t>>& rows,
    double factor = 1.0) {
  std::vector<int64_t> sizes;
  for (const std::vector<int64_t>& of_dim : rows) {
    sizes.push_back(static_cast<int64_t>(of_dim.size()));
  }
  Values local = zeros(sizes);
  for_each_index(sizes, [&](const std::vector<int64_t>& index) {
    std::vector<int64_t> at(index.size());
    for (size_t dim = 0; dim < index.size(); ++dim) {
      at[dim] = rows[dim][index[dim]];
      if (at[dim] < 0) {
        return;
      }
    }
    local.data[flat(sizes, index)] =
        factor * global.data[flat(global.sizes, at)];
  });
  return local;
}

inline std::vector<std::vector<int64_t>> rows_of(
    const ShardSpec& spec,
    int64_t position) {
  std::vector<std::vector<int64_t>> rows;
  for (int64_t dim = 0; dim < spec.dim(); ++dim) {
    rows.push_back(rows_of(spec, dim, position));
  }
  return rows;
}

inline std::vector<ExchangePlan> plans_of(
    int64_t positions,
    const std::function<ExchangePlan(int64_t position)>& plan) {
  std::vector<ExchangePlan> plans;
  for (int64_t position = 0; position < positions; ++position) {
    plans.push_back(plan(position));
  }
  return plans;
}

inline std::vector<Transfer> between(
    const std::vector<Transfer>& transfers,
    int64_t src,
    int64_t dst) {
  std::vector<Transfer> result;
  for (const Transfer& transfer : transfers) {
    if (transfer.src == src && transfer.dst == dst) {
      result.push_back(transfer);
    }
  }
  return result;
}

/// Adds a box of `from` to a box of `to`; counts the writes.
inline void add_box(
    const Values& from,
    const Box& source,
    const Box& target,
    Values& to,
    std::vector<int64_t>& writes) {
  ASSERT_EQ(extents(source), extents(target));
  for_each_index(extents(source), [&](const std::vector<int64_t>& index) {
    std::vector<int64_t> at_source(index);
    std::vector<int64_t> at_target(index);
    for (size_t dim = 0; dim < index.size(); ++dim) {
      at_source[dim] += source[dim].begin;
      at_target[dim] += target[dim].begin;
      ASSERT_LT(at_source[dim], from.sizes[dim]);
      ASSERT_LT(at_target[dim], to.sizes[dim]);
    }
    const int64_t written = flat(to.sizes, at_target);
    to.data[written] += from.data[flat(from.sizes, at_source)];
    ++writes[written];
  });
}

/// Writes a box of `from` to a box of `to`, or adds it.
inline void copy_box(
    const Values& from,
    const Box& source,
    const Box& target,
    bool adds,
    Values& to) {
  ASSERT_EQ(extents(source), extents(target));
  for_each_index(extents(source), [&](const std::vector<int64_t>& index) {
    std::vector<int64_t> at_source(index);
    std::vector<int64_t> at_target(index);
    for (size_t dim = 0; dim < index.size(); ++dim) {
      at_source[dim] += source[dim].begin;
      at_target[dim] += target[dim].begin;
    }
    const double value = from.data[flat(from.sizes, at_source)];
    double& written = to.data[flat(to.sizes, at_target)];
    written = adds ? written + value : value;
  });
}

/// Both sides of each pair list the same transfers in the same order; none is
/// empty, none is listed at a position that has no part in it.
inline void check_pairs(const std::vector<ExchangePlan>& plans) {
  const int64_t positions = static_cast<int64_t>(plans.size());
  for (int64_t src = 0; src < positions; ++src) {
    size_t sends = 0;
    size_t receives = 0;
    for (int64_t dst = 0; dst < positions; ++dst) {
      const auto sent = between(plans[src].sends, src, dst);
      sends += sent.size();
      receives += between(plans[src].receives, dst, src).size();
      ASSERT_EQ(sent, between(plans[dst].receives, src, dst));
      for (const Transfer& transfer : sent) {
        ASSERT_GT(numel(transfer.source), 0);
      }
    }
    ASSERT_EQ(plans[src].sends.size(), sends);
    ASSERT_EQ(plans[src].receives.size(), receives);
  }
}

/// The most elements that any position sends to another one.
inline int64_t largest_message(const std::vector<ExchangePlan>& plans) {
  int64_t largest = 0;
  for (const ExchangePlan& plan : plans) {
    std::map<int64_t, int64_t> elements;
    for (const Transfer& transfer : plan.sends) {
      if (transfer.dst != transfer.src) {
        elements[transfer.dst] += numel(transfer.source);
        largest = std::max(largest, elements[transfer.dst]);
      }
    }
  }
  return largest;
}

/// The mean over all positions of those that one sends to, rounded up.
inline int64_t mean_peers(const std::vector<ExchangePlan>& plans) {
  const int64_t positions = static_cast<int64_t>(plans.size());
  std::set<std::pair<int64_t, int64_t>> pairs;
  for (const ExchangePlan& plan : plans) {
    for (const Transfer& transfer : plan.sends) {
      pairs.emplace(transfer.src, transfer.dst);
    }
  }
  return (static_cast<int64_t>(pairs.size()) + positions - 1) / positions;
}

/// `axis`, `largest_message` and `peers` are what the transfers of all
/// positions together say.
inline void check_axis(
    const Mesh& mesh,
    const std::vector<ExchangePlan>& plans) {
  std::set<int64_t> crossed;
  for (const ExchangePlan& plan : plans) {
    for (const Transfer& transfer : plan.sends) {
      for (int64_t axis = 0; axis < mesh.axes(); ++axis) {
        if (mesh.coordinate(transfer.src, axis) !=
            mesh.coordinate(transfer.dst, axis)) {
          crossed.insert(axis);
        }
      }
    }
  }
  for (const ExchangePlan& plan : plans) {
    ASSERT_EQ(plan.largest_message == 0, crossed.empty());
    ASSERT_GE(plan.largest_message, largest_message(plans));
    ASSERT_EQ(plan.largest_message, plans.front().largest_message);
    ASSERT_EQ(plan.axis, crossed.size() == 1 ? *crossed.begin() : -1);
    ASSERT_EQ(plan.peers, mean_peers(plans));
  }
}

/// What the exchange does: the new local tensor of every position. Checks all
/// that a plan promises on the way.
inline std::vector<Values> apply(
    const Mesh& mesh,
    const std::vector<ExchangePlan>& plans,
    const std::vector<Values>& locals) {
  check_pairs(plans);
  check_axis(mesh, plans);
  std::vector<Values> results;
  for (size_t position = 0; position < plans.size(); ++position) {
    const ExchangePlan& plan = plans[position];
    EXPECT_EQ(plan.source_sizes, locals[position].sizes);
    Values& result = results.emplace_back(zeros(plan.target_sizes));
    std::vector<int64_t> writes(result.data.size(), 0);
    for (const Transfer& receive : plan.receives) {
      add_box(
          locals[receive.src], receive.source, receive.target, result, writes);
    }
    const bool once = std::all_of(
        writes.begin(), writes.end(), [](int64_t n) { return n == 1; });
    EXPECT_EQ(plan.covers, once);
  }
  return results;
}

/// The same, from the integers that carry the plans through the dispatcher, by
/// what their flags say: only a target that says so starts at zero.
inline std::vector<Values> apply_codes(
    const std::vector<std::vector<int64_t>>& codes,
    const std::vector<Values>& locals) {
  const auto box = [](const MessageBox& piece) {
    Box result;
    for (size_t dim = 0; dim < piece.begin.size(); ++dim) {
      result.push_back(
          {piece.begin[dim], piece.begin[dim] + piece.extent[dim]});
    }
    return result;
  };
  const auto ranks = static_cast<int64_t>(codes.size());
  std::vector<Values> results;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const MessageSide target = decode(codes[rank]).target;
    Values& result = results.emplace_back(zeros(target.sizes.vec()));
    if (!target.starts_at_zero) {
      std::fill(result.data.begin(), result.data.end(), std::nan(""));
    }
    std::vector<int64_t> peers(ranks);
    std::iota(peers.begin(), peers.end(), 0);
    if (!target.in_rank_order) {
      std::swap(peers[0], peers[rank]);
    }
    for (const int64_t peer : peers) {
      const MessageSide source = decode(codes[peer]).source;
      EXPECT_EQ(source.sizes, c10::IntArrayRef(locals[peer].sizes));
      EXPECT_EQ(source.of(rank).size(), target.of(peer).size());
      for (size_t i = 0; i < target.of(peer).size(); ++i) {
        copy_box(
            locals[peer],
            box(source.of(rank)[i]),
            box(target.of(peer)[i]),
            target.of(peer)[i].adds,
            result);
      }
    }
  }
  return results;
}

inline double dot(const std::vector<Values>& a, const std::vector<Values>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].sizes, b[i].sizes);
    sum += std::inner_product(
        a[i].data.begin(), a[i].data.end(), b[i].data.begin(), 0.0);
  }
  return sum;
}

/// Small integers, so that sums are exact.
inline Values random_values(
    std::mt19937& random,
    const std::vector<int64_t>& sizes) {
  Values values = zeros(sizes);
  for (double& value : values.data) {
    value = static_cast<double>(random() % 19) - 9;
  }
  return values;
}

/// <A x, y> == <x, A* y> for random x and y, of the encoded exchange.
inline void check_adjoint(
    const Mesh& mesh,
    const std::vector<ExchangePlan>& plans,
    std::mt19937& random) {
  std::vector<Values> x;
  std::vector<Values> y;
  for (const ExchangePlan& plan : plans) {
    x.push_back(random_values(random, plan.source_sizes));
    y.push_back(random_values(random, plan.target_sizes));
  }
  std::vector<int64_t> ranks(plans.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::vector<int64_t>> codes;
  std::vector<std::vector<int64_t>> adjoints;
  for (const int64_t rank : ranks) {
    codes.push_back(encode(plans[rank], rank, ranks));
    adjoints.push_back(adjoint(codes.back()));
  }
  const std::vector<Values> moved = apply_codes(codes, x);
  ASSERT_EQ(moved, apply(mesh, plans, x));
  ASSERT_EQ(dot(moved, y), dot(x, apply_codes(adjoints, y)));
}

/// `extent` rows in `pieces`: chunked, cut at random (with empty pieces), or
/// all in one piece.
inline Partition random_partition(
    std::mt19937& random,
    int64_t extent,
    int64_t pieces) {
  const int64_t kind = random() % 4;
  if (kind == 0) {
    return Partition::chunked(extent, pieces);
  }
  std::vector<int64_t> sizes(pieces, 0);
  const int64_t favourite = random() % pieces;
  for (int64_t row = 0; row < extent; ++row) {
    ++sizes[kind == 1 ? favourite : random() % pieces];
  }
  return Partition(sizes);
}

/// A spec of these placements with random partitions; sometimes repeated ones,
/// if they may be.
inline SpecPtr random_spec(
    std::mt19937& random,
    const MeshPtr& mesh,
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    bool may_repeat = false) {
  const SpecPtr chunked = make_spec(mesh, sizes, placements);
  ShardSpec::Partitions partitions(sizes.size());
  for (int64_t dim : chunked->sharded_dims()) {
    int64_t repeat = may_repeat ? 1 + static_cast<int64_t>(random() % 3) : 1;
    if (sizes[dim] % repeat != 0) {
      repeat = 1;
    }
    partitions[dim] =
        random_partition(
            random, sizes[dim] / repeat, chunked->partition(dim).pieces())
            .repeated(repeat);
  }
  return make_spec(mesh, sizes, placements, partitions);
}

/// Every list of one placement per axis out of `choices`.
inline std::vector<std::vector<Placement>> combinations(
    int64_t axes,
    const std::vector<Placement>& choices) {
  std::vector<std::vector<Placement>> all{{}};
  for (int64_t axis = 0; axis < axes; ++axis) {
    std::vector<std::vector<Placement>> longer;
    for (const auto& placements : all) {
      for (const Placement& choice : choices) {
        longer.push_back(placements);
        longer.back().push_back(choice);
      }
    }
    all = std::move(longer);
  }
  return all;
}

} // namespace shardtensor::testing
