#include "shardtensor/rules/neighborhood/neighborhood.h"

#include <algorithm>
#include <cmath>

#include <ATen/core/List.h>
#include <torch/library.h>

#include "shardtensor/comm/own_operator.h"
#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/halo/stencil_call.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/rules/attention/shared_heads.h"
#include "shardtensor/rules/neighborhood/op.h"
#include "shardtensor/rules/neighborhood/overlap.h"
#include "shardtensor/tensor/gradients/tangent.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;
using Dims = std::vector<NeighborhoodDim>;

/// The operator as function_rule wants it.
struct NeighborhoodAttention {
  using schema = Tensor(
      const Tensor&,
      const Tensor&,
      const Tensor&,
      c10::IntArrayRef,
      c10::IntArrayRef,
      c10::IntArrayRef,
      c10::List<bool>,
      std::optional<double>);
  static constexpr const char* name = "shardtensor::neighborhood_attention";
  static constexpr const char* overload_name = "";

  static const auto& op() {
    static const auto found = find_own_operator<schema>(name);
    return found;
  }
  template <class... Args>
  static Tensor redispatch(c10::DispatchKeySet keys, Args&&... args) {
    return op().redispatch(keys, std::forward<Args>(args)...);
  }
};

// ---- arguments --------------------------------------------------------------

struct Operands {
  Tensor query;
  Tensor key;
  Tensor value;
};

constexpr const char* kWhat = "neighborhood_attention: ";

void check_tensors(const Operands& operands) {
  const auto& [query, key, value] = operands;
  TORCH_CHECK_VALUE(
      query.dim() >= 4 && query.dim() <= 6 && key.dim() == query.dim() &&
          value.dim() == query.dim(),
      kWhat,
      "expected query, key and value of 4, 5 or 6 dims (batch, one to three "
      "dims, heads, features), got sizes ",
      query.sizes(),
      ", ",
      key.sizes(),
      " and ",
      value.sizes());
  TORCH_CHECK_VALUE(
      query.is_floating_point() && key.scalar_type() == query.scalar_type() &&
          value.scalar_type() == query.scalar_type(),
      kWhat,
      "expected query, key and value of one floating dtype, got ",
      query.scalar_type(),
      ", ",
      key.scalar_type(),
      " and ",
      value.scalar_type());
  const auto domain = query.sizes().slice(0, query.dim() - 2);
  TORCH_CHECK_VALUE(
      key.sizes().slice(0, key.dim() - 2) == domain &&
          value.sizes().slice(0, value.dim() - 2) == domain &&
          query.size(-1) == key.size(-1) && key.size(-2) == value.size(-2),
      kWhat,
      "expected query, key and value of the same batch and dims, query and key "
      "of the same features, key and value of the same heads, got sizes ",
      query.sizes(),
      ", ",
      key.sizes(),
      " and ",
      value.sizes());
  TORCH_CHECK_VALUE(
      key.size(-2) > 0 ? query.size(-2) % key.size(-2) == 0
                       : query.size(-2) == 0,
      kWhat,
      "expected heads of the query that those of the key divide, got ",
      query.size(-2),
      " and ",
      key.size(-2));
}

/// One value stands for all dims.
template <class Values>
auto value_of(const char* name, const Values& values, int64_t i, int64_t dims) {
  const auto count = static_cast<int64_t>(values.size());
  TORCH_CHECK_VALUE(
      count == 1 || count == dims,
      kWhat,
      "expected ",
      name,
      " of 1 or ",
      dims,
      " values, got ",
      count);
  return values[count == 1 ? 0 : i];
}

void check_dim(const NeighborhoodDim& dim) {
  TORCH_CHECK_VALUE(
      dim.kernel >= 2,
      kWhat,
      "expected a kernel_size of 2 or more, got ",
      dim.kernel);
  TORCH_CHECK_VALUE(
      dim.dilation >= 1,
      kWhat,
      "expected a dilation of 1 or more, got ",
      dim.dilation);
  TORCH_CHECK_VALUE(
      dim.stride >= 1 && dim.stride <= dim.kernel,
      kWhat,
      "expected a stride from 1 to the kernel_size, ",
      dim.kernel,
      ", got ",
      dim.stride);
  TORCH_CHECK_VALUE(
      dim.kernel <= dim.length / dim.dilation,
      kWhat,
      "expected kernel_size times dilation of at most the domain's ",
      dim.length,
      " rows, got ",
      dim.kernel,
      " times ",
      dim.dilation);
}

