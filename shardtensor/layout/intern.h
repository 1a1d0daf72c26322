#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace shardtensor::detail {

/// One shared immutable object for each distinct value. The table does not
/// keep its objects alive: an entry goes with the last pointer to its object,
/// so that a program that meets millions of shapes does not grow.
///
/// Note [Expired entries]
/// Between the last pointer's end and the deleter's taking of the lock, the
/// table still holds an entry that can no longer be revived. Then a second
/// object of the same value is made beside it. The deleter erases its own
/// object's entry, found by address, and frees the object only afterwards:
/// under the lock every entry's object may be read.
template <class T>
class InternTable {
 public:
  using Pointer = std::shared_ptr<const T>;

  /// The live object for which `equals` holds among those of this hash, else
  /// the new one that `make` returns.
  template <class Equals, class Make>
  Pointer get(size_t hash, const Equals& equals, const Make& make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [first, last] = entries_.equal_range(hash);
    for (auto entry = first; entry != last; ++entry) {
      if (equals(*entry->second.object)) {
        if (Pointer alive = entry->second.alive.lock()) {
          return alive;
        }
      }
    }
    return insert(hash, make());
  }

  int64_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(entries_.size());
  }

 private:
  struct Entry {
    const T* object;
    std::weak_ptr<const T> alive;
  };

  Pointer insert(size_t hash, std::unique_ptr<const T> object) {
    const auto entry = entries_.emplace(hash, Entry{object.get(), {}});
    const T* raw = object.release();
    Pointer pointer(raw, [this, hash](const T* dead) { erase(hash, dead); });
    entry->second.alive = pointer;
    return pointer;
  }

  void erase(size_t hash, const T* dead) {
    const std::unique_ptr<const T> freed_after_the_lock(dead);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [first, last] = entries_.equal_range(hash);
    for (auto entry = first; entry != last; ++entry) {
      if (entry->second.object == dead) {
        entries_.erase(entry);
        return;
      }
    }
  }

  std::mutex mutex_;
  std::unordered_multimap<size_t, Entry> entries_;
};

} // namespace shardtensor::detail
