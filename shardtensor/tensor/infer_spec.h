#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/infer.h"

namespace shardtensor {

/// The layout of the tensor of which each rank holds `local`. The ranks tell
/// each other their local sizes and decide alike. Raises on every rank when
/// they do not fit together, or when ranks differ in placements, dtype, device
/// type, number of dims, in whether gradients flow, or in `alike`, a text for
/// errors, or where one is undefined or not strided. On a rank that is none of
/// the mesh: an error there. Communication: one all-reduce of 32 numbers per
/// rank, two small gathers more where something is wrong.
///
/// Example: from_local(rows, infer_spec(rows, mesh, {Placement::shard(0)})).
SpecPtr infer_spec(
    const at::Tensor& local,
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    const std::string& alike = "");

/// For the Python package: the same call on a rank that has found an error, of
/// Python's kind, before. Raises it on every rank.
void raise_in_infer_spec(
    const MeshPtr& mesh,
    const std::string& error_kind,
    const std::string& error);

/// Raises on every rank where ranks that hold one piece, along axes where the
/// tensor is Replicate, have other bits of it (on devices, other numbers).
/// Communication: two all-reduces of the piece and one of a number; none
/// without such axes, for meta tensors and within torch.func's transforms.
void check_replicas(const at::Tensor& local, const SpecPtr& spec);

} // namespace shardtensor
