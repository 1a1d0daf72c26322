#include "shardtensor/comm/primitives/box_rows.h"

#include <algorithm>
#include <numeric>

namespace shardtensor::detail {
namespace {

/// The last dim along which some box is not whole; -1: none.
int64_t last_cut_dim(
    c10::IntArrayRef sizes,
    const std::vector<MessageBox>& boxes) {
  auto dim = static_cast<int64_t>(sizes.size()) - 1;
  while (dim >= 0 && std::all_of(boxes.begin(), boxes.end(), [&](auto& box) {
           return box.extent[dim] == sizes[dim];
         })) {
    --dim;
  }
  return dim;
}

/// What divides the bounds of all boxes along `dim`, and its size.
int64_t common_step(
    c10::IntArrayRef sizes,
    const std::vector<MessageBox>& boxes,
    int64_t dim) {
  int64_t step = sizes[dim];
  for (const auto& box : boxes) {
    step = std::gcd(step, std::gcd(box.begin[dim], box.extent[dim]));
  }
  return step;
}

/// Sizes and boxes where `step` elements of the last dim are one.
class Grid {
 public:
  Grid(c10::IntArrayRef sizes, int64_t dim, int64_t step)
      : sizes_(sizes), dim_(dim), step_(step) {}

  void append(const MessageBox& box, std::vector<int64_t>& rows) const {
    if (dim_ < 0) { // the box is the tensor
      rows.push_back(0);
    } else {
      append(box, 0, 0, rows);
    }
  }

 private:
  void append(
      const MessageBox& box,
      int64_t dim,
      int64_t before,
      std::vector<int64_t>& rows) const {
    const int64_t step = dim == dim_ ? step_ : 1;
    const int64_t first = before * (sizes_[dim] / step) + box.begin[dim] / step;
    for (int64_t i = 0; i < box.extent[dim] / step; ++i) {
      if (dim == dim_) {
        rows.push_back(first + i);
      } else {
        append(box, dim + 1, first + i, rows);
      }
    }
  }

  c10::IntArrayRef sizes_;
  int64_t dim_;
  int64_t step_;
};

int64_t count_of(const std::vector<MessageBox>& boxes) {
  int64_t elements = 0;
  for (const auto& box : boxes) {
    elements += box.numel;
  }
  return elements;
}

bool are_distinct(std::vector<int64_t> rows) {
  std::sort(rows.begin(), rows.end());
  return std::adjacent_find(rows.begin(), rows.end()) == rows.end();
}

} // namespace

std::optional<BoxRows> rows_of(
    c10::IntArrayRef sizes,
    const std::vector<MessageBox>& boxes,
    int64_t most) {
  BoxRows result;
  const int64_t dim = last_cut_dim(sizes, boxes);
  const int64_t step = dim < 0 ? 1 : common_step(sizes, boxes, dim);
  result.length = step;
  for (size_t d = dim + 1; d < sizes.size(); ++d) {
    result.length *= sizes[d];
  }
  if (count_of(boxes) > most * result.length) {
    return std::nullopt;
  }
  const Grid grid(sizes, dim, step);
  for (const auto& box : boxes) {
    grid.append(box, result.rows);
  }
  result.distinct = are_distinct(result.rows);
  return result;
}

} // namespace shardtensor::detail
