#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// What a decision depends on, as integers: operator, spec address, parameters.
class PlanKey {
 public:
  PlanKey& add(int64_t value) {
    values_.push_back(value);
    return *this;
  }
  PlanKey& add(double value) {
    return add(std::bit_cast<int64_t>(value));
  }
  PlanKey& add(const SpecPtr& spec) {
    specs_.push_back(spec.get());
    return add(reinterpret_cast<int64_t>(spec.get()));
  }
  PlanKey& add(c10::IntArrayRef values) {
    add(static_cast<int64_t>(values.size()));
    values_.append(values.begin(), values.end());
    return *this;
  }
  bool operator==(const PlanKey& other) const {
    return values_ == other.values_;
  }
  /// Keeps the specs alive, or others could take their addresses. Keys that
  /// are only looked up do without.
  void own() {
    for (const auto* spec : specs_) {
      owned_.push_back(spec ? spec->shared_from_this() : nullptr);
    }
  }
  int64_t bytes() const {
    return static_cast<int64_t>(sizeof(*this) + values_.size() * 8);
  }
  size_t hash() const {
    size_t result = values_.size();
    for (const int64_t value : values_) {
      result = c10::hash_combine(result, static_cast<size_t>(value));
    }
    return result;
  }

 private:
  // On the hot path no allocation.
  c10::SmallVector<int64_t, 24> values_;
  c10::SmallVector<const ShardSpec*, 4> specs_;
  std::vector<SpecPtr> owned_;
};

/// The memory that a kept plan takes, which a plan that may be large tells by
/// `int64_t bytes() const`.
template <typename Plan>
int64_t bytes_of(const Plan& plan) {
  if constexpr (requires { plan.bytes(); }) {
    return plan.bytes();
  } else {
    return sizeof(Plan);
  }
}

/// Plans by key, made on first use and kept with the specs of their keys; all
/// are forgotten where they are too many or take too much memory, at another
/// moment on each rank. Never destroyed: at the program's end another thread
/// may still be in a backward.
template <typename Plan>
class PlanCache {
 public:
  template <typename Make>
  std::shared_ptr<const Plan> find(const PlanKey& key, const Make& make) {
    if (auto found = get(key)) {
      return found;
    }
    // Made without the lock: making one may call operators.
    return insert(key, make(), /*replace=*/false);
  }

  /// The plan of this key, or null.
  std::shared_ptr<const Plan> get(const PlanKey& key) {
    std::lock_guard<std::mutex> lock(state_.mutex);
    const auto found = state_.plans.find(key);
    return found == state_.plans.end() ? nullptr : found->second;
  }

  /// Keeps `plan` in the place of the one before.
  void put(const PlanKey& key, Plan plan) {
    insert(key, std::move(plan), /*replace=*/true);
  }

 private:
  std::shared_ptr<const Plan> insert(PlanKey key, Plan plan, bool replace) {
    auto kept = std::make_shared<const Plan>(std::move(plan));
    std::lock_guard<std::mutex> lock(state_.mutex);
    const auto found = state_.plans.find(key);
    if (found != state_.plans.end()) {
      if (replace) {
        state_.bytes += bytes_of(*kept) - bytes_of(*found->second);
        found->second = std::move(kept);
      }
      return found->second;
    }
    const int64_t bytes = bytes_of(*kept) + key.bytes();
    if (state_.plans.size() >= kMaxPlans || state_.bytes + bytes > kMaxBytes) {
      state_.plans.clear();
      state_.bytes = 0;
    }
    state_.bytes += bytes;
    key.own();
    state_.plans.emplace(std::move(key), kept);
    return kept;
  }

  static constexpr size_t kMaxPlans = 8192;
  static constexpr int64_t kMaxBytes = 128 << 20;
  struct Hash {
    size_t operator()(const PlanKey& key) const {
      return key.hash();
    }
  };
  struct State {
    std::mutex mutex;
    int64_t bytes = 0;
    std::unordered_map<PlanKey, std::shared_ptr<const Plan>, Hash> plans;
  };
  State& state_ = *new State();
};

} // namespace shardtensor::detail
