#include "shardtensor/points/search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

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
constexpr int64_t kLeafSlots = 32; // at most
constexpr int64_t kMostDepth = 32;

/// A tree as the loops see it.
template <class T>
struct TreeView {
  explicit TreeView(const PointTree& tree)
      : points(tree.points),
        dims(tree.dims),
        first_row(tree.first_row),
        depth(tree.depth),
        stride(tree.leaf_stride),
        boxes(tree.boxes.const_data_ptr<T>()),
        leaves(tree.leaves.const_data_ptr<T>()),
        rows(tree.rows.const_data_ptr<int32_t>()) {}

  int64_t points;
  int64_t dims;
  int64_t first_row;
  int64_t depth;
  int64_t stride;
  const T* boxes;
  const T* leaves;
  const int32_t* rows;
};

/// The squared distance to a node's box; D is 0 where known at run time only.
template <class T, int D>
SHARDTENSOR_INLINE T
gap(const TreeView<T>& tree, int64_t node, const T* query) {
  const int64_t dims = D > 0 ? D : tree.dims;
  const T* const low = tree.boxes + node * 2 * dims;
  const T* const high = low + dims;
  T sum = 0;
  for (int64_t dim = 0; dim < dims; ++dim) {
    const T below = low[dim] - query[dim];
    const T above = query[dim] - high[dim];
    const T outside = below > above ? below : above;
    const T clipped = outside > 0 ? outside : 0;
    sum += clipped * clipped;
  }
  return sum;
}

template <class T, int D>
SHARDTENSOR_INLINE void squares_of(
    const TreeView<T>& tree,
    int64_t leaf,
    const T* query,
    T* squares) {
  const int64_t dims = D > 0 ? D : tree.dims;
  const T* slots = tree.leaves + leaf * dims * tree.stride;
  for (int64_t slot = 0; slot < tree.stride; ++slot) {
    const T away = slots[slot] - query[0];
    squares[slot] = away * away;
  }
  for (int64_t dim = 1; dim < dims; ++dim) {
    slots += tree.stride;
    for (int64_t slot = 0; slot < tree.stride; ++slot) {
      const T away = slots[slot] - query[dim];
      squares[slot] += away * away;
    }
  }
}

template <class T>
SHARDTENSOR_INLINE bool any_within(const T* squares, int64_t slots, T limit) {
  using Mask = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  Mask any = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    any |= squares[slot] <= limit ? Mask{-1} : Mask{0};
  }
  return any != 0;
}

/// Shows each leaf that may have a point within found.limit() to
/// found.take(squares, leaf's first point, number of points), near ones first.
template <class T, int D, class Found>
SHARDTENSOR_INLINE void walk(
    const TreeView<T>& tree,
    const T* query,
    Found& found) {
  struct Branch {
    int64_t node;
    T bound;
  };
  std::array<Branch, kMostDepth> later;
  alignas(32) std::array<T, kLeafSlots> squares;
  const int64_t first_leaf = int64_t{1} << tree.depth;
  int64_t waiting = 0;
  later[waiting++] = {1, gap<T, D>(tree, 1, query)};
  while (waiting > 0) {
    auto [node, bound] = later[--waiting];
    while (node < first_leaf && bound <= found.limit()) {
      const T left = gap<T, D>(tree, 2 * node, query);
      const T right = gap<T, D>(tree, 2 * node + 1, query);
      const bool is_left = left <= right;
      const T far = is_left ? right : left;
      if (far <= found.limit()) {
        later[waiting++] = {2 * node + (is_left ? 1 : 0), far};
      }
      node = 2 * node + (is_left ? 0 : 1);
      bound = is_left ? left : right;
    }
    if (bound > found.limit()) {
      continue;
    }
    const int64_t leaf = node - first_leaf;
    squares_of<T, D>(tree, leaf, query, squares.data());
    if (any_within(squares.data(), tree.stride, found.limit())) {
      const int64_t begin = PointTree::begin_of(tree.points, tree.depth, leaf);
      const int64_t end =
          PointTree::begin_of(tree.points, tree.depth, leaf + 1);
      found.take(squares.data(), begin, end - begin);
    }
  }
}

// ---- the k nearest ----------------------------------------------------------

/// One query's, ascending.
template <class T>
struct Best {
  T* squares;
  int64_t* rows;
  int64_t k;
  T bound; // no point further away counts

  SHARDTENSOR_INLINE void insert(T square, int64_t row) {
    int64_t at = k - 1;
    if (!is_before(square, row, at)) {
      return;
    }
    for (; at > 0 && is_before(square, row, at - 1); --at) {
      squares[at] = squares[at - 1];
      rows[at] = rows[at - 1];
    }
    squares[at] = square;
    rows[at] = row;
    bound = std::min(bound, squares[k - 1]);
  }
  SHARDTENSOR_INLINE bool is_before(T square, int64_t row, int64_t at) const {
    return square < squares[at] || (square == squares[at] && row < rows[at]);
  }
};

/// A query's walk through a tree.
template <class T>
struct BestOfTree {
  const TreeView<T>& tree;
  Best<T> best;

  SHARDTENSOR_INLINE T limit() const {
    return best.bound;
  }
  SHARDTENSOR_INLINE void take(const T* found, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (found[i] <= best.bound) {
        best.insert(found[i], tree.first_row + tree.rows[begin + i]);
      }
    }
  }
};