/// The whole domain.
Dims domain_of(
    const Tensor& query,
    c10::IntArrayRef kernel_size,
    c10::IntArrayRef dilation,
    c10::IntArrayRef stride,
    const c10::List<bool>& is_causal) {
  Dims dims;
  const int64_t count = query.dim() - 3;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = query.size(i + 1);
    dims.push_back(
        {length,
         value_of("kernel_size", kernel_size, i, count),
         value_of("dilation", dilation, i, count),
         value_of("stride", stride, i, count),
         value_of("is_causal", is_causal, i, count),
         {0, length}});
    check_dim(dims.back());
  }
  return dims;
}

/// A copy of each head for every head of the query that it serves.
Tensor repeated_heads(const Tensor& key, const Tensor& query) {
  return for_heads(key, query.size(-2), key.dim() - 2);
}

double scale_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(
      1 / std::sqrt(static_cast<double>(std::max<int64_t>(query.size(-1), 1))));
}

// ---- plain tensors ----------------------------------------------------------

Tensor neighborhood_attention_plain(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef kernel_size,
    c10::IntArrayRef dilation,
    c10::IntArrayRef stride,
    c10::List<bool> is_causal,
    std::optional<double> scale) {
  const Operands given{
      autocast_to_lower_precision(query),
      autocast_to_lower_precision(key),
      autocast_to_lower_precision(value)};
  check_tensors(given);
  return attend_piece(
      given.query,
      repeated_heads(given.key, query),
      repeated_heads(given.value, query),
      domain_of(query, kernel_size, dilation, stride, is_causal),
      scale_of(query, scale));
}

// ---- sharded ones -----------------------------------------------------------

/// What a rank does: bring operands to the layouts, exchange keys and values,
/// compute its queries.
struct NeighborhoodPlan {
  SpecPtr query;
  SpecPtr key;
  SpecPtr value; // and output
  SpecPtr result;
  Dims dims; // with this rank's queries
  // Of rows that the queries see: none, one for keys and values side by side,
  // or one for each.
  std::vector<EncodedExchange> gather;
  std::shared_ptr<const NeighborhoodOverlap> overlap; // where that is worth it
};

/// Numbers of a piece of the keys up to which these travel beside the values,
/// in a copy of both. Rows of larger ones travel alone while the others are
/// met, or, along other dims than the first, in messages of keys and of values.
constexpr int64_t kSideBySide = int64_t{1} << 18;

SpecPtr with_features(const SpecPtr& spec, int64_t features) {
  auto sizes = spec->sizes();
  sizes.back() = features;
  return make_spec(
      spec->mesh(), std::move(sizes), spec->placements(), spec->partitions());
}

/// The keys that a position's windows name along dim `i` of the domain.
RowSource rows_of_position(
    const ShardSpec& spec,
    NeighborhoodDim dim,
    int64_t i,
    int64_t position) {
  dim.queries = spec.interval(i + 1, position);
  return RowSource(key_rows(dim));
}

void plan_gather(NeighborhoodPlan& plan, const Dims& domain) {
  const auto& spec = plan.key;
  std::vector<int64_t> cut;
  int64_t pieces = 1;
  for (size_t i = 0; i < domain.size(); ++i) {
    const auto dim = static_cast<int64_t>(i) + 1;
    if (spec->is_sharded(dim) && spec->partition(dim).pieces() > 1) {
      cut.push_back(dim);
      pieces *= spec->partition(dim).pieces();
    }
  }
  const bool gathers = std::any_of(cut.begin(), cut.end(), [&](int64_t dim) {
    // A piece with all rows needs no others, nor do the empty ones.
    const auto sizes = spec->partition(dim).sizes();
    return std::count(sizes.begin(), sizes.end(), spec->size(dim)) == 0;
  });
  if (!gathers) {
    return;
  }
  const auto rows = [&](int64_t dim, int64_t position) {
    return rows_of_position(*spec, domain[dim - 1], dim - 1, position);
  };
  const auto add = [&](const SpecPtr& what) {
    const Mesh& mesh = *what->mesh();
    plan.gather.push_back(
        encode(plan_gather_rows(what, cut, rows, mesh.position()), mesh));
  };
  const auto both = with_features(
      spec, plan.key->sizes().back() + plan.value->sizes().back());
  if (spec->numel() / pieces <= kSideBySide) {
    add(both);
    return;
  }
  add(plan.key);
  add(plan.value);
  if (cut == std::vector<int64_t>{1}) {
    plan.overlap = plan_neighborhood_overlap(both, plan.dims, plan.gather);
  }
}

