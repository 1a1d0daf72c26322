#include "shardtensor/layout/plans/view_plan.h"

#include <algorithm>
#include <numeric>

#include "shardtensor/layout/reduced_spec.h"

namespace shardtensor::detail {

// ---- dims that move, appear and disappear -----------------------------------

namespace {

/// The layout in which dims that a view drops or expands are whole.
SpecPtr without_shards(SpecPtr spec, const std::vector<int64_t>& dims) {
  for (const int64_t dim : dims) {
    spec = without_shard(spec, dim);
  }
  return spec;
}

} // namespace

ViewPlan plan_dims(const SpecPtr& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> dropped;
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
      dropped.push_back(dim);
    }
  }
  std::vector<int64_t> sizes;
  for (const int64_t dim : dims) {
    sizes.push_back(dim < 0 ? 1 : spec->size(dim));
  }
  const auto wanted = without_shards(spec, dropped);
  return {wanted, with_dims(wanted, sizes, dims)};
}

ViewPlan plan_expand(const SpecPtr& spec, const std::vector<int64_t>& sizes) {
  const auto dims = static_cast<int64_t>(sizes.size());
  const auto shift = dims - spec->dim();
  std::vector<int64_t> expanded;
  std::vector<int64_t> from(dims, -1);
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    if (spec->size(dim) == sizes[dim + shift]) {
      from[dim + shift] = dim;
    } else {
      expanded.push_back(dim);
    }
  }
  const auto wanted = without_shards(spec, expanded);
  return {wanted, with_dims(wanted, sizes, from)};
}

// ---- slices -----------------------------------------------------------------

namespace {

/// Rows start, start + step, ... < end of a dim.
struct Rows {
  int64_t start;
  int64_t end;
  int64_t step;

  int64_t count() const {
    return (end - start + step - 1) / step;
  }
  /// How many of them lie before `row`.
  int64_t before(int64_t row) const {
    return row <= start ? 0
                        : std::min((row - start + step - 1) / step, count());
  }
  /// The local start and end for a rank that owns `interval`.
  std::vector<int64_t> within(const Interval& interval) const {
    const auto skipped = before(interval.begin);
    const auto count = before(interval.end) - skipped;
    if (count <= 0) {
      return {0, 0};
    }
    const auto first = start + skipped * step - interval.begin;
    return {first, first + (count - 1) * step + 1};
  }
};

std::vector<int64_t> differences(const std::vector<int64_t>& offsets) {
  std::vector<int64_t> sizes(offsets.size());
  std::adjacent_difference(offsets.begin(), offsets.end(), sizes.begin());
  sizes.erase(sizes.begin());
  return sizes;
}

SpecPtr resized(const SpecPtr& spec, int64_t dim, int64_t size) {
  auto sizes = spec->sizes();
  sizes[dim] = size;
  return with_sizes(spec, std::move(sizes));
}

/// Whole repetitions of a repeated partition: no piece is cut.
ViewPlan plan_repetitions(
    const SpecPtr& spec,
    int64_t dim,
    int64_t start,
    int64_t end) {
  const auto& partition = spec->partition(dim);
  const auto period = partition.period();
  const auto own = spec->interval(dim).extent();
  const auto once = Partition(partition.sizes());
  return {
      spec,
      with_partition(spec, dim, once.repeated((end - start) / period)),
      {start / period * own, end / period * own}};
}

} // namespace

SpecPtr contiguous_dim(const SpecPtr& spec, int64_t dim) {
  if (!spec->is_sharded(dim) || spec->partition(dim).is_contiguous()) {
    return spec;
  }
  return with_partition(
      spec, dim, Partition(spec->partition(dim).local_extents()));
}

SpecPtr contiguous_dims(SpecPtr spec, const std::vector<int64_t>& dims) {
  for (const int64_t dim : dims) {
    spec = contiguous_dim(spec, dim);
  }
  return spec;
}

SpecPtr contiguous(const SpecPtr& spec) {
  return contiguous_dims(spec, spec->sharded_dims());
}

ViewPlan plan_slice(
    const SpecPtr& spec,
    int64_t dim,
    int64_t start,
    int64_t end,
    int64_t step) {
  const Rows rows{start, end, step};
  if (rows.count() == spec->size(dim)) {
    return {spec, spec, {0, spec->local_sizes()[dim]}};
  }
  if (!spec->is_sharded(dim)) {
    return {spec, resized(spec, dim, rows.count()), {start, end}};
  }
  const auto& own = spec->partition(dim);
  if (!own.is_contiguous()) {
    if (step == 1 && start % own.period() == 0 && end % own.period() == 0) {
      return plan_repetitions(spec, dim, start, end);
    }
    return plan_slice(contiguous_dim(spec, dim), dim, start, end, step);
  }
  std::vector<int64_t> offsets;
  for (const int64_t offset : own.offsets()) {
    offsets.push_back(rows.before(offset));
  }
  return {
      spec,
      with_partition(spec, dim, Partition(differences(offsets))),
      rows.within(spec->interval(dim))};
}

