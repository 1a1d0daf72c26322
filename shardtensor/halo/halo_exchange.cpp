#include "shardtensor/halo/halo_exchange.h"

#include <set>

#include <ATen/record_function.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/halo/stencil_call.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/layout/plans/transfer.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

using namespace detail;
namespace {

std::vector<Halo> checked(
    const char* what,
    const std::vector<Halo>& halos,
    int64_t ndim) {
  std::vector<Halo> result;
  std::set<int64_t> seen;
  for (Halo halo : halos) {
    TORCH_CHECK_INDEX(
        halo.dim >= -ndim && halo.dim < ndim,
        what,
        ": expected a dim in [",
        -ndim,
        ", ",
        ndim - 1,
        "], got ",
        halo.dim);
    TORCH_CHECK_VALUE(
        halo.before >= 0 && halo.after >= 0,
        what,
        ": expected widths of 0 or more, got (",
        halo.before,
        ", ",
        halo.after,
        ") for dim ",
        halo.dim);
    halo.dim = halo.dim < 0 ? halo.dim + ndim : halo.dim;
    TORCH_CHECK_VALUE(
        seen.insert(halo.dim).second, what, ": dim ", halo.dim, " twice");
    result.push_back(halo);
  }
  return result;
}

/// The rows of one shard and its ghost cells, before the boundary has its say.
Interval extended(
    const ShardSpec& spec,
    const Halo& halo,
    Boundary boundary,
    int64_t position) {
  const Interval own = spec.interval(halo.dim, position);
  const Interval rows{own.begin - halo.before, own.end + halo.after};
  return boundary == Boundary::None ? intersect(rows, {0, spec.size(halo.dim)})
                                    : rows;
}

struct HaloPlan {
  SpecPtr layout;
  EncodedExchange gather;

  int64_t bytes() const {
    return gather.bytes();
  }
};

HaloPlan plan_halo(
    const SpecPtr& spec,
    const std::vector<Halo>& halos,
    Boundary boundary) {
  HaloPlan plan{stencil_layout(spec, {}), {}};
  const auto& layout = *plan.layout;
  std::vector<int64_t> dims;
  for (const auto& halo : halos) {
    dims.push_back(halo.dim);
  }
  const auto rows = [&](int64_t dim, int64_t position) {
    for (const auto& halo : halos) {
      if (halo.dim == dim) {
        return boundary_rows(
            extended(layout, halo, boundary, position),
            layout.size(dim),
            boundary);
      }
    }
    TORCH_INTERNAL_ASSERT(false);
  };
  const Mesh& mesh = *layout.mesh();
  plan.gather =
      encode(plan_gather_rows(plan.layout, dims, rows, mesh.position()), mesh);
  return plan;
}

} // namespace

at::Tensor halo_exchange(
    const at::Tensor& x,
    const std::vector<Halo>& halos,
    Boundary boundary) {
  const auto wanted = checked("halo_exchange", halos, x.dim());
  CommScope scope("shardtensor::halo_exchange");
  static PlanCache<HaloPlan> plans;
  PlanKey key;
  key.add(spec(x)).add(static_cast<int64_t>(boundary));
  for (const auto& halo : wanted) {
    key.add(halo.dim).add(halo.before).add(halo.after);
  }
  if (!spec(x)->mesh()->contains_this_rank()) {
    return to_local(x);
  }
  const auto plan =
      plans.find(key, [&] { return plan_halo(spec(x), wanted, boundary); });
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  return exchange(
      to_local(redistribute(x, plan->layout)),
      plan->gather,
      x.suggest_memory_format());
}

at::Tensor halo_trim(
    const at::Tensor& local,
    const SpecPtr& like,
    const std::vector<Halo>& halos,
    Boundary boundary) {
  TORCH_CHECK_VALUE(like, "halo_trim: no spec, expected one");
  const SpecPtr layout = stencil_layout(like, {});
  at::Tensor trimmed = local;
  if (layout->mesh()->contains_this_rank()) {
    for (const auto& halo : checked("halo_trim", halos, layout->dim())) {
      const Interval own = layout->interval(halo.dim);
      const Interval rows =
          extended(*layout, halo, boundary, layout->mesh()->position());
      TORCH_CHECK_VALUE(
          local.size(halo.dim) == rows.extent(),
          "halo_trim: expected ",
          rows.extent(),
          " rows with ghost cells along dim ",
          halo.dim,
          ", got sizes ",
          local.sizes());
      trimmed = trimmed.narrow(halo.dim, own.begin - rows.begin, own.extent());
    }
  }
  return from_local(trimmed, layout);
}

} // namespace shardtensor
