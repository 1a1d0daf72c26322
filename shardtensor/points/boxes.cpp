#include "shardtensor/points/boxes.h"

#include <algorithm>
#include <limits>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

namespace shardtensor::detail {
namespace {

constexpr int64_t kBlock = 64; // queries

/// The box (2, D) around points, as box_of() gives it.
template <class T>
void hold(const T* points, int64_t count, int64_t dims, T* box) {
  std::fill_n(box, dims, std::numeric_limits<T>::infinity());
  std::fill_n(box + dims, dims, -std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t dim = 0; dim < dims; ++dim) {
      box[dim] = std::min(box[dim], points[i * dims + dim]);
      box[dims + dim] = std::max(box[dims + dim], points[i * dims + dim]);
    }
  }
}

/// The squared distance from a box to what lies between `low` and `high`, added
/// up as a tree's bounds are.
template <class T>
T gap(const T* low, const T* high, const T* box, int64_t dims) {
  T sum = 0;
  for (int64_t dim = 0; dim < dims; ++dim) {
    const T outside =
        std::max({box[dim] - high[dim], low[dim] - box[dims + dim], T(0)});
    sum += outside * outside;
  }
  return sum;
}

} // namespace

at::Tensor box_of(const at::Tensor& points) {
  const auto box = at::empty({2, points.size(1)}, points.options());
  AT_DISPATCH_FLOATING_TYPES(points.scalar_type(), "box_of", [&] {
    hold(
        points.const_data_ptr<scalar_t>(),
        points.size(0),
        points.size(1),
        box.mutable_data_ptr<scalar_t>());
  });
  return box;
}

QueryBlocks::QueryBlocks(const OrderedQueries& queries)
    : points_(queries.points), limits_(queries.limits) {
  const int64_t count = points_.size(0);
  const int64_t dims = points_.size(1);
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  boxes_ = at::empty({blocks, 2, dims}, points_.options());
  most_ = at::empty({blocks}, limits_.options());
  box_ = box_of(points_);
  most_of_all_ = at::empty({1}, limits_.options());
  AT_DISPATCH_FLOATING_TYPES(points_.scalar_type(), "QueryBlocks", [&] {
    const auto* const points = points_.const_data_ptr<scalar_t>();
    const auto* const limits = limits_.const_data_ptr<scalar_t>();
    auto* const boxes = boxes_.mutable_data_ptr<scalar_t>();
    auto* const most = most_.mutable_data_ptr<scalar_t>();
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kBlock;
      const int64_t rows = std::min(kBlock, count - begin);
      hold(points + begin * dims, rows, dims, boxes + block * 2 * dims);
      most[block] = *std::max_element(limits + begin, limits + begin + rows);
    }
    *most_of_all_.mutable_data_ptr<scalar_t>() = blocks == 0
        ? -std::numeric_limits<scalar_t>::infinity()
        : *std::max_element(most, most + blocks);
  });
}

template <class T>
at::Tensor QueryBlocks::near_of(const at::Tensor& box) const {
  const int64_t count = points_.size(0);
  const int64_t dims = points_.size(1);
  const auto* const corners = box.const_data_ptr<T>();
  const auto* const points = points_.const_data_ptr<T>();
  const auto* const limits = limits_.const_data_ptr<T>();
  const auto* const boxes = boxes_.const_data_ptr<T>();
  const auto* const most = most_.const_data_ptr<T>();
  const auto* const all = box_.const_data_ptr<T>();
  std::vector<int64_t> found;
  if (gap(all, all + dims, corners, dims) > *most_of_all_.const_data_ptr<T>()) {
    return at::empty({0}, points_.options().dtype(at::kLong));
  }
  for (int64_t block = 0; block < most_.numel(); ++block) {
    const T* const low = boxes + block * 2 * dims;
    if (gap(low, low + dims, corners, dims) > most[block]) {
      continue;
    }
    const int64_t end = std::min((block + 1) * kBlock, count);
    for (int64_t i = block * kBlock; i < end; ++i) {
      const T* const point = points + i * dims;
      if (gap(point, point, corners, dims) <= limits[i]) {
        found.push_back(i);
      }
    }
  }
  const auto places = at::empty(
      {static_cast<int64_t>(found.size())}, points_.options().dtype(at::kLong));
  std::copy(found.begin(), found.end(), places.mutable_data_ptr<int64_t>());
  return places;
}

at::Tensor QueryBlocks::near(const at::Tensor& box) const {
  return AT_DISPATCH_FLOATING_TYPES(
      points_.scalar_type(), "near", [&] { return near_of<scalar_t>(box); });
}

} // namespace shardtensor::detail
