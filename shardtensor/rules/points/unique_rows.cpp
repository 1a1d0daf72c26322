#include "shardtensor/rules/points/unique_rows.h"

#include <ATen/ops/zeros.h>

#include "shardtensor/collectives/unique_keys.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/layout/cut_by_all.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

bool is_cut(const Tensor& x) {
  return layout_of(x) && spec_inside(x)->is_sharded();
}

} // namespace

Tensor cut_rows(const Tensor& given) {
  if (!is_cut(given)) {
    return given;
  }
  return redistribute(given, cut_by_all(spec_inside(given), 0));
}

UniqueRows unique_rows(const Tensor& given) {
  const OutsideTransforms of_all_levels;
  const auto keys = value_inside(given).detach();
  if (!layout_of(keys)) {
    const auto found = unique_keys(keys, "");
    return {found.keys, found.inverse};
  }
  const auto rows = cut_rows(keys);
  const auto layout = without_partial(spec_inside(rows));
  const auto local = to_local(redistribute(rows, layout));
  const bool cut = layout->is_sharded();
  const auto found = unique_keys(local, cut ? layout->mesh()->group() : "");
  ShardSpec::Partitions partitions(1);
  if (cut) {
    partitions[0] = Partition(found.sizes);
  }
  const auto unique = make_spec(
      layout->mesh(), {found.all()}, layout->placements(), partitions);
  return {from_local(found.keys, unique), from_local(found.inverse, layout)};
}

Tensor zero_rows(
    const Tensor& like,
    at::IntArrayRef tail,
    const at::TensorOptions& options) {
  std::vector<int64_t> sizes{like.size(0)};
  sizes.insert(sizes.end(), tail.begin(), tail.end());
  if (!layout_of(like)) {
    return at::zeros(sizes, options);
  }
  std::vector<int64_t> from(sizes.size(), -1);
  from[0] = 0;
  const auto layout =
      with_dims(without_partial(spec_inside(like)), sizes, from);
  return from_local(at::zeros(layout->local_sizes(), options), layout);
}

} // namespace shardtensor::detail
