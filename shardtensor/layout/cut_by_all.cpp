#include "shardtensor/layout/cut_by_all.h"

#include <utility>

namespace shardtensor::detail {

bool is_cut_by_all(const ShardSpec& spec, int64_t dim) {
  return static_cast<int64_t>(spec.axes(dim).size()) == spec.mesh()->axes() &&
      spec.partition(dim).is_contiguous();
}

SpecPtr cut_by_all(const SpecPtr& spec, int64_t dim) {
  return is_cut_by_all(*spec, dim)
      ? spec
      : cut_by_all(
            spec->mesh(),
            spec->sizes(),
            dim,
            Partition::chunked(spec->size(dim), spec->mesh()->ranks()));
}

SpecPtr cut_by_all(
    const MeshPtr& mesh,
    std::vector<int64_t> sizes,
    int64_t dim,
    Partition pieces) {
  ShardSpec::Partitions partitions(sizes.size());
  partitions[dim] = std::move(pieces);
  return make_spec(
      mesh,
      std::move(sizes),
      std::vector<Placement>(mesh->axes(), Placement::shard(dim)),
      std::move(partitions));
}

} // namespace shardtensor::detail
