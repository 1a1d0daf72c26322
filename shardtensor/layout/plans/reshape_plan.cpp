#include "shardtensor/layout/plans/reshape_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include <c10/util/Exception.h>

#include "shardtensor/layout/plans/transfer.h"
#include "shardtensor/layout/reduced_spec.h"

namespace shardtensor::detail {
namespace {

/// Consecutive input and output dims with equal products.
struct Group {
  int64_t in_begin;
  int64_t in_end;
  int64_t out_begin;
  int64_t out_end;
};

/// Sizes are all positive and have equal products.
std::vector<Group> factor(
    const std::vector<int64_t>& in,
    const std::vector<int64_t>& out) {
  const auto in_dims = static_cast<int64_t>(in.size());
  const auto out_dims = static_cast<int64_t>(out.size());
  std::vector<Group> groups;
  int64_t i = 0;
  int64_t o = 0;
  while (i < in_dims || o < out_dims) {
    Group group{i, i, o, o};
    int64_t left = i < in_dims ? in[i++] : 1;
    int64_t right = o < out_dims ? out[o++] : 1;
    while (left != right) {
      if (left < right) {
        left *= in[i++];
      } else {
        right *= out[o++];
      }
    }
    group.in_end = i;
    group.out_end = o;
    groups.push_back(group);
  }
  return groups;
}

/// The dims of one side of a group.
struct GroupSide {
  GroupSide(const std::vector<int64_t>& sizes, int64_t begin, int64_t end)
      : first(begin), sizes(sizes.begin() + begin, sizes.begin() + end) {}

  int64_t inner(size_t dim) const {
    return std::accumulate(
        sizes.begin() + static_cast<int64_t>(dim) + 1,
        sizes.end(),
        int64_t{1},
        std::multiplies<>());
  }
  int64_t numel() const {
    return sizes.empty() ? 1 : sizes[0] * inner(0);
  }

  int64_t first; // the tensor dim of sizes[0]
  std::vector<int64_t> sizes;
};

/// A cut of one dim as a cut of the flattened side.
Partition flatten(
    const GroupSide& side,
    size_t dim,
    const Partition& partition) {
  const auto inner = side.inner(dim);
  const auto outer = side.numel() / (inner * side.sizes[dim]);
  return partition.scaled(inner).repeated(outer);
}

/// The cut of one dim that flattens to `flat`, if there is one.
std::optional<Partition> unflatten(
    const GroupSide& side,
    size_t dim,
    const Partition& flat) {
  const auto inner = side.inner(dim);
  const auto extent = inner * side.sizes[dim];
  if (extent % flat.period() != 0) {
    return {};
  }
  auto sizes = flat.sizes();
  for (auto& size : sizes) {
    if (size % inner != 0) {
      return {};
    }
    size /= inner;
  }
  return Partition(sizes, extent / flat.period());
}

struct Placed {
  int64_t dim; // of the tensor
  Partition partition;
};

/// Where on this side a flat cut fits best: rather contiguous, rather on a
/// large dim.
std::optional<Placed> place(const GroupSide& side, const Partition& flat) {
  std::optional<Placed> best;
  for (size_t dim = 0; dim < side.sizes.size(); ++dim) {
    auto found = unflatten(side, dim, flat);
    if (found &&
        (!best || found->repeat() < best->partition.repeat() ||
         (found->repeat() == best->partition.repeat() &&
          found->extent() > best->partition.extent()))) {
      best = Placed{side.first + static_cast<int64_t>(dim), *found};
    }
  }
  return best;
}

/// How one group is cut before and after.
struct Cut {
  Placed in;
  Placed out;
};

/// What another repetition of a cut costs, as elements that move: who needs
/// neighbours sends a box for each.
constexpr int64_t kElementsPerRepetition = 64;

/// A plan under way: the layouts of input and output, dim by dim.
class Reshape {
 public:
  Reshape(const SpecPtr& spec, const std::vector<int64_t>& sizes)
      : wanted_(spec), sizes_(sizes), out_dims_(spec->mesh()->axes(), -1) {
    groups_ = factor(spec->sizes(), sizes);
    partitions_.resize(sizes.size());
  }

  ViewPlan plan() {
    for (const auto& group : groups_) {
      repair(group);
    }
    for (const auto& group : groups_) {
      follow(group);
    }
    auto placements = wanted_->placements();
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      if (placements[axis].is_shard()) {
        placements[axis] = Placement::shard(out_dims_[axis]);
      }
    }
    return {
        wanted_, make_spec(wanted_->mesh(), sizes_, placements, partitions_)};
  }

 private:
  using Candidate = std::pair<Partition, Placed>;

