#include "shardtensor/tensor/terms.h"

#include <numeric>

#include <ATen/ops/stack.h>

#include "shardtensor/tensor/redistribute.h"

namespace shardtensor::detail {

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
  std::vector<int64_t> from(spec->dim() + 1);
  std::iota(from.begin(), from.end(), -1);
  const auto stacked = with_dims(spec, std::move(sizes), from);
  auto apart = stacked->placements();
  auto together = stacked->placements();
  for (const int64_t axis : axes) {
    apart[axis] = Placement::shard(0);
    together[axis] = Placement::replicate();
  }
  return redistribute_local(
      local.unsqueeze(0),
      with_placements(stacked, std::move(apart)),
      with_placements(stacked, std::move(together)));
}

std::vector<at::Tensor> gather_terms(
    const std::vector<at::Tensor>& locals,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes) {
  auto sizes = spec->sizes();
  sizes.push_back(static_cast<int64_t>(locals.size()));
  std::vector<int64_t> from(spec->dim());
  std::iota(from.begin(), from.end(), 0);
  from.push_back(-1);
  const auto together = with_dims(spec, std::move(sizes), from);
  return gather_terms(at::stack(locals, -1), together, axes).unbind(-1);
}

} // namespace shardtensor::detail
