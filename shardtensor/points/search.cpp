#include "shardtensor/points/search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/points/sorted_list.h"
#include "shardtensor/threads/parallel_for.h"

// The loops are compiled for two sets of instructions. No fused multiply-add in
// either: the same bits from both.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define SHARDTENSOR_SIMD __attribute__((target_clones("avx2", "default")))
#else
#define SHARDTENSOR_SIMD
#endif
#define SHARDTENSOR_INLINE [[gnu::always_inline]] inline

namespace shardtensor::detail {
namespace {

constexpr int64_t kGrain = 256; // queries per task
constexpr int64_t kMostBranches = 96; // 11 levels of at most 8

/// A tree as the loops see it.
template <class T>
struct TreeView {
  explicit TreeView(const PointTree& tree)
      : points(tree.points),
        dims(tree.dims),
        first_row(tree.first_row),
        stride(tree.leaf_stride),
        levels(static_cast<int64_t>(tree.depths.size())),
        depths(tree.depths.data()),
        first_groups(tree.first_groups.data()),
        boxes(tree.boxes.const_data_ptr<T>()),
        leaves(tree.leaves.const_data_ptr<T>()),
        rows(tree.rows.const_data_ptr<int32_t>()) {}

  int64_t points;
  int64_t dims;
  int64_t first_row;
  int64_t stride;
  int64_t levels;
  const int64_t* depths;
  const int64_t* first_groups;
  const T* boxes;
  const T* leaves;
  const int32_t* rows;
};

constexpr int64_t kLanes = PointTree::kLanes;
template <class T>
using Lanes = std::array<T, kLanes>;

/// The squared distances to a group's boxes; D is 0 where known at run time
/// only.
template <class T, int D>
SHARDTENSOR_INLINE Lanes<T> gaps(
    const TreeView<T>& tree,
    int64_t group,
    const T* query) {
  const int64_t dims = D > 0 ? D : tree.dims;
  const T* const low = tree.boxes + group * 2 * dims * kLanes;
  const T* const high = low + dims * kLanes;
  Lanes<T> sums{};
  for (int64_t dim = 0; dim < dims; ++dim) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const T below = low[dim * kLanes + lane] - query[dim];
      const T above = query[dim] - high[dim * kLanes + lane];
      const T outside = below > above ? below : above;
      const T clipped = outside > 0 ? outside : 0;
      sums[lane] += clipped * clipped;
    }
  }
  return sums;
}

template <class T, int D>
SHARDTENSOR_INLINE void squares_of(
    const TreeView<T>& tree,
    int64_t leaf,
    const T* query,
    T* squares) {
  const int64_t dims = D > 0 ? D : tree.dims;
  const T* const slots = tree.leaves + leaf * dims * tree.stride;
  for (int64_t first = 0; first < tree.stride; first += kLanes) {
    Lanes<T> sums{};
    for (int64_t dim = 0; dim < dims; ++dim) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const T away = slots[dim * tree.stride + first + lane] - query[dim];
        sums[lane] += away * away;
      }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      squares[first + lane] = sums[lane];
    }
  }
}

template <class T>
SHARDTENSOR_INLINE bool any_within(const T* squares, T limit) {
  using Mask = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  Mask any = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    any |= squares[lane] <= limit ? Mask{-1} : Mask{0};
  }
  return any != 0;
}

/// Shows the points of a leaf that are within found.limit() to
/// found.take(squared distance, row).
template <class T, int D, class Found>
SHARDTENSOR_INLINE void scan(
    const TreeView<T>& tree,
    int64_t leaf,
    const T* query,
    Found& found) {
  alignas(32) std::array<T, PointTree::kLeafPoints> squares;
  squares_of<T, D>(tree, leaf, query, squares.data());
  const int64_t depth = tree.depths[tree.levels - 1];
  const int64_t begin = PointTree::begin_of(tree.points, depth, leaf);
  const int64_t count =
      PointTree::begin_of(tree.points, depth, leaf + 1) - begin;
  for (int64_t first = 0; first < count; first += kLanes) {
    if (!any_within(squares.data() + first, found.limit())) {
      continue;
    }
    const int64_t end = std::min(first + kLanes, count);
    for (int64_t i = first; i < end; ++i) {
      if (squares[i] <= found.limit()) {
        found.take(squares[i], tree.first_row + tree.rows[begin + i]);
      }
    }
  }
}

