#include "shardtensor/rules/spectra/plan.h"

#include <algorithm>

#include "shardtensor/layout/plans/view_plan.h"

namespace shardtensor::detail {
namespace {

using Dims = std::vector<int64_t>;

bool has(const Dims& dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

/// Partial sums may stay, other terms are reduced.
SpecPtr with_sums_only(const SpecPtr& spec) {
  const auto& placements = spec->placements();
  return std::all_of(
             placements.begin(),
             placements.end(),
             [](const Placement& p) {
               return !p.is_partial() || p == Placement::partial();
             })
      ? spec
      : without_partial(spec);
}

class Planner {
 public:
  Planner(const SpecPtr& spec, const Transform& transform, SpecPtr home)
      : at_(with_sums_only(spec)),
        transform_(transform),
        home_(std::move(home)) {}

  TransformPlan plan() {
    auto lines = transform_.dims;
    const auto last = lines.back();
    if (transform_.lines != Lines::Complex) {
      lines.pop_back();
    }
    scatter_sums();
    if (transform_.lines == Lines::FromReal) {
      make_whole({last}, lines);
      step({last}, true);
    }
    transform_complex(
        lines, transform_.lines == Lines::ToReal ? Dims{last} : Dims{});
    if (transform_.lines == Lines::ToReal) {
      make_whole({last}, {});
      step({last}, true);
    }
    go_home();
    return std::move(plan_);
  }

 private:
  void transform_complex(Dims dims, const Dims& later) {
    while (!dims.empty()) {
      Dims whole;
      Dims cut;
      for (const int64_t dim : dims) {
        (at_->is_sharded(dim) ? cut : whole).push_back(dim);
      }
      if (!whole.empty()) {
        step(whole, false);
      }
      if (!cut.empty()) {
        make_whole(cut, later);
      }
      dims = std::move(cut);
    }
  }

  void step(const Dims& dims, bool real) {
    auto result = at_;
    if (real) {
      auto sizes = at_->sizes();
      sizes[dims.front()] = transform_.extent;
      result = with_sizes(at_, std::move(sizes));
    }
    plan_.steps.push_back({at_, dims, real, result});
    at_ = result;
    done_.insert(done_.end(), dims.begin(), dims.end());
  }

  /// Each rank gets its share of a sum that is still to be done, where that
  /// leaves the transformed dims as they are.
  void scatter_sums() {
    const auto axes = at_->partial_axes();
    if (axes.empty()) {
      return;
    }
    auto placements = at_->placements();
    const auto dim = best_of(candidates(transform_.dims), pieces_of(axes));
    for (const int64_t axis : axes) {
      const auto there = home_dim(axis, transform_.dims);
      if (const auto to = there < 0 ? dim : there; to >= 0) {
        placements[axis] = Placement::shard(to);
      }
    }
    at_ = with_placements(at_, placements, home_partitions(placements));
  }

  /// The dims are whole; what cut them cuts others, those of `later` only where
  /// there is no other. Where none can be cut, the first of the dims is whole
  /// and the rest are cut: it is transformed before them.
  void make_whole(const Dims& dims, const Dims& later) {
    auto reluctant = dims;
    reluctant.insert(reluctant.end(), later.begin(), later.end());
    const auto from = at_;
    move_towards_home(dims, reluctant);
    Dims axes;
    for (const int64_t dim : dims) {
      axes.insert(axes.end(), at_->axes(dim).begin(), at_->axes(dim).end());
    }
    if (axes.empty()) {
      return;
    }
    auto best = best_of(candidates(reluctant), pieces_of(axes));
    if (best < 0) {
      best = best_of(candidates(dims), pieces_of(axes));
    }
    if (best < 0 && dims.size() > 1) {
      make_whole({dims.front()}, {dims.begin() + 1, dims.end()});
      return;
    }
    at_ = whole_dims(at_, dims, best < 0 ? Dims{} : Dims{best});
    if (best < 0) {
      plan_.before_gather = from;
      plan_.gathered = at_;
    }
  }

  /// The axes that cut `dims` and belong to another dim at home go there.
  void move_towards_home(const Dims& dims, const Dims& excluded) {
    auto placements = at_->placements();
    for (const int64_t dim : dims) {
      for (const int64_t axis : at_->axes(dim)) {
        if (const auto there = home_dim(axis, excluded); there >= 0) {
          placements[axis] = Placement::shard(there);
        }
      }
    }
    if (placements != at_->placements()) {
      at_ = with_placements(at_, placements, home_partitions(placements));
    }
  }

  void go_home() {
    if (!home_) {
      return;
    }
    // What is whole at home may stay cut: nothing is gathered for it.
    auto placements = at_->placements();
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      const auto& there = home_->placement(static_cast<int64_t>(axis));
      placements[axis] = there.is_shard() ? there : placements[axis];
    }
    const auto layout =
        with_placements(at_, placements, home_partitions(placements));
    if (layout != at_) {
      plan_.steps.push_back({layout, {}, false, layout});
    }
  }

  int64_t home_dim(int64_t axis, const Dims& excluded) const {
    if (!home_ || !home_->placement(axis).is_shard()) {
      return -1;
    }
    const auto dim = home_->placement(axis).dim;
    return has(excluded, dim) ? -1 : dim;
  }

  /// Those of dims that are cut as they are at home.
  ShardSpec::Partitions home_partitions(
      const std::vector<Placement>& placements) const {
    ShardSpec::Partitions partitions(at_->dim());
    for (int64_t dim = 0; home_ && dim < at_->dim(); ++dim) {
      bool alike = home_->is_sharded(dim) && home_->size(dim) == at_->size(dim);
      for (size_t axis = 0; axis < placements.size(); ++axis) {
        alike = alike &&
            placements[axis].is_shard(dim) ==
                home_->placement(static_cast<int64_t>(axis)).is_shard(dim);
      }
      if (alike) {
        partitions[dim] = home_->partition(dim);
      }
    }
    return partitions;
  }

  /// What may be cut, the best first: what is done, the last first, for shifts
  /// of a spectrum leave its last dim alone; samples; other dims, of which the
  /// first is most often that of channels, which spectral layers contract.
  Dims candidates(const Dims& excluded) const {
    Dims result;
    const auto offer = [&](int64_t dim) {
      if (!has(excluded, dim) && !has(result, dim)) {
        result.push_back(dim);
      }
    };
    for (int64_t dim = at_->dim() - 1; dim >= 0; --dim) {
      if (has(done_, dim)) {
        offer(dim);
      }
    }
    offer(0);
    for (int64_t dim = at_->dim() - 1; dim > 0; --dim) {
      offer(dim);
    }
    return result;
  }

  int64_t pieces_of(const Dims& axes) const {
    int64_t pieces = 1;
    for (const int64_t axis : axes) {
      pieces *= at_->mesh()->ranks(axis);
    }
    return pieces;
  }

  /// The first that keeps most ranks busy, or what keeps most of them so.
  int64_t best_of(const Dims& dims, int64_t pieces) const {
    constexpr double kEnough = 0.8;
    int64_t best = -1;
    double best_share = 0;
    for (const int64_t dim : dims) {
      const auto there =
          at_->is_sharded(dim) ? at_->partition(dim).pieces() : 1;
      if (at_->size(dim) <= there) { // a cut more gives nobody less
        continue;
      }
      const auto share = busy_share(at_->size(dim), there * pieces);
      if (share >= kEnough) {
        return dim;
      }
      if (share > best_share) {
        best = dim;
        best_share = share;
      }
    }
    return best;
  }

  SpecPtr at_; // where the plan has come so far
  const Transform& transform_;
  SpecPtr home_;
  Dims done_;
  TransformPlan plan_;
};

} // namespace

bool TransformPlan::keeps_sums() const {
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) {
    return step.result->has_partial();
  });
}

TransformPlan plan_transform(
    const SpecPtr& spec,
    const Transform& transform,
    const SpecPtr& home) {
  return Planner(spec, transform, home).plan();
}

} // namespace shardtensor::detail