/// The queries of a task. A null limit is none.
template <class T>
struct Queries {
  const T* points;
  const T* limits;
  int64_t begin;
  int64_t end;

  SHARDTENSOR_INLINE T limit(int64_t query) const {
    return limits ? limits[query] : std::numeric_limits<T>::infinity();
  }
};

template <class T, int D>
SHARDTENSOR_INLINE void nearest_of(
    const TreeView<T>& tree,
    const Queries<T>& queries,
    T* squares,
    int64_t* rows,
    int64_t k) {
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    T* const own = squares + query * k;
    const T bound = std::min(own[k - 1], queries.limit(query));
    BestOfTree<T> found{tree, {own, rows + query * k, k, bound}};
    walk<T, D>(tree, queries.points + query * tree.dims, found);
  }
}

template <class T>
SHARDTENSOR_INLINE void nearest_of_any(
    const TreeView<T>& tree,
    const Queries<T>& queries,
    T* squares,
    int64_t* rows,
    int64_t k) {
  switch (tree.dims) {
    case 1:
      return nearest_of<T, 1>(tree, queries, squares, rows, k);
    case 2:
      return nearest_of<T, 2>(tree, queries, squares, rows, k);
    case 3:
      return nearest_of<T, 3>(tree, queries, squares, rows, k);
    default:
      return nearest_of<T, 0>(tree, queries, squares, rows, k);
  }
}

SHARDTENSOR_SIMD void nearest(
    const TreeView<float>& tree,
    const Queries<float>& queries,
    float* squares,
    int64_t* rows,
    int64_t k) {
  nearest_of_any(tree, queries, squares, rows, k);
}
SHARDTENSOR_SIMD void nearest(
    const TreeView<double>& tree,
    const Queries<double>& queries,
    double* squares,
    int64_t* rows,
    int64_t k) {
  nearest_of_any(tree, queries, squares, rows, k);
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
  SHARDTENSOR_INLINE void take(const T* found, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (found[i] <= bound) {
        pairs.emplace_back(found[i], tree.first_row + tree.rows[begin + i]);
      }
    }
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
Queries<T> task_of(
    const at::Tensor& queries,
    const at::Tensor& limits,
    int64_t begin,
    int64_t end) {
  return {
      queries.const_data_ptr<T>(),
      limits.defined() ? limits.const_data_ptr<T>() : nullptr,
      begin,
      end};
}

template <class T>
Pairs pairs_within(
    const PointTree& tree,
    const at::Tensor& queries,
    const at::Tensor& limits) {
  const TreeView<T> view(tree);
  const int64_t count = queries.size(0);
  const int64_t tasks = (count + kGrain - 1) / kGrain;
  const auto indices = queries.options().dtype(at::kLong);
  Pairs result{at::zeros({count}, indices), {}, {}};
  auto* const counts = result.counts.template mutable_data_ptr<int64_t>();
  std::vector<Found<T>> found(tasks, Found<T>{view, 0, {}});
  at::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t end = std::min((task + 1) * kGrain, count);
      within(
          task_of<T>(queries, limits, task * kGrain, end), counts, found[task]);
    }
  });
  int64_t pairs = 0;
  for (const auto& part : found) {
    pairs += static_cast<int64_t>(part.pairs.size());
  }
  result.rows = at::empty({pairs}, indices);
  result.squares = at::empty({pairs}, queries.options());
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
  at::parallel_for(0, whole.counts.numel(), kGrain, [&](int64_t b, int64_t e) {
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
  const std::vector<int64_t> sizes{queries.size(0), k};
  return {
      at::full(
          sizes, std::numeric_limits<double>::infinity(), queries.options()),
      at::full(sizes, kNoRow, queries.options().dtype(at::kLong))};
}

void search_nearest(
    const PointTree& tree,
    const at::Tensor& queries,
    const at::Tensor& limits,
    const Nearest& best) {
  const int64_t k = best.rows.size(1);
  if (tree.points == 0 || k == 0) {
    return;
  }
  AT_DISPATCH_FLOATING_TYPES(queries.scalar_type(), "search_nearest", [&] {
    const TreeView<scalar_t> view(tree);
    auto* const squares = best.squares.mutable_data_ptr<scalar_t>();
    auto* const rows = best.rows.mutable_data_ptr<int64_t>();
    at::parallel_for(0, queries.size(0), kGrain, [&](int64_t b, int64_t e) {
      nearest(view, task_of<scalar_t>(queries, limits, b, e), squares, rows, k);
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
    at::parallel_for(0, places.numel(), kGrain, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) {
        scalar_t* const own = squares + to[i] * k;
        Best<scalar_t> merged{own, rows + to[i] * k, k, own[k - 1]};
        for (int64_t j = i * k; j < (i + 1) * k; ++j) {
          if (from_rows[j] != Nearest::kNoRow) {
            merged.insert(from[j], from_rows[j]);
          }
        }
      }
    });
  });
}

Pairs search_within(
    const PointTree& tree,
    const at::Tensor& queries,
    const at::Tensor& limits) {
  return AT_DISPATCH_FLOATING_TYPES(
      queries.scalar_type(), "search_within", [&] {
        return pairs_within<scalar_t>(tree, queries, limits);
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