namespace {

/// Cut points of the sliced dim for the cut points of its slice.
std::vector<int64_t> unsliced_offsets(
    const std::vector<int64_t>& offsets,
    const Rows& rows,
    int64_t size) {
  const auto count = rows.count();
  const auto pieces = static_cast<int64_t>(offsets.size()) - 1;
  int64_t first = 0; // the first piece with rows of the slice
  while (first < pieces - 1 && offsets[first + 1] == 0) {
    ++first;
  }
  int64_t last = pieces - 1;
  while (last > first && offsets[last] == count) {
    --last;
  }
  const auto middle_end = last < pieces - 1
      ? std::min(rows.start + (count - 1) * rows.step + 1, size)
      : size;
  std::vector<int64_t> result(offsets.size());
  for (int64_t cut = 0; cut <= pieces; ++cut) {
    if (cut <= first) {
      result[cut] = first == 0 ? 0 : rows.start * cut / first;
    } else if (cut <= last) {
      result[cut] = rows.start + offsets[cut] * rows.step;
    } else {
      const auto after = pieces - 1 - last;
      result[cut] = after == 0
          ? size
          : middle_end + (size - middle_end) * (cut - last - 1) / after;
    }
  }
  return result;
}

} // namespace

ViewPlan plan_slice_backward(
    const SpecPtr& grad,
    int64_t size,
    int64_t dim,
    int64_t start,
    int64_t end,
    int64_t step) {
  const Rows rows{start, end, step};
  if (!grad->is_sharded(dim)) {
    return {grad, resized(grad, dim, size), {start, end}};
  }
  const auto& own = grad->partition(dim);
  if (!own.is_contiguous()) {
    return plan_slice_backward(
        contiguous_dim(grad, dim), size, dim, start, end, step);
  }
  if (rows.count() == 0) {
    const auto output =
        with_partition(grad, dim, Partition::chunked(size, own.pieces()));
    return {grad, output, {0, 0}};
  }
  const auto output = with_partition(
      grad,
      dim,
      Partition(differences(unsliced_offsets(own.offsets(), rows, size))));
  return {grad, output, rows.within(output->interval(dim))};
}

ViewPlan plan_select_backward(const SpecPtr& grad, int64_t size, int64_t dim) {
  auto sizes = grad->sizes();
  sizes.insert(sizes.begin() + dim, size);
  std::vector<int64_t> from(grad->dim());
  std::iota(from.begin(), from.end(), 0);
  from.insert(from.begin() + dim, -1);
  const auto whole = with_dims(grad, std::move(sizes), from);
  int64_t pieces = 1;
  auto placements = whole->placements();
  for (int64_t axis = 0; axis < grad->mesh()->axes(); ++axis) {
    if (placements[axis].is_replicate()) {
      pieces *= grad->mesh()->ranks(axis);
      placements[axis] = Placement::shard(dim);
    }
  }
  return {
      grad,
      size < pieces ? whole : with_placements(whole, std::move(placements))};
}

double busy_share(int64_t extent, int64_t pieces) {
  const auto largest = (extent + pieces - 1) / pieces;
  return largest == 0
      ? 0
      : static_cast<double>(extent) / static_cast<double>(largest * pieces);
}

// ---- dims that an operator needs whole --------------------------------------

namespace {

/// `dim` cut by its own axes and `axes`. Pieces stay where they are when the
/// new axes come last.
std::optional<Partition> refined(
    const SpecPtr& spec,
    int64_t dim,
    const std::vector<int64_t>& axes) {
  if (!spec->is_sharded(dim) || !spec->partition(dim).is_contiguous() ||
      spec->axes(dim).back() > axes.front()) {
    return {};
  }
  std::vector<int64_t> ranks;
  for (const int64_t axis : axes) {
    ranks.push_back(spec->mesh()->ranks(axis));
  }
  std::vector<int64_t> sizes;
  for (const int64_t size : spec->partition(dim).sizes()) {
    const auto finer = Partition::chunked(size, ranks).sizes();
    sizes.insert(sizes.end(), finer.begin(), finer.end());
  }
  return Partition(sizes);
}

} // namespace

SpecPtr whole_dims(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& others) {
  const auto axes = axes_of_dims(*spec, dims);
  if (axes.empty()) {
    return spec;
  }
  const auto rows = [&](int64_t dim) {
    return spec->is_sharded(dim)
        ? spec->size(dim) / spec->partition(dim).pieces()
        : spec->size(dim);
  };
  int64_t best = -1;
  for (const int64_t dim : others) {
    if (rows(dim) > 1 && (best < 0 || rows(dim) > rows(best))) {
      best = dim;
    }
  }
  auto placements = spec->placements();
  auto partitions = spec->partitions();
  for (const int64_t dim : dims) {
    partitions[dim].reset();
  }
  if (best >= 0) {
    partitions[best] = refined(spec, best, axes);
  }
  for (const int64_t axis : axes) {
    placements[axis] =
        best < 0 ? Placement::replicate() : Placement::shard(best);
  }
  return make_spec(
      spec->mesh(), spec->sizes(), placements, std::move(partitions));
}

SpecPtr whole_dims(const SpecPtr& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> others;
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
      others.push_back(dim);
    }
  }
  return whole_dims(spec, dims, others);
}

} // namespace shardtensor::detail