template <class T>
struct Branch {
  T bound;
  int64_t level;
  int64_t node;
};

/// Puts those children of a node that are within `limit` on a stack, the
/// nearest on top. Returns its new height.
template <class T, int D>
SHARDTENSOR_INLINE int64_t open_node(
    const TreeView<T>& tree,
    const Branch<T>& parent,
    const T* query,
    T limit,
    Branch<T>* stack,
    int64_t height) {
  const int64_t level = parent.level + 1;
  const int64_t shift = tree.depths[level] - tree.depths[parent.level];
  const auto bounds =
      gaps<T, D>(tree, tree.first_groups[level] + parent.node, query);
  const int64_t bottom = height;
  for (int64_t lane = 0; lane < (int64_t{1} << shift); ++lane) {
    if (bounds[lane] > limit) {
      continue;
    }
    int64_t at = height++;
    for (; at > bottom && stack[at - 1].bound < bounds[lane]; --at) {
      stack[at] = stack[at - 1];
    }
    stack[at] = {bounds[lane], level, (parent.node << shift) + lane};
  }
  return height;
}

/// Scans the leaves that may have a point within found.limit(), near ones
/// first.
template <class T, int D, class Found>
SHARDTENSOR_INLINE void walk(
    const TreeView<T>& tree,
    const T* query,
    Found& found) {
  std::array<Branch<T>, kMostBranches> stack;
  stack[0] = {0, 0, 0};
  int64_t height = 1;
  while (height > 0) {
    const auto next = stack[--height];
    if (next.bound > found.limit()) {
      continue;
    }
    if (next.level == tree.levels - 1) {
      scan<T, D>(tree, next.node, query, found);
    } else {
      height = open_node<T, D>(
          tree, next, query, found.limit(), stack.data(), height);
    }
  }
}

// ---- the k nearest ----------------------------------------------------------

/// A query's walk through a tree.
template <class T>
struct Best {
  SortedList<T>& list;
  T bound; // no point further away counts

  SHARDTENSOR_INLINE T limit() const {
    return bound;
  }
  SHARDTENSOR_INLINE void take(T square, int64_t row) {
    list.take(square, row);
    bound = std::min(bound, list.last());
  }
};

/// The queries of a task.
template <class T>
struct Queries {
  Queries(const OrderedQueries& queries, int64_t first, int64_t last)
      : points(queries.points.const_data_ptr<T>()),
        order(
            queries.order.defined() ? queries.order.const_data_ptr<int64_t>()
                                    : nullptr),
        limits(
            queries.limits.defined() ? queries.limits.const_data_ptr<T>()
                                     : nullptr),
        begin(first),
        end(last) {}

  const T* points;
  const int64_t* order;
  const T* limits;
  int64_t begin;
  int64_t end;

  SHARDTENSOR_INLINE int64_t row(int64_t query) const {
    return order ? order[query] : query;
  }
  SHARDTENSOR_INLINE T limit(int64_t query) const {
    return limits ? limits[query] : std::numeric_limits<T>::infinity();
  }
};

template <class T>
struct BestOfAll {
  T* squares;
  int64_t* rows;
  int64_t k;
};

template <class T, int D>
SHARDTENSOR_INLINE void nearest_of(
    const TreeView<T>& tree,
    const Queries<T>& queries,
    const BestOfAll<T>& all,
    SortedList<T>& list) {
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    const int64_t first = queries.row(query) * all.k;
    list.load(all.squares + first, all.rows + first);
    Best<T> best{list, std::min(list.last(), queries.limit(query))};
    walk<T, D>(tree, queries.points + query * tree.dims, best);
    list.store(all.squares + first, all.rows + first);
  }
}

template <class T>
SHARDTENSOR_INLINE void nearest_of_any(
    const TreeView<T>& tree,
    const Queries<T>& queries,
    const BestOfAll<T>& all,
    SortedList<T>& list) {
  switch (tree.dims) {
    case 1:
      return nearest_of<T, 1>(tree, queries, all, list);
    case 2:
      return nearest_of<T, 2>(tree, queries, all, list);
    case 3:
      return nearest_of<T, 3>(tree, queries, all, list);
    default:
      return nearest_of<T, 0>(tree, queries, all, list);
  }
}

