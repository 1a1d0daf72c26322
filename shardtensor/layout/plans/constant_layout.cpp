#include "shardtensor/layout/plans/constant_layout.h"

#include <algorithm>
#include <optional>

#include "shardtensor/layout/plans/view_plan.h"

namespace shardtensor::detail {
namespace {

/// Rows start, start + step, ... of a dim.
struct RowsOfDim {
  int64_t dim;
  int64_t start;
  int64_t end; // after the last one
  int64_t step;
};

/// The rows that a dim of the view shows of a dim of the tensor. None where it
/// shows more than one dim, or has one row at most, which lies anywhere.
std::optional<RowsOfDim> shown_rows(
    const std::vector<int64_t>& sizes,
    const ViewGeometry& view,
    int64_t view_dim) {
  const auto count = view.sizes[view_dim];
  const auto stride = view.strides[view_dim];
  int64_t along = 1; // the tensor's stride
  for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    if (count > 1 && along <= stride && stride < along * sizes[dim]) {
      const auto start = view.offset / along % sizes[dim];
      const auto step = stride / along;
      const auto end = start + (count - 1) * step + 1;
      const bool fits = stride % along == 0 && end <= sizes[dim];
      return fits ? std::make_optional(RowsOfDim{dim, start, end, step})
                  : std::nullopt;
    }
    along *= std::max<int64_t>(sizes[dim], 1);
  }
  return {};
}

bool is_balanced(const Partition& partition) {
  const int64_t largest = std::ranges::max(partition.local_extents());
  const auto even =
      (partition.extent() + partition.pieces() - 1) / partition.pieces();
  return 2 * largest <= 3 * even;
}

/// None: torch.chunk's split.
std::optional<Partition> cut_around(
    const SpecPtr& value,
    int64_t value_dim,
    const RowsOfDim& rows,
    int64_t size) {
  if (value->size(value_dim) == size) {
    return value->partition(value_dim);
  }
  const auto whole = plan_slice_backward(
      value, size, value_dim, rows.start, rows.end, rows.step);
  const auto& partition = whole.output->partition(value_dim);
  return is_balanced(partition) ? std::make_optional(partition) : std::nullopt;
}

/// The dim of the tensor that `pieces` ranks, which have a term of the value
/// each, take shares of: the last that keeps most ranks busy, or what keeps
/// most of them so. Two rows at the end, which may be a complex number's parts,
/// only where there is nothing else. -1 where the value fills no dim.
int64_t scattered_dim(
    const std::vector<int64_t>& sizes,
    const ViewGeometry& view,
    const SpecPtr& value,
    const std::vector<bool>& is_cut,
    int64_t pieces) {
  constexpr double kEnough = 0.8;
  const auto new_dims = static_cast<int64_t>(view.sizes.size()) - value->dim();
  int64_t best = -1;
  double best_share = 0;
  for (int64_t value_dim = value->dim() - 1; value_dim >= 0; --value_dim) {
    const auto view_dim = value_dim + new_dims;
    const auto rows =
        view_dim < 0 ? std::nullopt : shown_rows(sizes, view, view_dim);
    if (!rows || is_cut[rows->dim] ||
        value->size(value_dim) != sizes[rows->dim]) {
      continue;
    }
    const bool is_pair = rows->dim + 1 == static_cast<int64_t>(sizes.size()) &&
        sizes.back() == 2;
    const auto share = is_pair ? 0 : busy_share(sizes[rows->dim], pieces);
    if (share >= kEnough) {
      return rows->dim;
    }
    if (best < 0 || share > best_share) {
      best = rows->dim;
      best_share = share;
    }
  }
  return best;
}

} // namespace

Box shown_box(const std::vector<int64_t>& sizes, const ViewGeometry& view) {
  Box whole;
  for (const int64_t size : sizes) {
    whole.push_back({0, size});
  }
  Box shown(sizes.size());
  int64_t along = 1;
  for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    if (sizes[dim] == 0) {
      return whole;
    }
    const auto row = view.offset / along % sizes[dim];
    shown[dim] = {row, row + 1}; // where no dim of the view goes along it
    along *= sizes[dim];
  }
  const auto view_dims = static_cast<int64_t>(view.sizes.size());
  for (int64_t dim = 0; dim < view_dims; ++dim) {
    if (view.sizes[dim] == 1) {
      continue;
    }
    const auto rows = shown_rows(sizes, view, dim);
    if (!rows || shown[rows->dim].extent() > 1) {
      return whole;
    }
    shown[rows->dim] = {rows->start, rows->end};
  }
  return shown;
}

SpecPtr layout_of_written(
    const std::vector<int64_t>& sizes,
    const ViewGeometry& view,
    const SpecPtr& value) {
  std::vector<Placement> placements(value->placements().size());
  ShardSpec::Partitions partitions(sizes.size());
  std::vector<bool> is_cut(sizes.size());
  const auto new_dims = static_cast<int64_t>(view.sizes.size()) - value->dim();
  for (const int64_t value_dim : value->sharded_dims()) {
    const auto view_dim = value_dim + new_dims;
    if (view_dim < 0 || view.sizes[view_dim] != value->size(value_dim)) {
      continue; // it is broadcast
    }
    const auto rows = shown_rows(sizes, view, view_dim);
    if (!rows || is_cut[rows->dim]) {
      continue;
    }
    is_cut[rows->dim] = true;
    partitions[rows->dim] =
        cut_around(value, value_dim, *rows, sizes[rows->dim]);
    for (const int64_t axis : value->axes(value_dim)) {
      placements[axis] = Placement::shard(rows->dim);
    }
  }
  std::vector<int64_t> summed;
  for (const int64_t axis : value->partial_axes()) {
    if (value->placement(axis) == Placement::partial()) {
      summed.push_back(axis);
    }
  }
  const auto scattered = summed.empty()
      ? -1
      : scattered_dim(sizes, view, value, is_cut, value->mesh()->ranks(summed));
  for (const int64_t axis : summed) {
    if (scattered >= 0) {
      placements[axis] = Placement::shard(scattered);
    }
  }
  return make_spec(
      value->mesh(), sizes, std::move(placements), std::move(partitions));
}

} // namespace shardtensor::detail
