#include <map>
#include <optional>
#include <set>
#include <vector>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/kernel.h"

// What torch.amp.GradScaler does with gradients.

namespace shardtensor::detail {
namespace {

/// A number that is not finite in one rank's piece is seen by all ranks that
/// have pieces. Communication: an all-reduce of a number for each mesh.
void unscale_kernel(
    at::TensorList gradients,
    at::Tensor& found_inf,
    const at::Tensor& inverse_scale) {
  std::vector<LocalToWrite> written;
  std::vector<at::Tensor> locals;
  std::map<MeshPtr, std::set<int64_t>> cut; // axes
  std::vector<MeshPtr> meshes; // in order, the same on all ranks
  for (const auto& gradient : gradients) {
    if (!is_shard_tensor(gradient)) {
      locals.push_back(gradient);
      continue;
    }
    const auto layout = without_partial(spec(gradient));
    locals.push_back(written.emplace_back(gradient, layout).local());
    if (!cut.count(layout->mesh())) {
      meshes.push_back(layout->mesh());
    }
    const auto axes = layout->sharded_axes();
    cut[layout->mesh()].insert(axes.begin(), axes.end());
  }
  const auto plain = [](const at::Tensor& number) {
    return is_shard_tensor(number)
        ? local_of(number, replicated(spec(number))).tensor
        : number;
  };
  std::optional<LocalToWrite> flag; // which may be cut, too
  if (is_shard_tensor(found_inf)) {
    flag.emplace(found_inf, replicated(spec(found_inf)));
  }
  auto found = flag ? flag->local() : found_inf;
  at::_amp_foreach_non_finite_check_and_unscale_(
      locals, found, plain(inverse_scale));
  for (const auto& tensor : written) {
    tensor.finish();
  }
  for (const auto& mesh : meshes) {
    const auto& axes = cut[mesh];
    found.copy_(
        all_reduce(found, Reduce::Max, *mesh, {axes.begin(), axes.end()}));
  }
  if (flag) {
    flag->finish();
  }
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("_amp_foreach_non_finite_check_and_unscale_", unscale_kernel);
}

} // namespace shardtensor::detail