SHARDTENSOR_SIMD void nearest(
    const TreeView<float>& tree,
    const Queries<float>& queries,
    const BestOfAll<float>& all,
    SortedList<float>& list) {
  nearest_of_any(tree, queries, all, list);
}
SHARDTENSOR_SIMD void nearest(
    const TreeView<double>& tree,
    const Queries<double>& queries,
    const BestOfAll<double>& all,
    SortedList<double>& list) {
  nearest_of_any(tree, queries, all, list);
}

// ---- all within a radius ----------------------------------------------------

/// What a task finds, query by query.
template <class T>
struct Found {
  const TreeView<T>& tree;
  T bound = 0;
  std::vector<std::pair<T, int64_t>> pairs;

  SHARDTENSOR_INLINE T limit() const {
    return bound;
  }
  SHARDTENSOR_INLINE void take(T square, int64_t row) {
    pairs.emplace_back(square, row);
  }
};

template <class T>
SHARDTENSOR_INLINE void within_of(
    const Queries<T>& queries,
    int64_t* counts,
    Found<T>& found) {
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    const auto before = found.pairs.size();
    found.bound = queries.limit(query);
    const T* const point = queries.points + query * found.tree.dims;
    if (found.tree.dims == 3) {
      walk<T, 3>(found.tree, point, found);
    } else {
      walk<T, 0>(found.tree, point, found);
    }
    counts[query] = static_cast<int64_t>(found.pairs.size() - before);
  }
}

SHARDTENSOR_SIMD void within(
    const Queries<float>& queries,
    int64_t* counts,
    Found<float>& found) {
  within_of(queries, counts, found);
}
SHARDTENSOR_SIMD void within(
    const Queries<double>& queries,
    int64_t* counts,
    Found<double>& found) {
  within_of(queries, counts, found);
}

template <class T>
Pairs pairs_within(const PointTree& tree, const OrderedQueries& queries) {
  const TreeView<T> view(tree);
  const int64_t count = queries.points.size(0);
  const int64_t tasks = (count + kGrain - 1) / kGrain;
  const auto indices = queries.points.options().dtype(at::kLong);
  Pairs result{at::zeros({count}, indices), {}, {}};
  auto* const counts = result.counts.template mutable_data_ptr<int64_t>();
  std::vector<Found<T>> found(tasks, Found<T>{view, 0, {}});
  parallel_for(tasks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t end = std::min((task + 1) * kGrain, count);
      within(Queries<T>(queries, task * kGrain, end), counts, found[task]);
    }
  });
  int64_t pairs = 0;
  for (const auto& part : found) {
    pairs += static_cast<int64_t>(part.pairs.size());
  }
  result.rows = at::empty({pairs}, indices);
  result.squares = at::empty({pairs}, queries.points.options());
  auto* row = result.rows.template mutable_data_ptr<int64_t>();
  auto* square = result.squares.template mutable_data_ptr<T>();
  for (const auto& part : found) {
    for (const auto& pair : part.pairs) {
      *square++ = pair.first;
      *row++ = pair.second;
    }
  }
  return result;
}

/// Where each query's pairs begin.
std::vector<int64_t> offsets_of(const at::Tensor& counts) {
  const auto* const values = counts.const_data_ptr<int64_t>();
  std::vector<int64_t> offsets{0};
  for (int64_t i = 0; i < counts.numel(); ++i) {
    offsets.push_back(offsets.back() + values[i]);
  }
  return offsets;
}

