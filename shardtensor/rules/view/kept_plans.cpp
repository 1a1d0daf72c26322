#include "shardtensor/rules/view/kept_plans.h"

#include <algorithm>
#include <string>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/layout/plans/layout_memory.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::detail {

namespace {

at::Tensor global_meta(const at::Tensor& self) {
  return at::empty_strided(
      self.sizes(), self.strides(), self.options().device(at::kMeta));
}

PlanCache<ViewPlan>& plans() {
  static PlanCache<ViewPlan> plans;
  return plans;
}

PlanKey key_of(
    const char* op,
    const SpecPtr& spec,
    c10::IntArrayRef arguments) {
  PlanKey key;
  key.add(reinterpret_cast<int64_t>(op)).add(spec).add(arguments);
  return key;
}

} // namespace

ViewPlanPtr find_view_plan(
    const char* op,
    const SpecPtr& spec,
    c10::IntArrayRef arguments,
    c10::function_ref<ViewPlan()> make) {
  return plans().find(key_of(op, spec, arguments), make);
}

ViewPlanPtr find_view_plan(
    const char* op,
    const at::Tensor& self,
    c10::IntArrayRef arguments,
    c10::function_ref<ViewPlan()> make,
    c10::function_ref<at::Tensor(const at::Tensor&)> view) {
  auto key = key_of(op, spec(self), arguments);
  if (!self.is_contiguous()) {
    key.add(self.strides());
  }
  return plans().find(key, [&] {
    const at::AutoDispatchBelowAutograd below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet(
            {c10::DispatchKey::Python,
             c10::DispatchKey::PythonTLSSnapshot,
             c10::DispatchKey::Functionalize}));
    auto plan = make();
    const auto seen = view(global_meta(self));
    plan.strides = seen.strides().vec();
    plan.offset = seen.storage_offset();
    return plan;
  });
}

int64_t offset_within(
    const at::Tensor& self,
    std::optional<int64_t> storage_offset) {
  const auto own = self.storage_offset();
  return storage_offset.value_or(own) - own;
}

namespace {

LayoutMemory& origins() {
  static LayoutMemory origins;
  return origins;
}

PlanKey origin_key(const SpecPtr& output, c10::IntArrayRef arguments) {
  PlanKey key;
  key.add(output).add(arguments);
  return key;
}

} // namespace

void note_origin(
    const at::Tensor& self,
    const SpecPtr& output,
    c10::IntArrayRef arguments) {
  if (self.requires_grad() && spec(self)->is_sharded()) {
    origins().note(output->mesh(), origin_key(output, arguments), spec(self));
  }
}

SpecPtr find_origin(const SpecPtr& grad, c10::IntArrayRef arguments) {
  return origins().find(grad->mesh(), origin_key(grad, arguments));
}

namespace {

bool is_spread(const ShardSpec& spec, int64_t axis) {
  const auto& placement = spec.placement(axis);
  if (!placement.is_shard()) {
    return false;
  }
  const auto sizes = spec.partition(placement.dim).sizes();
  return std::count(sizes.begin(), sizes.end(), 0) + 1 <
      static_cast<int64_t>(sizes.size());
}

/// What the ranks of some axis shared, each of them or one would hold alone.
bool gathers(const ShardSpec& own, const ShardSpec& wanted) {
  if (own.numel() == 0) {
    return false;
  }
  for (int64_t axis = 0; axis < own.mesh()->axes(); ++axis) {
    if (is_spread(own, axis) && !is_spread(wanted, axis)) {
      return true;
    }
  }
  return false;
}

} // namespace

void note_view_repair(
    const char* op,
    const SpecPtr& own,
    const SpecPtr& wanted) {
  if (wanted != own && gathers(*own, *wanted)) {
    note_fallback(std::string("aten::") + op, own, wanted);
  }
}

} // namespace shardtensor::detail
