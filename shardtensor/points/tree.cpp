#include "shardtensor/points/tree.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/threads/parallel_for.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kLevelDepth = 3; // a search sees every third depth
// Nodes down to this depth are sorted one depth after the other, since few
// threads could work on the first ones; below, each with all that it contains.
constexpr int64_t kBroadDepth = 6;

int64_t depth_of(int64_t points) {
  int64_t depth = 0;
  while (((points - 1) >> depth) + 1 > PointTree::kLeafPoints) {
    ++depth;
  }
  return depth;
}

/// Sorts points into the tree's order, node by node.
template <class T>
class Sorter {
 public:
  Sorter(T* points, int32_t* rows, int64_t count, int64_t dims)
      : points_(points),
        rows_(rows),
        count_(count),
        dims_(dims),
        depth_(depth_of(count)),
        keys_(count),
        moved_points_(count * dims),
        moved_rows_(count) {}

  void run() {
    const int64_t broad = std::min(depth_, kBroadDepth);
    for (int64_t depth = 0; depth < broad; ++depth) {
      each_node(depth, [&](int64_t node) { halve(depth, node); });
    }
    each_node(broad, [&](int64_t node) { halve_all(broad, node); });
  }

 private:
  struct Key {
    T value;
    int32_t from;
  };

  template <class Work>
  static void each_node(int64_t depth, const Work& work) {
    parallel_for(int64_t{1} << depth, 1, [&](int64_t b, int64_t e) {
      for (int64_t node = b; node < e; ++node) {
        work(node);
      }
    });
  }

  void halve_all(int64_t depth, int64_t node) {
    if (depth < depth_) {
      halve(depth, node);
      halve_all(depth + 1, 2 * node);
      halve_all(depth + 1, 2 * node + 1);
    }
  }

  /// Along the dim in which the node is widest.
  void halve(int64_t depth, int64_t node) {
    const int64_t begin = PointTree::begin_of(count_, depth, node);
    const int64_t end = PointTree::begin_of(count_, depth, node + 1);
    const int64_t middle = PointTree::begin_of(count_, depth + 1, 2 * node + 1);
    const int64_t dim = widest_dim(begin, end);
    for (int64_t i = begin; i < end; ++i) {
      keys_[i] = {points_[i * dims_ + dim], static_cast<int32_t>(i)};
    }
    std::nth_element(
        keys_.begin() + begin,
        keys_.begin() + middle,
        keys_.begin() + end,
        [](const Key& a, const Key& b) { return a.value < b.value; });
    move(begin, end);
  }

  int64_t widest_dim(int64_t begin, int64_t end) const {
    int64_t widest = 0;
    T width = -1;
    for (int64_t dim = 0; dim < dims_; ++dim) {
      T low = std::numeric_limits<T>::infinity();
      T high = -low;
      for (int64_t i = begin; i < end; ++i) {
        low = std::min(low, points_[i * dims_ + dim]);
        high = std::max(high, points_[i * dims_ + dim]);
      }
      if (high - low > width) {
        width = high - low;
        widest = dim;
      }
    }
    return widest;
  }

  /// As the keys stand.
  void move(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = keys_[i].from;
      std::copy_n(
          points_ + from * dims_, dims_, moved_points_.begin() + i * dims_);
      moved_rows_[i] = rows_[from];
    }
    std::copy(
        moved_points_.begin() + begin * dims_,
        moved_points_.begin() + end * dims_,
        points_ + begin * dims_);
    std::copy(
        moved_rows_.begin() + begin, moved_rows_.begin() + end, rows_ + begin);
  }

  T* points_;
  int32_t* rows_;
  int64_t count_;
  int64_t dims_;
  int64_t depth_;
  std::vector<Key> keys_;
  std::vector<T> moved_points_;
  std::vector<int32_t> moved_rows_;
};

/// The boxes of one level's nodes.
template <class T>
class LevelBoxes {
 public:
  LevelBoxes(PointTree& tree, size_t level)
      : data_(tree.boxes.mutable_data_ptr<T>()),
        dims_(tree.dims),
        first_(tree.first_groups[level]),
        shift_(tree.depths[level] - tree.depths[level - 1]) {}

  T& low(int64_t node, int64_t dim) const {
    const int64_t group = first_ + (node >> shift_);
    const int64_t lane = node & ((int64_t{1} << shift_) - 1);
    return data_[(group * 2 * dims_ + dim) * PointTree::kLanes + lane];
  }
  T& high(int64_t node, int64_t dim) const {
    return (&low(node, dim))[dims_ * PointTree::kLanes];
  }
  int64_t shift() const {
    return shift_;
  }

 private:
  T* data_;
  int64_t dims_;
  int64_t first_;
  int64_t shift_;
};