template <class T>
void join_queries(
    const std::vector<Pairs>& parts,
    const std::vector<std::vector<int64_t>>& offsets,
    const Pairs& whole) {
  const auto to = offsets_of(whole.counts);
  auto* const rows = whole.rows.template mutable_data_ptr<int64_t>();
  auto* const squares = whole.squares.template mutable_data_ptr<T>();
  parallel_for(whole.counts.numel(), kGrain, [&](int64_t b, int64_t e) {
    std::vector<std::pair<T, int64_t>> pairs;
    for (int64_t query = b; query < e; ++query) {
      pairs.clear();
      for (size_t part = 0; part < parts.size(); ++part) {
        const auto* const own =
            parts[part].squares.template const_data_ptr<T>();
        const auto* const of =
            parts[part].rows.template const_data_ptr<int64_t>();
        for (int64_t i = offsets[part][query]; i < offsets[part][query + 1];
             ++i) {
          pairs.emplace_back(own[i], of[i]);
        }
      }
      std::sort(pairs.begin(), pairs.end());
      for (size_t i = 0; i < pairs.size(); ++i) {
        squares[to[query] + i] = pairs[i].first;
        rows[to[query] + i] = pairs[i].second;
      }
    }
  });
}

} // namespace

Nearest Nearest::none(const at::Tensor& queries, int64_t k) {
  auto sizes = queries.sizes().vec();
  sizes.back() = k;
  return {
      at::full(
          sizes, std::numeric_limits<double>::infinity(), queries.options()),
      at::full(sizes, kNoRow, queries.options().dtype(at::kLong))};
}

void search_nearest(
    const PointTree& tree,
    const OrderedQueries& queries,
    const Nearest& best) {
  const int64_t k = best.rows.size(1);
  if (tree.points == 0 || k == 0) {
    return;
  }
  AT_DISPATCH_FLOATING_TYPES(best.squares.scalar_type(), "search_nearest", [&] {
    const TreeView<scalar_t> view(tree);
    const BestOfAll<scalar_t> all{
        best.squares.mutable_data_ptr<scalar_t>(),
        best.rows.mutable_data_ptr<int64_t>(),
        k};
    const int64_t count = queries.points.size(0);
    parallel_for(count, kGrain, [&](int64_t b, int64_t e) {
      SortedList<scalar_t> list(k);
      nearest(view, Queries<scalar_t>(queries, b, e), all, list);
    });
  });
}

void merge_nearest(
    const Nearest& best,
    const at::Tensor& places,
    const Nearest& found) {
  const int64_t k = best.rows.size(1);
  const auto* const from_rows = found.rows.const_data_ptr<int64_t>();
  auto* const rows = best.rows.mutable_data_ptr<int64_t>();
  const auto* const to = places.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(best.squares.scalar_type(), "merge_nearest", [&] {
    const auto* const from = found.squares.const_data_ptr<scalar_t>();
    auto* const squares = best.squares.mutable_data_ptr<scalar_t>();
    parallel_for(places.numel(), kGrain, [&](int64_t b, int64_t e) {
      SortedList<scalar_t> list(k);
      for (int64_t i = b; i < e; ++i) {
        list.load(squares + to[i] * k, rows + to[i] * k);
        for (int64_t j = i * k; j < (i + 1) * k; ++j) {
          if (from_rows[j] != Nearest::kNoRow) {
            list.take(from[j], from_rows[j]);
          }
        }
        list.store(squares + to[i] * k, rows + to[i] * k);
      }
    });
  });
}

Pairs search_within(const PointTree& tree, const OrderedQueries& queries) {
  return AT_DISPATCH_FLOATING_TYPES(
      queries.points.scalar_type(), "search_within", [&] {
        return pairs_within<scalar_t>(tree, queries);
      });
}

Pairs join_pairs(const std::vector<Pairs>& parts) {
  Pairs whole = parts.at(0);
  std::vector<std::vector<int64_t>> offsets;
  int64_t pairs = 0;
  for (const auto& part : parts) {
    offsets.push_back(offsets_of(part.counts));
    pairs += part.rows.numel();
  }
  for (size_t part = 1; part < parts.size(); ++part) {
    whole.counts = at::add(whole.counts, parts[part].counts);
  }
  whole.rows = at::empty({pairs}, whole.rows.options());
  whole.squares = at::empty({pairs}, whole.squares.options());
  AT_DISPATCH_FLOATING_TYPES(whole.squares.scalar_type(), "join_pairs", [&] {
    join_queries<scalar_t>(parts, offsets, whole);
  });
  return whole;
}

} // namespace shardtensor::detail
