#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

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
  size_t hash() const {
    size_t result = values_.size();
    for (const int64_t value : values_) {
      result = c10::hash_combine(result, static_cast<size_t>(value));
    }
    return result;
  }

 private:
  c10::SmallVector<int64_t, 24> values_; // on the hot path no allocation
};

/// Plans by key, made on first use and kept. A plan must hold the specs whose
/// addresses are in its key, or another spec could take their place.
template <typename Plan>
class PlanCache {
 public:
  template <typename Make>
  std::shared_ptr<const Plan> find(const PlanKey& key, const Make& make) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = plans_.find(key);
      if (found != plans_.end()) {
        return found->second;
      }
    }
    // Made without the lock: making one may call operators.
    auto plan = std::make_shared<const Plan>(make());
    std::lock_guard<std::mutex> lock(mutex_);
    make_room();
    return plans_.emplace(key, std::move(plan)).first->second;
  }

  /// The plan of this key, or null.
  std::shared_ptr<const Plan> get(const PlanKey& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : found->second;
  }

  /// Keeps `plan` in the place of the one before.
  void put(const PlanKey& key, Plan plan) {
    auto kept = std::make_shared<const Plan>(std::move(plan));
    std::lock_guard<std::mutex> lock(mutex_);
    make_room();
    plans_.insert_or_assign(key, std::move(kept));
  }

 private:
  void make_room() {
    if (plans_.size() >= kMaxPlans) {
      plans_.clear();
    }
  }

  static constexpr size_t kMaxPlans = 8192;
  struct Hash {
    size_t operator()(const PlanKey& key) const {
      return key.hash();
    }
  };
  std::mutex mutex_;
  std::unordered_map<PlanKey, std::shared_ptr<const Plan>, Hash> plans_;
};

} // namespace shardtensor
