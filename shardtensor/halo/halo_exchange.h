#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/stencil.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// Ghost cells along one dim: how many before and after each shard.
struct Halo {
  int64_t dim = 0;
  int64_t before = 0;
  int64_t after = 0;
};

/// This rank's shard of `x` with its ghost cells, as a plain tensor, for
/// programs that do their own stencils: row i of the shard is row
/// i + halo.before of the result. Beyond the ends of the domain stands what
/// `boundary` says; with Boundary::None nothing does, and shards at the ends
/// get fewer rows. A halo may be wider than a shard, a shard may be empty, a
/// dim of `halos` need not be sharded. A Partial is reduced first, and rows of
/// a repeated partition (shard_spec.h) are put side by side: as many on each
/// rank. Differentiable to any order: gradients of ghost cells are added where
/// the cells came from. Communication: one message per rank that has ghost
/// cells of ours, corners included, and that of redistribute first where the
/// layout must change. Raises for a plain tensor, a dim out of range or named
/// twice, and a negative width.
///
/// Example: rows 0 to 9 as {6, 4}, halo {dim, 1, 1}, Periodic: the second rank
/// gets the rows 5, 6, 7, 8, 9, 0.
at::Tensor halo_exchange(
    const at::Tensor& x,
    const std::vector<Halo>& halos,
    Boundary boundary = Boundary::None);

/// The inverse: drops the ghost cells of `local`, one halo_exchange result or
/// something of the same extents along the halos' dims, and returns the
/// ShardTensor whose shards are left, in the layout of `like` that
/// halo_exchange works in: without Partial, no partition repeated. Sizes of
/// other dims must be those of `like`, too. No communication.
at::Tensor halo_trim(
    const at::Tensor& local,
    const SpecPtr& like,
    const std::vector<Halo>& halos,
    Boundary boundary = Boundary::None);

} // namespace shardtensor