  GroupSide in_side(const Group& group) const {
    return {wanted_->sizes(), group.in_begin, group.in_end};
  }
  GroupSide out_side(const Group& group) const {
    return {sizes_, group.out_begin, group.out_end};
  }
  std::vector<int64_t> sharded_dims(const Group& group) const {
    std::vector<int64_t> dims;
    for (int64_t dim = group.in_begin; dim < group.in_end; ++dim) {
      if (wanted_->is_sharded(dim)) {
        dims.push_back(dim);
      }
    }
    return dims;
  }

  std::optional<Placed> placed(const Group& group, int64_t dim) const {
    const auto side = in_side(group);
    return place(
        out_side(group),
        flatten(side, dim - side.first, wanted_->partition(dim)));
  }

  /// Redistributes the group when its cut has no place in the output.
  void repair(const Group& group) {
    const auto dims = sharded_dims(group);
    if (dims.empty() || (dims.size() == 1 && placed(group, dims[0]))) {
      return;
    }
    wanted_ = repaired(group, dims);
  }

  void follow(const Group& group) {
    for (const int64_t dim : sharded_dims(group)) {
      const auto found = placed(group, dim);
      TORCH_INTERNAL_ASSERT(found);
      for (const int64_t axis : wanted_->axes(dim)) {
        out_dims_[axis] = found->dim;
      }
      partitions_[found->dim] = found->partition;
    }
  }

  SpecPtr repaired(const Group& group, const std::vector<int64_t>& dims) const {
    const auto axes = axes_of_dims(*wanted_, dims);
    const auto elsewhere = whole_dims(wanted_, dims, free_dims(group));
    const auto cuts = most_even_cuts(
        candidates(group, dims, axes), dims, elsewhere == replicated(wanted_));
    const auto repeats_now = repeats(group, dims);
    SpecPtr result = elsewhere;
    std::pair least{
        std::numeric_limits<int64_t>::max(),
        std::numeric_limits<int64_t>::max()};
    for (const auto& [flat, in] : cuts) {
      const auto spec = with_cut(dims, axes, in);
      const auto finer = std::max<int64_t>(flat.repeat() - repeats_now, 0);
      const std::pair cost{
          moved_elements(wanted_, spec) + finer * kElementsPerRepetition,
          flat.repeat()};
      if (cost < least) {
        least = cost;
        result = spec;
      }
    }
    return result;
  }

  /// What others move nobody asks. Where the dims could be cut elsewhere, or
  /// one piece would have all, none is taken that gives a rank twice its share.
  std::vector<Candidate> most_even_cuts(
      std::vector<Candidate> cuts,
      const std::vector<int64_t>& dims,
      bool would_gather) const {
    using Unevenness = std::pair<bool, bool>;
    Unevenness least{true, true};
    std::vector<std::pair<Unevenness, Candidate>> usable;
    for (auto& cut : cuts) {
      const auto& flat = cut.first;
      const auto sizes = flat.sizes();
      const auto largest = *std::max_element(sizes.begin(), sizes.end());
      const auto pieces = static_cast<int64_t>(sizes.size());
      const bool grows = largest * flat.repeat() > largest_piece(dims);
      const bool lopsided = grows && largest * pieces > 2 * flat.period();
      // A rank gets a third more than its share.
      const bool crowded = grows && 3 * largest * pieces > 4 * flat.period();
      const bool hopeless = pieces > 1 && largest == flat.period();
      if (!lopsided || (would_gather && !hopeless)) {
        least = std::min(least, {lopsided, crowded});
        usable.emplace_back(Unevenness{lopsided, crowded}, std::move(cut));
      }
    }
    std::vector<Candidate> result;
    for (auto& [unevenness, cut] : usable) {
      if (unevenness == least) {
        result.push_back(std::move(cut));
      }
    }
    return result;
  }

  /// How often a cut of the flattened group is repeated now.
  int64_t repeats(const Group& group, const std::vector<int64_t>& dims) const {
    const auto side = in_side(group);
    int64_t most = 1;
    for (const int64_t dim : dims) {
      const auto flat =
          flatten(side, dim - side.first, wanted_->partition(dim));
      most = std::max(most, flat.repeat());
    }
    return most;
  }

  /// Dims that the view leaves as they are, where a mesh axis can go.
  std::vector<int64_t> free_dims(const Group& group) const {
    std::vector<int64_t> dims;
    for (const auto& other : groups_) {
      if (other.in_begin != group.in_begin &&
          other.in_end - other.in_begin == 1 &&
          other.out_end - other.out_begin == 1) {
        dims.push_back(other.in_begin);
      }
    }
    return dims;
  }

