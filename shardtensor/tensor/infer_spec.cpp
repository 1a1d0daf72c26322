#include "shardtensor/tensor/infer_spec.h"

#include <algorithm>
#include <functional>
#include <string>

#include <ATen/ops/zeros.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/layout/print.h"

namespace shardtensor {

using namespace detail;
namespace {

// What ranks tell each other: dims, a hash of all that must be equal, and the
// local sizes. Of one length, for nobody knows the others' number of dims.
constexpr int64_t kMaxDims = 30;
constexpr int64_t kDims = 0;
constexpr int64_t kHash = 1;
constexpr int64_t kSizes = 2;
constexpr int64_t kUndefined = -1; // dims of no tensor

int64_t hash_of(const at::Tensor& local, std::vector<Placement> placements) {
  for (Placement& placement : placements) {
    placement.dim +=
        placement.is_shard() && placement.dim < 0 ? local.dim() : 0;
  }
  const auto text = c10::str(
      join(placements), " ", local.scalar_type(), " ", local.device().type());
  return static_cast<int64_t>(std::hash<std::string>()(text) >> 1);
}

/// A row for every position.
at::Tensor gather_rows_of_all(
    const at::Tensor& local,
    const Mesh& mesh,
    const std::vector<Placement>& placements) {
  auto table = at::zeros({mesh.ranks(), kSizes + kMaxDims}, at::kLong);
  if (mesh.contains_this_rank()) {
    auto* const row =
        table.data_ptr<int64_t>() + mesh.position() * table.size(1);
    row[kDims] = local.defined() ? local.dim() : kUndefined;
    row[kHash] = local.defined() ? hash_of(local, placements) : 0;
    const auto sizes = local.sizes().slice(0, std::min(local.dim(), kMaxDims));
    std::copy(sizes.begin(), sizes.end(), row + kSizes);
  }
  const auto device = mesh.ranks() > 1 && mesh.contains_this_rank()
      ? Group(mesh.group()).device_of_numbers()
      : c10::Device(at::kCPU);
  return all_reduce(table.to(device), Reduce::Sum, mesh.group())
      .cpu()
      .contiguous();
}

} // namespace

SpecPtr infer_spec(
    const at::Tensor& local,
    const MeshPtr& mesh,
    const std::vector<Placement>& placements) {
  TORCH_CHECK_VALUE(mesh, "infer_spec: no mesh, expected one");
  const CommScope scope("infer_spec");
  const auto table = gather_rows_of_all(local, *mesh, placements);
  std::vector<std::vector<int64_t>> local_sizes;
  bool same = true;
  for (int64_t position = 0; position < mesh->ranks(); ++position) {
    const auto* const row =
        table.const_data_ptr<int64_t>() + position * table.size(1);
    TORCH_CHECK_TYPE(
        row[kDims] != kUndefined,
        "infer_spec: the tensor of position ",
        position,
        " is undefined");
    TORCH_CHECK_VALUE(
        row[kDims] <= kMaxDims,
        "infer_spec: expected at most ",
        kMaxDims,
        " dims, got ",
        row[kDims]);
    local_sizes.emplace_back(row + kSizes, row + kSizes + row[kDims]);
    same = same && row[kHash] == table.const_data_ptr<int64_t>()[kHash];
  }
  const auto dims = local_sizes[0].size();
  const bool same_dims = std::all_of(
      local_sizes.begin(), local_sizes.end(), [&](const auto& sizes) {
        return sizes.size() == dims;
      });
  // Other numbers of dims are said by the planner, with all ranks' numbers.
  TORCH_CHECK_VALUE(
      same || !same_dims,
      "infer_spec: the ranks differ in placements, dtype or device type; this "
      "one has ",
      join(placements),
      ", ",
      local.scalar_type(),
      " on ",
      local.device().type());
  return infer_spec(mesh, placements, local_sizes);
}

} // namespace shardtensor
