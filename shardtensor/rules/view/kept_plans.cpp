#include "shardtensor/rules/view/kept_plans.h"

#include <string>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/layout/plan_cache.h"
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

namespace {

/// Shared by all threads: backward may run on another one than forward.
PlanCache<SpecPtr>& origins() {
  static PlanCache<SpecPtr> origins;
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
    origins().put(origin_key(output, arguments), spec(self));
  }
}

SpecPtr find_origin(const SpecPtr& grad, c10::IntArrayRef arguments) {
  const auto found = origins().get(origin_key(grad, arguments));
  return found ? *found : nullptr;
}

void note_view_repair(
    const char* op,
    const SpecPtr& own,
    const SpecPtr& wanted) {
  if (wanted != own && own->is_sharded()) {
    note_fallback(std::string("aten::") + op, own, wanted);
  }
}

} // namespace shardtensor::detail
