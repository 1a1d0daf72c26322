#include "shardtensor/rules/view_call.h"

#include <mutex>
#include <string>
#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/hash.h>

#include "shardtensor/rules/fallback.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

namespace {

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    size_t hash = key.size();
    for (const int64_t value : key) {
      hash = c10::hash_combine(hash, std::hash<int64_t>()(value));
    }
    return hash;
  }
};

at::Tensor global_meta(const at::Tensor& self) {
  return at::empty_strided(
      self.sizes(), self.strides(), self.options().device(at::kMeta));
}

struct Kept {
  ViewPlanPtr plan;
  SpecPtr spec; // its address is part of the key
};

} // namespace

ViewPlanPtr find_view_plan(
    const char* op,
    const SpecPtr& spec,
    c10::IntArrayRef arguments,
    c10::function_ref<ViewPlan()> make) {
  constexpr size_t kMaxPlans = 8192;
  thread_local std::unordered_map<Key, Kept, KeyHash> plans;
  Key key{reinterpret_cast<int64_t>(op), reinterpret_cast<int64_t>(spec.get())};
  key.insert(key.end(), arguments.begin(), arguments.end());
  if (auto found = plans.find(key); found != plans.end()) {
    return found->second.plan;
  }
  if (plans.size() >= kMaxPlans) {
    plans.clear();
  }
  auto plan = std::make_shared<const ViewPlan>(make());
  plans.emplace(std::move(key), Kept{plan, spec});
  return plan;
}

ViewPlanPtr find_view_plan(
    const char* op,
    const at::Tensor& self,
    c10::IntArrayRef arguments,
    c10::function_ref<ViewPlan()> make,
    c10::function_ref<at::Tensor(const at::Tensor&)> view) {
  const auto with_strides = [&] {
    const at::AutoDispatchBelowAutograd below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet(
            {c10::DispatchKey::Python,
             c10::DispatchKey::PythonTLSSnapshot,
             c10::DispatchKey::Functionalize}));
    auto plan = make();
    plan.strides = view(global_meta(self)).strides().vec();
    return plan;
  };
  const auto& own = spec(self);
  if (self.is_contiguous()) {
    return find_view_plan(op, own, arguments, with_strides);
  }
  auto key = arguments.vec();
  key.push_back(-1);
  key.insert(key.end(), self.strides().begin(), self.strides().end());
  return find_view_plan(op, own, key, with_strides);
}

namespace {

struct Origin {
  SpecPtr input;
  SpecPtr output; // its address is part of the key
};

/// Shared by all threads: backward may run on another one than forward.
class Origins {
 public:
  void note(
      const SpecPtr& input,
      const SpecPtr& output,
      c10::IntArrayRef arguments) {
    constexpr size_t kMostOrigins = 8192;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (origins_.size() >= kMostOrigins) {
      origins_.clear();
    }
    origins_.insert_or_assign(key(output, arguments), Origin{input, output});
  }

  SpecPtr find(const SpecPtr& grad, c10::IntArrayRef arguments) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = origins_.find(key(grad, arguments));
    return found == origins_.end() ? nullptr : found->second.input;
  }

 private:
  static Key key(const SpecPtr& output, c10::IntArrayRef arguments) {
    Key result{reinterpret_cast<int64_t>(output.get())};
    result.insert(result.end(), arguments.begin(), arguments.end());
    return result;
  }

  std::mutex mutex_;
  std::unordered_map<Key, Origin, KeyHash> origins_;
};

Origins& origins() {
  static auto* origins = new Origins();
  return *origins;
}

} // namespace

void note_origin(
    const at::Tensor& self,
    const SpecPtr& output,
    c10::IntArrayRef arguments) {
  if (self.requires_grad() && spec(self)->is_sharded()) {
    origins().note(spec(self), output, arguments);
  }
}

SpecPtr find_origin(const SpecPtr& grad, c10::IntArrayRef arguments) {
  return origins().find(grad, arguments);
}

void note_view_repair(
    const char* op,
    const SpecPtr& own,
    const SpecPtr& wanted) {
  if (wanted != own && own->is_sharded()) {
    note_fallback(std::string("aten::") + op, own, wanted);
  }
}

} // namespace shardtensor