  /// The most that one rank holds of the group now, in flattened rows.
  int64_t largest_piece(const std::vector<int64_t>& dims) const {
    return dims.size() == 1
        ? std::ranges::max(wanted_->partition(dims[0]).local_extents())
        : std::numeric_limits<int64_t>::max();
  }

  SpecPtr with_cut(
      const std::vector<int64_t>& dims,
      const std::vector<int64_t>& axes,
      const Placed& in) const {
    auto placements = wanted_->placements();
    auto partitions = wanted_->partitions();
    for (const int64_t dim : dims) {
      partitions[dim].reset();
    }
    for (const int64_t axis : axes) {
      placements[axis] = Placement::shard(in.dim);
    }
    partitions[in.dim] = in.partition;
    return make_spec(wanted_->mesh(), wanted_->sizes(), placements, partitions);
  }

  /// Cuts of the group by `axes` that have a place on both sides.
  std::vector<Candidate> candidates(
      const Group& group,
      const std::vector<int64_t>& dims,
      const std::vector<int64_t>& axes) const {
    const auto in = in_side(group);
    const auto out = out_side(group);
    std::vector<Candidate> result;
    for (size_t i = 0; i < in.sizes.size(); ++i) {
      for (size_t o = 0; o < out.sizes.size(); ++o) {
        const auto unit = std::lcm(in.inner(i), out.inner(o));
        for (const int64_t period :
             {in.sizes[i] * in.inner(i), out.sizes[o] * out.inner(o)}) {
          if (period % unit == 0) {
            add_even_cut(result, group, axes, i, o, unit, period);
          }
        }
        add_rounded_cut(result, group, dims, i, o, unit);
      }
    }
    return result;
  }

  void add_even_cut(
      std::vector<Candidate>& result,
      const Group& group,
      const std::vector<int64_t>& axes,
      size_t in_dim,
      size_t out_dim,
      int64_t unit,
      int64_t period) const {
    std::vector<int64_t> ranks;
    for (const int64_t axis : axes) {
      ranks.push_back(wanted_->mesh()->ranks(axis));
    }
    const auto once = Partition::chunked(period / unit, ranks).scaled(unit);
    const auto repeat = in_side(group).numel() / period;
    add(result, group, in_dim, out_dim, once.repeated(repeat));
  }

  /// The old cut points at the nearest multiples of `unit`.
  void add_rounded_cut(
      std::vector<Candidate>& result,
      const Group& group,
      const std::vector<int64_t>& dims,
      size_t in_dim,
      size_t out_dim,
      int64_t unit) const {
    if (dims.size() == 1) {
      const auto in = in_side(group);
      const auto own =
          flatten(in, dims[0] - in.first, wanted_->partition(dims[0]));
      if (own.period() % unit == 0) {
        add(result, group, in_dim, out_dim, rounded(own, unit));
      }
    }
  }

  void add(
      std::vector<Candidate>& result,
      const Group& group,
      size_t in_dim,
      size_t out_dim,
      const Partition& flat) const {
    const auto in = in_side(group);
    auto partition = unflatten(in, in_dim, flat);
    if (partition && unflatten(out_side(group), out_dim, flat)) {
      const auto dim = in.first + static_cast<int64_t>(in_dim);
      result.emplace_back(flat, Placed{dim, std::move(*partition)});
    }
  }

  static Partition rounded(const Partition& flat, int64_t unit) {
    std::vector<int64_t> sizes;
    int64_t before = 0;
    for (const int64_t offset : flat.offsets()) {
      const auto nearest = (offset + unit / 2) / unit * unit;
      sizes.push_back(nearest - before);
      before = nearest;
    }
    sizes.erase(sizes.begin()); // the first offset, 0
    return Partition(sizes, flat.repeat());
  }

  SpecPtr wanted_;
  const std::vector<int64_t>& sizes_;
  std::vector<Group> groups_;
  std::vector<int64_t> out_dims_; // per mesh axis
  ShardSpec::Partitions partitions_; // of the output
};

} // namespace

ViewPlan plan_reshape(const SpecPtr& spec, const std::vector<int64_t>& sizes) {
  if (spec->sizes() == sizes) {
    return {spec, spec};
  }
  if (spec->numel() == 0) {
    // No element, so nothing moves; factors of zero are not unique.
    auto placements = spec->placements();
    for (auto& placement : placements) {
      placement = placement.is_shard() ? Placement::replicate() : placement;
    }
    return {
        make_spec(spec->mesh(), spec->sizes(), placements),
        make_spec(spec->mesh(), sizes, placements)};
  }
  return Reshape(spec, sizes).plan();
}

} // namespace shardtensor::detail
