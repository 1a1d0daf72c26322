#include "shardtensor/tensor/redistribute.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/div.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/layout/plans/split_repeats.h"
#include "shardtensor/layout/plans/transfer.h"

namespace shardtensor::detail {
namespace {

/// Axes that one call reduces where they are all of the mesh's.
struct ReducedAxes {
  Reduce reduce;
  std::vector<int64_t> axes;
};

/// An exchange of the local tensor.
struct Step {
  EncodedExchange exchange;
  std::vector<int64_t> sizes; // with repeated dims split, if one is
  std::vector<int64_t> result_sizes; // with dims as they were
};

at::Tensor run(const Step& step, const at::Tensor& local) {
  return step.sizes.empty() ? exchange(local, step.exchange)
                            : exchange(local.view(step.sizes), step.exchange)
                                  .reshape(step.result_sizes);
}

/// The steps of a redistribution, a function of the two specs alone:
/// all-reduces, then an exchange, then terms made from whole values.
struct RedistributePlan {
  std::vector<int64_t> averaged; // Partial(avg) axes that the exchange sums
  std::vector<ReducedAxes> reduced;
  SpecPtr moved_from; // between reductions and terms
  SpecPtr moved_to;
  bool exchanges = false;
  bool only_cuts = false; // every rank keeps a part of what it has
  std::vector<Step> steps; // of the exchange
  std::vector<int64_t> padded; // dims whose pieces become terms, zero elsewhere
  bool zeroed = false; // made Partial(sum): another rank holds the value

  int64_t bytes() const {
    auto result = static_cast<int64_t>(sizeof(*this));
    for (const auto& step : steps) {
      result += step.exchange.bytes();
    }
    return result;
  }
};

bool cut_only(const ShardSpec& from, const ShardSpec& to) {
  for (int64_t axis = 0; axis < from.mesh()->axes(); ++axis) {
    if (!from.placement(axis).is_replicate() &&
        from.placement(axis) != to.placement(axis)) {
      return false;
    }
  }
  for (const int64_t dim : from.sharded_dims()) {
    if (from.axes(dim) != to.axes(dim) ||
        from.partition(dim) != to.partition(dim)) {
      return false;
    }
  }
  return to.is_contiguous();
}

/// The dim that this axis cuts, if all axes that cut it become Partial(sum):
/// each rank then keeps its rows as a term.
std::optional<int64_t> dim_of_terms(
    const ShardSpec& from,
    const ShardSpec& to,
    int64_t axis) {
  const auto& before = from.placement(axis);
  if (!before.is_shard() || to.is_sharded(before.dim) ||
      !from.partition(before.dim).is_contiguous()) {
    return std::nullopt;
  }
  const auto& axes = from.axes(before.dim);
  const bool all = std::all_of(axes.begin(), axes.end(), [&](int64_t each) {
    return to.placement(each) == Placement::partial();
  });
  return all ? std::optional(before.dim) : std::nullopt;
}

void add_reduced(RedistributePlan& plan, int64_t axis, Reduce reduce) {
  auto& reduced = plan.reduced;
  if (reduced.empty() || reduced.back().reduce != reduce) {
    reduced.push_back({reduce, {}});
  }
  reduced.back().axes.push_back(axis);
}

/// Up to here boxes for each repetition cost less than another exchange.
constexpr int64_t kFewRepeats = 64;

int64_t most_repeats(const ShardSpec& spec) {
  int64_t most = 1;
  for (const int64_t dim : spec.sharded_dims()) {
    most = std::max(most, spec.partition(dim).repeat());
  }
  return most;
}

void add_exchange(
    std::vector<Step>& steps,
    const SpecPtr& from,
    const SpecPtr& to,
    at::MemoryFormat format) {
  auto split = format == at::MemoryFormat::Contiguous ? split_repeats(from, to)
                                                      : LayoutPair{from, to};
  if (!split &&
      std::max(most_repeats(*from), most_repeats(*to)) > kFewRepeats) {
    const auto between = layout_between(from, to);
    add_exchange(steps, from, between, format);
    add_exchange(steps, between, to, format);
    return;
  }
  const auto [source, target] = split.value_or(LayoutPair{from, to});
  const auto& mesh = *from->mesh();
  steps.push_back(
      {in_format(
           encode(plan_redistribute(source, target, mesh.position()), mesh),
           format),
       source == from ? std::vector<int64_t>() : source->local_sizes(),
       to->local_sizes()});
}

RedistributePlan plan_steps(
    const SpecPtr& from,
    const SpecPtr& to,
    at::MemoryFormat format) {
  check_same_tensor(*from, *to);
  RedistributePlan plan;
  auto source = from->placements();
  auto target = to->placements();
  auto partitions = to->partitions();
  for (int64_t axis = 0; axis < from->mesh()->axes(); ++axis) {
    const auto before = source[axis];
    const auto after = target[axis];
    if (before.is_partial() && before != after) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !after.is_partial(),
          "redistribute: cannot turn ",
          to_string(before),
          " into ",
          to_string(after));
      const bool by_exchange = after.is_shard() &&
          (before.reduce == Reduce::Sum || before.reduce == Reduce::Avg);
      if (!by_exchange) {
        add_reduced(plan, axis, before.reduce);
        source[axis] = Placement::replicate();
      } else if (before.reduce == Reduce::Avg) {
        plan.averaged.push_back(axis);
        source[axis] = Placement::partial();
      }
    }
    if (after.is_partial() && before != after) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          after.reduce == Reduce::Sum ||
              (before.is_replicate() && after.reduce != Reduce::Prod),
          "redistribute: cannot turn ",
          to_string(before),
          " into ",
          to_string(after),
          "; go through Replicate");
      if (const auto dim = dim_of_terms(*from, *to, axis)) {
        target[axis] = before;
        partitions[*dim] = from->partition(*dim);
        if (from->axes(*dim).front() == axis) {
          plan.padded.push_back(*dim);
        }
        continue;
      }
      plan.zeroed |= after.reduce == Reduce::Sum &&
          from->mesh()->contains_this_rank() &&
          from->mesh()->coordinate(axis) != 0;
      target[axis] = Placement::replicate();
    }
  }
  plan.moved_from =
      make_spec(from->mesh(), from->sizes(), source, from->partitions());
  plan.moved_to = make_spec(to->mesh(), to->sizes(), target, partitions);
  if (plan.moved_from != plan.moved_to) {
    plan.only_cuts = cut_only(*plan.moved_from, *plan.moved_to);
    plan.exchanges = !plan.only_cuts;
    if (plan.exchanges && from->mesh()->contains_this_rank()) {
      add_exchange(plan.steps, plan.moved_from, plan.moved_to, format);
    }
  }
  return plan;
}

