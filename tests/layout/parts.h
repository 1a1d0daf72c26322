#pragma once

#include <random>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include "support.h"

// Tensors of global sizes, and what each position holds of them.
namespace shardtensor::testing {

/// Element i is i.
inline at::Tensor numbered(const std::vector<int64_t>& sizes) {
  return at::arange(count(sizes), at::kDouble).view(sizes);
}

/// What `position` holds of `global` in the layout of `spec`, Partial axes
/// aside.
inline at::Tensor part_of(
    at::Tensor global,
    const ShardSpec& spec,
    int64_t position) {
  for (int64_t dim = 0; dim < spec.dim(); ++dim) {
    global = global.index_select(
        dim, at::tensor(rows_of(spec, dim, position), at::kLong));
  }
  return global;
}

/// The same layout as another rank sees it.
inline SpecPtr seen_from(const SpecPtr& spec, int64_t position) {
  return make_spec(
      mesh_of(spec->mesh()->shape(), position),
      spec->sizes(),
      spec->placements(),
      spec->partitions());
}

inline std::vector<Placement> random_placements(
    std::mt19937& random,
    int64_t axes,
    int64_t dims,
    bool may_be_partial = false) {
  std::vector<Placement> placements(axes);
  for (Placement& placement : placements) {
    const int64_t kind = random() % 5;
    if (kind > 1 && dims > 0) {
      placement = Placement::shard(random() % dims);
    } else if (kind == 1 && may_be_partial) {
      placement = Placement::partial();
    }
  }
  return placements;
}

} // namespace shardtensor::testing
