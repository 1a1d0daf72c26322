#include "shardtensor/tensor/terms.h"

#include <ATen/ops/stack.h>

#include "shardtensor/tensor/redistribute.h"

namespace shardtensor {

at::Tensor gather_terms(
    const at::Tensor& local,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes) {
  int64_t terms = 1;
  for (const int64_t axis : axes) {
    terms *= spec->mesh()->ranks(axis);
  }
  auto sizes = spec->sizes();
  sizes.insert(sizes.begin(), terms);
  auto partitions = spec->partitions();
  partitions.insert(partitions.begin(), std::nullopt);
  auto placements = spec->placements();
  for (auto& placement : placements) {
    if (placement.is_shard()) {
      placement.dim += 1;
    }
  }
  auto stacked = placements;
  for (const int64_t axis : axes) {
    stacked[axis] = Placement::shard(0);
    placements[axis] = Placement::replicate();
  }
  return redistribute_local(
      local.unsqueeze(0),
      make_spec(spec->mesh(), sizes, stacked, partitions),
      make_spec(spec->mesh(), sizes, placements, partitions));
}

std::vector<at::Tensor> gather_terms(
    const std::vector<at::Tensor>& locals,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes) {
  auto sizes = spec->sizes();
  sizes.push_back(static_cast<int64_t>(locals.size()));
  auto partitions = spec->partitions();
  partitions.emplace_back();
  const auto together =
      make_spec(spec->mesh(), std::move(sizes), spec->placements(), partitions);
  return gather_terms(at::stack(locals, -1), together, axes).unbind(-1);
}

} // namespace shardtensor
