#include "shardtensor/tensor/infer_spec.h"

#include <algorithm>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/known_error.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/layout/print.h"
#include "shardtensor/tensor/equal_on_ranks.h"
#include "shardtensor/tensor/shard_tensor_impl.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;
namespace {

// What ranks tell each other: a hash of all that must be equal, and the local
// sizes. Of one length, for nobody knows the others' number of dims.
constexpr int64_t kMaxDims = 30;
constexpr int64_t kHash = 0;
constexpr int64_t kSizes = 1;
constexpr int64_t kFailed = 0; // in the place of a hash

/// What a rank has.
struct Own {
  std::string alike; // the same on every rank
  std::vector<int64_t> sizes;
};

Own own_piece(
    const at::Tensor& local,
    std::vector<Placement> placements,
    const std::string& alike) {
  TORCH_CHECK_TYPE(
      local.defined(), "infer_spec: expected a tensor, got an undefined one");
  TORCH_CHECK_TYPE(
      !is_shard_tensor(local),
      "infer_spec: expected a plain tensor, got a ShardTensor");
  TORCH_CHECK_TYPE(
      local.layout() == at::kStrided,
      "infer_spec: expected a strided tensor, got layout ",
      local.layout());
  TORCH_CHECK_VALUE(
      local.dim() <= kMaxDims,
      "infer_spec: expected at most ",
      kMaxDims,
      " dims, got ",
      local.dim());
  for (Placement& placement : placements) {
    placement.dim +=
        placement.is_shard() && placement.dim < 0 ? local.dim() : 0;
  }
  const auto text = c10::str(
      "infer_spec of ",
      local.scalar_type(),
      " tensors of ",
      local.dim(),
      " dims on ",
      local.device().type(),
      needs_node(local) ? ", which require grad, " : ", ",
      join(placements),
      alike);
  return {text, local.sizes().vec()};
}

/// A row for every position.
at::Tensor gather_rows_of_all(const std::optional<Own>& own, const Mesh& mesh) {
  const auto table = at::zeros({mesh.ranks(), kSizes + kMaxDims}, at::kLong);
  if (own) {
    auto* const row =
        table.data_ptr<int64_t>() + mesh.position() * table.size(1);
    const auto hash = static_cast<int64_t>(hash_of_text(own->alike) >> 1);
    row[kHash] = std::max(kFailed + 1, hash);
    std::copy(own->sizes.begin(), own->sizes.end(), row + kSizes);
  }
  if (mesh.ranks() == 1) {
    return table;
  }
  return reduce_numbers(table, Reduce::Sum, mesh.group()).contiguous();
}

bool agree(at::TensorAccessor<int64_t, 2> rows) {
  for (int64_t position = 0; position < rows.size(0); ++position) {
    if (rows[position][kHash] != rows[0][kHash]) {
      return false;
    }
  }
  return rows[0][kHash] != kFailed;
}

/// Raises what is wrong, on all ranks, which know that something is.
[[noreturn]] void compare(
    const Mesh& mesh,
    const std::optional<Own>& own,
    const std::optional<KnownError>& error) {
  const auto of_numbers = at::zeros({0}, at::kLong);
  agree_on_call(Group(mesh.group()), of_numbers, [&]() -> Collective {
    if (error) {
      raise(*error);
    }
    return {own->alike, "", {}, {}};
  });
  TORCH_INTERNAL_ASSERT(false, "infer_spec: two texts have one hash");
}

std::vector<std::vector<int64_t>> ask_sizes(
    const MeshPtr& mesh,
    c10::function_ref<Own()> prepare) {
  TORCH_CHECK_VALUE(mesh, "infer_spec: no mesh, expected one");
  TORCH_CHECK_VALUE(
      mesh->contains_this_rank(),
      "infer_spec: this rank is none of ",
      *mesh,
      ", whose ranks alone know their sizes");
  const CommScope scope("infer_spec");
  std::optional<Own> own;
  const auto error = error_of([&] { own = prepare(); });
  const OutsideTransforms of_all_levels; // whose zeros would be a level's
  const auto table = gather_rows_of_all(own, *mesh);
  const auto rows = table.accessor<int64_t, 2>();
  if (!agree(rows)) {
    compare(*mesh, own, error);
  }
  std::vector<std::vector<int64_t>> sizes;
  for (int64_t position = 0; position < mesh->ranks(); ++position) {
    const auto* const row = rows[position].data() + kSizes;
    sizes.emplace_back(row, row + own->sizes.size());
  }
  return sizes;
}

} // namespace

SpecPtr infer_spec(
    const at::Tensor& local,
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    const std::string& alike) {
  const auto sizes =
      ask_sizes(mesh, [&] { return own_piece(local, placements, alike); });
  return infer_spec(mesh, placements, sizes);
}

void raise_in_infer_spec(
    const MeshPtr& mesh,
    const std::string& error_kind,
    const std::string& error) {
  ask_sizes(mesh, [&]() -> Own { raise({kind_named(error_kind), error}); });
}

void check_replicas(const at::Tensor& local, const SpecPtr& spec) {
  TORCH_CHECK_VALUE(spec, "check_replicas: no spec, expected one");
  if (local.is_meta() || is_transformed(local)) {
    return; // nobody can read them
  }
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < spec->mesh()->axes(); ++axis) {
    if (spec->placement(axis).is_replicate()) {
      axes.push_back(axis);
    }
  }
  TORCH_CHECK_VALUE(
      axes.empty() || !differs_along(local, *spec->mesh(), axes),
      "check_replicas: expected the same elements on all ranks along the "
      "Replicate axes of ",
      to_string(*spec),
      ", but they differ; broadcast them first");
}

} // namespace shardtensor
