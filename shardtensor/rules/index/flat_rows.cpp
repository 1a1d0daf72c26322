#include "shardtensor/rules/index/flat_rows.h"

#include <algorithm>

#include <c10/util/accumulate.h>

#include "shardtensor/layout/plans/reshape_plan.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::detail {

using at::Tensor;

Tensor flattened(const Tensor& x, int64_t first, int64_t count) {
  auto sizes = x.sizes().vec();
  sizes.erase(sizes.begin() + first + 1, sizes.begin() + first + count);
  sizes[first] = c10::multiply_integers(x.sizes().slice(first, count));
  const auto wanted = plan_reshape(without_partial(spec(x)), sizes).wanted;
  return redistribute(x, wanted).reshape(sizes);
}

Tensor cut_along(
    const Tensor& x,
    int64_t dim,
    const std::vector<int64_t>& axes) {
  auto placements = spec(x)->placements();
  for (const auto axis : axes) {
    placements[axis] = Placement::shard(dim);
  }
  return redistribute(
      x, contiguous_dim(with_placements(spec(x), std::move(placements)), dim));
}

Tensor cut_index(
    const Tensor& given,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  const auto index = promote(given, mesh);
  const auto own = without_partial(spec(index));
  const auto longest =
      std::ranges::max_element(own->sizes()) - own->sizes().begin();
  auto placements = own->placements();
  for (const auto axis : axes) {
    if (!placements[axis].is_shard()) {
      placements[axis] = Placement::shard(longest);
    }
  }
  return redistribute(index, with_placements(own, std::move(placements)));
}

bool is_cut_beside(const Tensor& index, const Tensor& self, int64_t dim) {
  if (!is_shard_tensor(index)) {
    return false;
  }
  for (int64_t axis = 0; axis < spec(self)->mesh()->axes(); ++axis) {
    if (spec(self)->placement(axis) == Placement::shard(dim) &&
        !spec(index)->placement(axis).is_shard()) {
      return false;
    }
  }
  return true;
}

} // namespace shardtensor::detail
