#include "shardtensor/comm/primitives/exchange_writing.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

// Boxes that lie apart along some dim share nothing, so boxes are first put
// into clusters, by cutting along one dim after the other where no box is cut.
// Most clusters are then one box. A row that goes to thousands of ranks is a
// cluster of thousands of equal boxes.

namespace shardtensor::detail {

namespace {

/// Places in the list of boxes, in order.
using Cluster = std::vector<size_t>;
using Clusters = std::vector<Cluster>;

/// Clusters of more boxes are not looked at pair by pair.
constexpr size_t kMostPaired = 64;

// ---- clusters ---------------------------------------------------------------

/// The parts of a cluster that lie apart along dim.
Clusters split(
    const std::vector<BoxOfPeer>& boxes,
    Cluster cluster,
    size_t dim) {
  const auto along = [&](size_t i) { return (*boxes[i].box)[dim]; };
  std::stable_sort(cluster.begin(), cluster.end(), [&](size_t a, size_t b) {
    return along(a).begin < along(b).begin;
  });
  Clusters parts;
  int64_t end = 0;
  for (const size_t i : cluster) {
    if (parts.empty() || along(i).begin >= end) {
      parts.emplace_back();
    }
    parts.back().push_back(i);
    end = std::max(end, along(i).end);
  }
  return parts;
}

/// Splits along each dim in turn, until no dim splits any further.
void append_clusters(
    const std::vector<BoxOfPeer>& boxes,
    Cluster cluster,
    Clusters& result) {
  const size_t dims = cluster.empty() ? 0 : boxes[cluster[0]].box->size();
  for (size_t dim = 0; dim < dims && cluster.size() > 1; ++dim) {
    Clusters parts = split(boxes, cluster, dim);
    if (parts.size() > 1) {
      for (Cluster& part : parts) {
        append_clusters(boxes, std::move(part), result);
      }
      return;
    }
  }
  std::sort(cluster.begin(), cluster.end());
  result.push_back(std::move(cluster));
}

Clusters find_clusters(const std::vector<BoxOfPeer>& boxes) {
  Cluster all(boxes.size());
  std::iota(all.begin(), all.end(), 0);
  Clusters clusters;
  append_clusters(boxes, std::move(all), clusters);
  return clusters;
}

// ---- within a cluster -------------------------------------------------------

bool overlap(const Box& a, const Box& b) {
  for (size_t dim = 0; dim < a.size(); ++dim) {
    if (intersect(a[dim], b[dim]).empty()) {
      return false;
    }
  }
  return true;
}

bool are_equal(const std::vector<BoxOfPeer>& boxes, const Cluster& cluster) {
  const Box& first = *boxes[cluster[0]].box;
  return std::all_of(cluster.begin(), cluster.end(), [&](size_t i) {
    return *boxes[i].box == first;
  });
}

/// visit(i, j) for all boxes i < j of the cluster that share elements.
template <class Visit>
void for_each_pair(
    const std::vector<BoxOfPeer>& boxes,
    const Cluster& cluster,
    const Visit& visit) {
  for (size_t a = 0; a < cluster.size(); ++a) {
    for (size_t b = a + 1; b < cluster.size(); ++b) {
      const size_t i = cluster[a];
      const size_t j = cluster[b];
      if (overlap(*boxes[i].box, *boxes[j].box)) {
        visit(i, j);
      }
    }
  }
}

/// Whether two other ranks write one element.
bool needs_rank_order(
    const std::vector<BoxOfPeer>& boxes,
    const Cluster& cluster,
    int64_t rank) {
  if (cluster.size() > kMostPaired) {
    return true;
  }
  bool needs = false;
  for_each_pair(boxes, cluster, [&](size_t i, size_t j) {
    const int64_t a = boxes[i].peer;
    const int64_t b = boxes[j].peer;
    needs |= a != b && a != rank && b != rank;
  });
  return needs;
}

/// `is_before(i, j)`: box i is written before box j.
void mark_adding(
    std::vector<BoxOfPeer>& boxes,
    const Cluster& cluster,
    const std::function<bool(size_t, size_t)>& is_before) {
  if (cluster.size() <= kMostPaired) {
    for_each_pair(boxes, cluster, [&](size_t i, size_t j) {
      boxes[is_before(i, j) ? j : i].adds = true;
    });
    return;
  }
  for (const size_t i : cluster) {
    boxes[i].adds = true;
  }
  if (are_equal(boxes, cluster)) {
    const size_t first =
        *std::min_element(cluster.begin(), cluster.end(), is_before);
    boxes[first].adds = false;
  }
}

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

} // namespace

Writing plan_writing(
    std::vector<BoxOfPeer>& boxes,
    int64_t rank,
    const std::vector<int64_t>& sizes) {
  const Clusters clusters = find_clusters(boxes);
  Writing result;
  for (const Cluster& cluster : clusters) {
    result.in_rank_order |= needs_rank_order(boxes, cluster, rank);
  }
  const auto place = [&](size_t i) {
    const bool first = !result.in_rank_order && boxes[i].peer == rank;
    return std::make_pair(first ? 0 : 1, i);
  };
  for (const Cluster& cluster : clusters) {
    mark_adding(boxes, cluster, [&](size_t i, size_t j) {
      return place(i) < place(j);
    });
  }
  int64_t written = 0;
  for (const BoxOfPeer& box : boxes) {
    written += box.adds ? 0 : numel(*box.box);
  }
  result.starts_at_zero = written != product(sizes);
  return result;
}

} // namespace shardtensor::detail
