#include "shardtensor/rules/spectra/home.h"

#include <algorithm>

#include "shardtensor/layout/plans/layout_memory.h"

namespace shardtensor::detail {
namespace {

LayoutMemory& homes() {
  static LayoutMemory homes;
  return homes;
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
std::vector<PlanKey> keys_of(
    const SpecPtr& spectrum,
    const std::vector<int64_t>& signal_sizes,
    const std::vector<int64_t>& dims) {
  std::vector<int64_t> extents;
  for (const int64_t dim : dims) {
    extents.push_back(signal_sizes.at(dim));
  }
  std::vector<int64_t> places;
  for (const auto& placement : spectrum->placements()) {
    places.push_back(placement.is_shard() ? placement.dim : -1);
  }
  const auto key = [&](int64_t kind, c10::IntArrayRef known) {
    PlanKey result;
    result.add(kind).add(spectrum->dim()).add(dims).add(known);
    return result;
  };
  auto all = extents;
  all.insert(all.end(), places.begin(), places.end());
  return {key(0, all), key(1, extents), key(2, places), key(3, {})};
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
  for (const auto& key : keys_of(spectrum, signal->sizes(), dims)) {
    homes().note(signal->mesh(), key, signal);
  }
}

SpecPtr recall_home(
    const SpecPtr& spectrum,
    const std::vector<int64_t>& signal_sizes,
    const std::vector<int64_t>& dims,
    bool is_real) {
  const auto keys = keys_of(spectrum, signal_sizes, dims);
  const bool must_move = moves(spectrum, dims);
  const bool is_cut = !spectrum->sharded_dims().empty();
  const bool may_move = must_move || (is_real && !is_cut);
  for (size_t i = 0; i < keys.size(); i += may_move ? 1 : 2) {
    if (const auto home = homes().find(spectrum->mesh(), keys[i])) {
      const bool is_home = home->placements() == spectrum->placements();
      return is_home && !must_move ? nullptr : resized(home, signal_sizes);
    }
  }
  return nullptr;
}

} // namespace shardtensor::detail