/// Plans are kept: the same redistribution comes back in every step.
std::shared_ptr<const RedistributePlan> find_plan(
    const SpecPtr& from,
    const SpecPtr& to,
    at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  static PlanCache<RedistributePlan> plans;
  PlanKey key;
  key.add(from).add(to).add(static_cast<int64_t>(format));
  return plans.find(key, [&] { return plan_steps(from, to, format); });
}

at::Tensor cut(at::Tensor local, const ShardSpec& from, const ShardSpec& to) {
  for (const int64_t dim : to.sharded_dims()) {
    if (!from.is_sharded(dim)) {
      const auto rows = to.interval(dim);
      local = local.narrow(dim, rows.begin, rows.extent());
    }
  }
  return local;
}

/// With zeros in the place of other ranks' rows of these dims.
at::Tensor pad(
    const at::Tensor& local,
    const ShardSpec& spec,
    const std::vector<int64_t>& dims) {
  std::vector<int64_t> padding(2 * local.dim());
  for (const int64_t dim : dims) {
    const auto rows = spec.interval(dim);
    const auto place = padding.rbegin() + 2 * dim; // the last dim comes first
    place[0] = spec.size(dim) - rows.end;
    place[1] = rows.begin;
  }
  return at::constant_pad_nd(local, padding);
}

} // namespace

at::Tensor redistribute_local(
    const at::Tensor& local,
    const SpecPtr& from,
    const SpecPtr& to,
    at::MemoryFormat format) {
  if (from == to) {
    return local;
  }
  const auto plan = find_plan(from, to, format);
  const auto& mesh = *from->mesh();
  if (!mesh.contains_this_rank()) {
    return local;
  }
  RECORD_FUNCTION("shardtensor::redistribute", std::vector<c10::IValue>());
  at::Tensor result = local;
  for (const auto& [reduce, axes] : plan->reduced) {
    result = all_reduce(result, reduce, mesh, axes);
  }
  for (const int64_t axis : plan->averaged) {
    result = at::div(result, at::Scalar(mesh.ranks(axis)));
  }
  if (plan->exchanges) {
    for (const auto& step : plan->steps) {
      result = run(step, result);
    }
  } else if (plan->only_cuts) {
    result = cut(std::move(result), *from, *to);
  }
  if (!plan->padded.empty()) {
    result = pad(result, *plan->moved_to, plan->padded);
  }
  return plan->zeroed ? at::zeros_like(result) : result;
}

namespace {

int64_t find_cost(const SpecPtr& from, const SpecPtr& to) {
  const auto plan = find_plan(from, to);
  int64_t cost = 0;
  for (const auto& reduced : plan->reduced) {
    for (const int64_t axis : reduced.axes) {
      cost += 2 * from->numel() * (from->mesh()->ranks(axis) - 1);
    }
  }
  return plan->exchanges
      ? cost + moved_elements(plan->moved_from, plan->moved_to)
      : cost;
}

} // namespace

int64_t redistribute_cost(const SpecPtr& from, const SpecPtr& to) {
  if (from == to) {
    return 0;
  }
  static PlanCache<int64_t> costs; // to count what moves looks at all ranks
  PlanKey key;
  key.add(from).add(to);
  return *costs.find(key, [&] { return find_cost(from, to); });
}

} // namespace shardtensor::detail