NeighborhoodPlan plan_neighborhood(
    const SpecPtr& query,
    const SpecPtr& key,
    const SpecPtr& value,
    const Dims& domain) {
  const int64_t features = query->dim() - 1;
  NeighborhoodPlan plan;
  plan.result =
      with_features(stencil_layout(query, {features}), value->sizes().back());
  // Queries that are everywhere are cut as the keys are, features nowhere.
  auto layout = without_partial(stencil_layout(query, {features}));
  for (const auto& given : {key, value}) {
    const auto own = without_partial(stencil_layout(given, {features}));
    if (!layout->is_sharded() && own->is_sharded()) {
      layout = with_placements(layout, own->placements(), own->partitions());
    }
  }
  plan.query = layout;
  plan.key = layout;
  plan.value = with_features(layout, value->sizes().back());
  plan.dims = domain;
  if (layout->mesh()->contains_this_rank()) {
    for (size_t i = 0; i < domain.size(); ++i) {
      const auto dim = static_cast<int64_t>(i) + 1;
      if (layout->is_sharded(dim)) {
        plan.dims[i].queries = layout->interval(dim);
      }
    }
    plan_gather(plan, domain);
  }
  return plan;
}

std::shared_ptr<const NeighborhoodPlan> find_plan(
    const Operands& operands,
    const Dims& domain) {
  static PlanCache<NeighborhoodPlan> cache;
  PlanKey key;
  key.add(spec(operands.query)).add(spec(operands.key));
  key.add(spec(operands.value)).add(encode(domain));
  return cache.find(key, [&] {
    return plan_neighborhood(
        spec(operands.query), spec(operands.key), spec(operands.value), domain);
  });
}

/// Only a CPU's kernel takes parts; a compiler and forward mode see operators.
bool overlaps(const NeighborhoodPlan& plan, const Operands& local) {
  const auto& [query, key, value] = local;
  return plan.overlap && query.is_cpu() && !is_traced(query) &&
      !has_tangent({query, key, value});
}

Tensor sharded(const Operands& operands, const Dims& domain, double scale) {
  const auto plan = find_plan(operands, domain);
  Operands local{
      to_local(redistribute(operands.query, plan->query)),
      to_local(redistribute(operands.key, plan->key)),
      to_local(redistribute(operands.value, plan->value))};
  if (!plan->value->mesh()->contains_this_rank()) {
    return from_local(local.value, plan->result);
  }
  if (overlaps(*plan, local)) {
    const auto output = attend_overlapped(
        local.query, local.key, local.value, plan->overlap, scale);
    return redistribute(from_local(output, plan->value), plan->result);
  }
  if (!plan->gather.empty()) {
    std::tie(local.key, local.value) =
        join_rows(local.key, local.value, plan->gather);
  }
  const auto output =
      attend_piece(local.query, local.key, local.value, plan->dims, scale);
  return redistribute(from_local(output, plan->value), plan->result);
}

Tensor neighborhood_attention_function(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef kernel_size,
    c10::IntArrayRef dilation,
    c10::IntArrayRef stride,
    c10::List<bool> is_causal,
    std::optional<double> scale) {
  Operands operands{
      autocast_to_lower_precision(query),
      autocast_to_lower_precision(key),
      autocast_to_lower_precision(value)};
  check_tensors(operands);
  const auto domain =
      domain_of(query, kernel_size, dilation, stride, is_causal);
  const auto* op = NeighborhoodAttention::name;
  const auto mesh = common_mesh(op, {query, key, value});
  for (auto* x : {&operands.query, &operands.key, &operands.value}) {
    *x = promote_operand(*x, mesh, op);
    keep_gradient_layout(*x);
  }
  operands.key = repeated_heads(operands.key, query);
  operands.value = repeated_heads(operands.value, query);
  return sharded(operands, domain, scale_of(query, scale));
}

} // namespace

Tensor neighborhood_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef kernel_size,
    c10::IntArrayRef dilation,
    c10::IntArrayRef stride,
    const std::vector<bool>& is_causal,
    std::optional<double> scale) {
  c10::List<bool> causal;
  for (const bool one : is_causal) {
    causal.push_back(one);
  }
  return NeighborhoodAttention::op().call(
      query, key, value, kernel_size, dilation, stride, causal, scale);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("neighborhood_attention", neighborhood_attention_plain);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "neighborhood_attention",
      function_rule<NeighborhoodAttention, neighborhood_attention_function>);
}

} // namespace shardtensor
