#include "shardtensor/rules/spectra/home.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace shardtensor::detail {
namespace {

using Key = std::vector<int64_t>;

/// What is remembered of one mesh. Bounded mesh by mesh: a rank forgets when
/// the other ranks of the mesh do, whatever else it does.
struct Memory {
  MeshPtr mesh;
  std::map<Key, SpecPtr> homes;
};

constexpr size_t kMaxHomes = 1024;

struct Memories {
  std::mutex mutex;
  std::map<const Mesh*, Memory> by_mesh;
};

Memories& memories() {
  static auto& all = *new Memories();
  return all;
}

/// Whether a transform of these dims moves the spectrum anyway.
bool moves(const SpecPtr& spectrum, const std::vector<int64_t>& dims) {
  return spectrum->has_partial() ||
      std::any_of(dims.begin(), dims.end(), [&](int64_t dim) {
           return spectrum->is_sharded(dim);
         });
}

/// What a home is known by, the most telling first. The even ones know where
/// the spectrum lay.
std::vector<Key> keys_of(
    const SpecPtr& spectrum,
    const std::vector<int64_t>& signal_sizes,
    const std::vector<int64_t>& dims) {
  Key any{spectrum->dim(), static_cast<int64_t>(dims.size())};
  any.insert(any.end(), dims.begin(), dims.end());
  Key extents;
  for (const int64_t dim : dims) {
    extents.push_back(signal_sizes.at(dim));
  }
  Key places;
  for (const auto& placement : spectrum->placements()) {
    places.push_back(placement.is_shard() ? placement.dim : -1);
  }
  const auto key = [&](int64_t kind, const Key& first, const Key& second) {
    Key result{kind};
    for (const auto& part : {any, first, second}) {
      result.insert(result.end(), part.begin(), part.end());
    }
    return result;
  };
  return {
      key(0, extents, places),
      key(1, extents, {}),
      key(2, places, {}),
      key(3, {}, {})};
}

/// Placements and cut points, for a signal of other sizes.
SpecPtr resized(const SpecPtr& home, const std::vector<int64_t>& sizes) {
  return with_sizes(without_partial(home), sizes);
}

} // namespace

void remember_home(
    const SpecPtr& signal,
    const SpecPtr& spectrum,
    const std::vector<int64_t>& dims) {
  auto& all = memories();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& memory = all.by_mesh[signal->mesh().get()];
  memory.mesh = signal->mesh();
  if (memory.homes.size() >= kMaxHomes) {
    memory.homes.clear();
  }
  for (const auto& key : keys_of(spectrum, signal->sizes(), dims)) {
    memory.homes[key] = signal;
  }
}

SpecPtr recall_home(
    const SpecPtr& spectrum,
    const std::vector<int64_t>& signal_sizes,
    const std::vector<int64_t>& dims,
    bool is_real) {
  auto& all = memories();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto memory = all.by_mesh.find(spectrum->mesh().get());
  if (memory == all.by_mesh.end()) {
    return nullptr;
  }
  const auto keys = keys_of(spectrum, signal_sizes, dims);
  const bool must_move = moves(spectrum, dims);
  const bool is_cut = !spectrum->sharded_dims().empty();
  const bool may_move = must_move || (is_real && !is_cut);
  for (size_t i = 0; i < keys.size(); i += may_move ? 1 : 2) {
    const auto found = memory->second.homes.find(keys[i]);
    if (found != memory->second.homes.end()) {
      const auto& home = found->second;
      const bool is_home = home->placements() == spectrum->placements();
      return is_home && !must_move ? nullptr : resized(home, signal_sizes);
    }
  }
  return nullptr;
}

} // namespace shardtensor::detail
