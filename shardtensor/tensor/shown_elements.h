#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Shown elements]
// What ranks found out together about the values of a tensor (which rows an
// index names, and whose they are) holds as long as the tensor shows the same
// elements. It is known by identity and version of the tensor that has them,
// and by the place where a view stands in it: graph libraries take the rows of
// edge_index, and widen them, anew in each layer. The place follows from global
// sizes and strides. Nothing here comes from local memory: a rank whose part is
// empty would take other parts for the same one, and wait for none.

/// Which elements a ShardTensor shows. Equal ones show the same values, laid
/// out alike, on all ranks or on none; one that is not known equals none.
class ShownElements {
 public:
  bool operator==(const ShownElements& other) const;

  /// False for tensors without a version, or with several (`x.data`): nothing
  /// tells when they are written.
  bool is_known() const {
    return layout_ != nullptr;
  }
  /// Nobody can ask for them any more.
  bool are_gone() const {
    return base_.expired();
  }
  /// Of elements that are known.
  const MeshPtr& mesh() const {
    return layout_->mesh();
  }

 private:
  friend ShownElements shown_elements(const at::Tensor& tensor);

  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  Weak base_{at::Tensor().getIntrusivePtr()};
  /// Versions of the base and of the tensor, how often the base was set.
  std::array<int64_t, 3> changes_{};
  int64_t offset_ = 0;
  std::vector<int64_t> strides_;
  SpecPtr layout_;
};

ShownElements shown_elements(const at::Tensor& tensor);

/// What ranks found out of the last kMost elements of each mesh that they asked
/// each other for. Shared by all threads, for backward may run in another one
/// than forward. By meshes, for ranks agree about the order of calls on one
/// mesh, and so about what is still known.
template <typename Value, int64_t kMost>
class KnownOfShown {
 public:
  std::optional<Value> find(const ShownElements& shown) {
    return find(shown, [](const Value&) { return true; });
  }

  /// The one that `is_meant`.
  template <typename Predicate>
  std::optional<Value> find(
      const ShownElements& shown,
      const Predicate& is_meant) {
    if (!shown.is_known()) {
      return std::nullopt;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_mesh_.find(shown.mesh());
    if (found != by_mesh_.end()) {
      for (const auto& entry : found->second.entries) {
        if (entry.shown == shown && is_meant(entry.value)) {
          return entry.value;
        }
      }
    }
    return std::nullopt;
  }

  void add(ShownElements shown, Value value) {
    if (!shown.is_known()) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(
        by_mesh_, [](const auto& item) { return item.second.is_gone(); });
    by_mesh_[shown.mesh()].add(std::move(shown), std::move(value));
  }

 private:
  struct Entry {
    ShownElements shown;
    Value value;
    int64_t number;
  };
  /// Ranks may forget at other times what nobody can ask for, but not the rest.
  struct Latest {
    std::vector<Entry> entries;
    int64_t added = 0;

    void add(ShownElements shown, Value value) {
      entries.push_back({std::move(shown), std::move(value), added++});
      std::erase_if(entries, [&](const Entry& entry) {
        return entry.shown.are_gone() || entry.number + kMost < added;
      });
    }
    bool is_gone() const {
      return std::ranges::all_of(
          entries, [](const Entry& entry) { return entry.shown.are_gone(); });
    }
  };

  std::mutex mutex_;
  std::map<MeshPtr, Latest> by_mesh_;
};

/// Says that `view` begins `offset` elements behind the first one of `tensor`,
/// by nominal strides. Only integers, which may be an index, and spectra, of
/// which parts are written, note it.
void note_view_place(
    const at::Tensor& view,
    const at::Tensor& tensor,
    std::optional<int64_t> offset);

} // namespace shardtensor::detail
