#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/infer.h"

namespace shardtensor {

/// The layout of the tensor of which each rank holds `local`. The ranks tell
/// each other their local sizes and decide alike. Raises on every rank when
/// they do not fit together, or when ranks differ in placements, dtype or
/// device type, or one is undefined. Communication: one all-reduce of 32
/// numbers per rank.
///
/// Example: from_local(rows, infer_spec(rows, mesh, {Placement::shard(0)})).
SpecPtr infer_spec(
    const at::Tensor& local,
    const MeshPtr& mesh,
    const std::vector<Placement>& placements);

} // namespace shardtensor