template <class T>
void fill_leaves(PointTree& tree, const T* points) {
  T* const slots = tree.leaves.mutable_data_ptr<T>();
  parallel_for(tree.leaves.size(0), 256, [&](int64_t b, int64_t e) {
    for (int64_t leaf = b; leaf < e; ++leaf) {
      const int64_t begin =
          PointTree::begin_of(tree.points, tree.depth(), leaf);
      const int64_t end =
          PointTree::begin_of(tree.points, tree.depth(), leaf + 1);
      for (int64_t dim = 0; dim < tree.dims; ++dim) {
        T* const slot = slots + (leaf * tree.dims + dim) * tree.leaf_stride;
        for (int64_t i = begin; i < end; ++i) {
          slot[i - begin] = points[i * tree.dims + dim];
        }
      }
    }
  });
}

template <class T>
void box_leaves(PointTree& tree, const T* points) {
  const LevelBoxes<T> boxes(tree, tree.depths.size() - 1);
  parallel_for(tree.leaves.size(0), 256, [&](int64_t b, int64_t e) {
    for (int64_t leaf = b; leaf < e; ++leaf) {
      const int64_t end =
          PointTree::begin_of(tree.points, tree.depth(), leaf + 1);
      for (int64_t i = PointTree::begin_of(tree.points, tree.depth(), leaf);
           i < end;
           ++i) {
        for (int64_t dim = 0; dim < tree.dims; ++dim) {
          const T value = points[i * tree.dims + dim];
          boxes.low(leaf, dim) = std::min(boxes.low(leaf, dim), value);
          boxes.high(leaf, dim) = std::max(boxes.high(leaf, dim), value);
        }
      }
    }
  });
}

/// The boxes of a level's nodes hold those of the next one's.
template <class T>
void box_level(PointTree& tree, size_t level) {
  const LevelBoxes<T> boxes(tree, level);
  const LevelBoxes<T> inner(tree, level + 1);
  const int64_t nodes = int64_t{1} << tree.depths[level + 1];
  for (int64_t node = 0; node < nodes; ++node) {
    const int64_t parent = node >> inner.shift();
    for (int64_t dim = 0; dim < tree.dims; ++dim) {
      T& low = boxes.low(parent, dim);
      T& high = boxes.high(parent, dim);
      low = std::min(low, inner.low(node, dim));
      high = std::max(high, inner.high(node, dim));
    }
  }
}

template <class T>
void box_nodes(PointTree& tree, const T* points) {
  constexpr T kNone = std::numeric_limits<T>::infinity();
  tree.boxes.select(1, 0).fill_(kNone);
  tree.boxes.select(1, 1).fill_(-kNone);
  const size_t levels = tree.depths.size();
  if (levels > 1) {
    box_leaves(tree, points);
  }
  for (size_t level = levels - 1; level > 1; --level) {
    box_level<T>(tree, level - 1);
  }
}

} // namespace

OrderedPoints order_as_tree(const at::Tensor& points) {
  OrderedPoints ordered{
      at::empty(points.sizes(), points.options()),
      at::empty({points.size(0)}, points.options().dtype(at::kInt))};
  ordered.points.copy_(points);
  auto* const rows = ordered.rows.mutable_data_ptr<int32_t>();
  std::iota(rows, rows + points.size(0), 0);
  AT_DISPATCH_FLOATING_TYPES(points.scalar_type(), "order_as_tree", [&] {
    Sorter<scalar_t>(
        ordered.points.mutable_data_ptr<scalar_t>(),
        rows,
        points.size(0),
        points.size(1))
        .run();
  });
  return ordered;
}

PointTree::PointTree(const OrderedPoints& ordered, int64_t first)
    : points(ordered.points.size(0)),
      dims(ordered.points.size(1)),
      first_row(first),
      depths{0},
      first_groups{0},
      rows(ordered.rows) {
  const int64_t leaf_depth = depth_of(points);
  int64_t groups = 0;
  while (depth() < leaf_depth) {
    first_groups.push_back(groups);
    groups += int64_t{1} << depth();
    // The first level takes what threes leave over.
    const int64_t rest = (leaf_depth - depth()) % kLevelDepth;
    depths.push_back(depth() + (rest == 0 ? kLevelDepth : rest));
  }
  const int64_t most = points == 0 ? 0 : ((points - 1) >> leaf_depth) + 1;
  leaf_stride = (most + kLanes - 1) / kLanes * kLanes;
  const auto options = ordered.points.options();
  boxes = at::empty({groups, 2, dims, kLanes}, options);
  leaves = at::zeros({int64_t{1} << leaf_depth, dims, leaf_stride}, options);
  AT_DISPATCH_FLOATING_TYPES(ordered.points.scalar_type(), "PointTree", [&] {
    const auto* const data = ordered.points.const_data_ptr<scalar_t>();
    fill_leaves(*this, data);
    box_nodes(*this, data);
  });
}

} // namespace shardtensor::detail
