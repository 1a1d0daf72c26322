#include "shardtensor/rules/index/masks.h"

#include <numeric>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/index.h>
#include <ATen/ops/masked_scatter_backward_native.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/rules/index/row_terms.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/tensor/terms.h"

namespace shardtensor::detail {
namespace {

/// The mask, cut like the dims of `spec` that it stands for.
at::Tensor local_mask(
    const at::Tensor& mask,
    const SpecPtr& spec,
    int64_t place) {
  std::vector<Placement> placements(spec->mesh()->axes());
  ShardSpec::Partitions partitions(mask.dim());
  partitions[0] = spec->partition(place);
  for (const int64_t axis : spec->axes(place)) {
    placements[axis] = Placement::shard(0);
  }
  const auto wanted = make_spec(
      spec->mesh(), mask.sizes().vec(), placements, std::move(partitions));
  return local_of(mask, wanted).tensor;
}

} // namespace

Partition count_pieces(
    const SpecPtr& spec,
    int64_t dim,
    int64_t count,
    at::Device device) {
  const auto options = at::TensorOptions(at::kLong).device(device);
  const auto terms = gather_terms(
      at::zeros({}, options).fill_(count),
      make_replicated(spec->mesh(), {}),
      spec->axes(dim));
  return Partition(host_numbers(terms));
}

bool keeps_rows(const SpecPtr& spec, int64_t place, const at::Tensor& mask) {
  if (!spec->is_sharded(place) || !spec->partition(place).is_contiguous()) {
    return false;
  }
  for (int64_t k = 0; k < mask.dim(); ++k) {
    if (place + k >= spec->dim() || mask.size(k) != spec->size(place + k) ||
        (k > 0 && spec->is_sharded(place + k))) {
      return false;
    }
  }
  return true;
}

SpecPtr layout_beside(
    const at::Tensor& self,
    int64_t place,
    const at::Tensor& mask) {
  if (!is_shard_tensor(mask) || spec(mask)->mesh() != spec(self)->mesh() ||
      place + mask.dim() > self.dim() ||
      self.sizes().slice(place, mask.dim()) != mask.sizes()) {
    return nullptr;
  }
  const auto given = without_partial(spec(mask));
  auto placements = given->placements();
  ShardSpec::Partitions partitions(self.dim());
  for (int64_t dim = 0; dim < given->dim(); ++dim) {
    partitions[place + dim] = given->partitions()[dim];
    for (const int64_t axis : given->axes(dim)) {
      placements[axis] = Placement::shard(place + dim);
    }
  }
  return make_spec(
      given->mesh(), self.sizes().vec(), placements, std::move(partitions));
}

MaskedRows masked_rows(
    const SpecPtr& spec,
    int64_t place,
    const at::Tensor& mask) {
  warn_of_bytes(mask);
  const auto chosen = local_mask(mask, spec, place).nonzero();
  const auto partition =
      count_pieces(spec, place, chosen.size(0), chosen.device());
  auto sizes = spec->sizes();
  std::vector<int64_t> from(spec->dim());
  std::iota(from.begin(), from.end(), 0);
  for (auto* const per_dim : {&sizes, &from}) {
    const auto inner = per_dim->begin() + place + 1;
    per_dim->erase(inner, inner + mask.dim() - 1);
  }
  sizes[place] = partition.extent();
  ShardSpec::Partitions partitions(sizes.size());
  partitions[place] = partition;
  Indices index;
  for (int64_t dim = 0; dim < place; ++dim) {
    index.push_back(std::nullopt);
  }
  for (const auto& rows : chosen.unbind(1)) {
    index.push_back(rows);
  }
  return {
      index,
      with_dims(
          spec,
          std::move(sizes),
          from,
          Placement::replicate(),
          std::move(partitions))};
}

namespace {

/// Writes the source's elements under the own part of the mask, where each rank
/// needs as many of them as it has rows; else, and for what PyTorch refuses,
/// false. Communication: an exchange of a number, and the source's move to
/// where the mask wants it: none for what x[mask] gave.
bool scatter_into_own_rows(
    const at::Tensor& self,
    const at::Tensor& mask,
    const at::Tensor& source) {
  if (!is_shard_tensor(self) || has_no_values(impl_of(self)->local()) ||
      mask.scalar_type() != at::kBool ||
      source.scalar_type() != self.scalar_type() ||
      !at::is_expandable_to(mask.sizes(), self.sizes())) {
    return false;
  }
  const auto wide = mask.expand(self.sizes());
  begin_row_write(self, layout_beside(self, 0, wide));
  const auto own = without_partial(spec(self));
  if (self.dim() == 0 || !keeps_rows(own, 0, wide)) {
    return false;
  }
  const auto rows = masked_rows(own, 0, wide);
  const auto count = rows.result->numel();
  if (source.numel() < count) {
    return false;
  }
  const auto elements = source.reshape({-1}).narrow(0, 0, count);
  const LocalToWrite target(self, own);
  target.local().index_put_(rows.index, local_of(elements, rows.result).tensor);
  target.finish();
  return true;
}

at::Tensor scatter_gathered(
    const char* op,
    const at::Tensor& self,
    const at::Tensor& mask,
    const at::Tensor& source) {
  torch::jit::Stack stack{self, mask, source};
  run_fallback(c10::Dispatcher::singleton().findSchemaOrThrow(op, ""), &stack);
  return stack.back().toTensor();
}

at::Tensor& masked_scatter_in_place_kernel(
    at::Tensor& self,
    const at::Tensor& mask,
    const at::Tensor& source) {
  if (!scatter_into_own_rows(self, mask, source)) {
    scatter_gathered("aten::masked_scatter_", self, mask, source);
  }
  return self;
}

at::Tensor masked_scatter_kernel(
    const at::Tensor& self,
    const at::Tensor& mask,
    const at::Tensor& source) {
  if (!is_shard_tensor(self)) {
    return scatter_gathered("aten::masked_scatter", self, mask, source);
  }
  const auto sizes = at::infer_size(self.sizes(), mask.sizes());
  return self.expand(sizes)
      .clone(at::MemoryFormat::Contiguous)
      .masked_scatter_(mask, source);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("masked_scatter", masked_scatter_kernel);
  m.impl("masked_scatter_", masked_scatter_in_place_kernel);
  m.impl("masked_scatter_backward", at::native::masked_scatter_backward_symint);
}

} // namespace shardtensor::detail
