#include "shardtensor/tensor/transformed.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "shardtensor/comm/transforms.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::detail {
namespace {

SpecPtr without_dims(const SpecPtr& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> sizes;
  std::vector<int64_t> from;
  for (int64_t kept = 0; kept < spec->dim(); ++kept) {
    if (std::ranges::find(dims, kept) == dims.end()) {
      sizes.push_back(spec->size(kept));
      from.push_back(kept);
    }
  }
  return with_dims(spec, sizes, from);
}

std::vector<SpecPtr>& specs_of_calls() {
  thread_local std::vector<SpecPtr> specs;
  return specs;
}

} // namespace

SpecPtr layout_of(const at::Tensor& tensor) {
  if (is_shard_tensor(tensor)) {
    return spec(tensor);
  }
  if (!is_transformed(tensor)) {
    return nullptr;
  }
  const auto value = without_levels(tensor);
  if (const auto samples = samples_of(value)) {
    const auto all = layout_of(samples->values);
    return all ? without_dims(all, {samples->dim}) : nullptr;
  }
  return value.is_same(tensor) ? nullptr : layout_of(value);
}

SpecPtr spec_inside(const at::Tensor& tensor) {
  const auto layout = layout_of(tensor);
  return layout ? layout : spec(tensor);
}

SpecOfCall::SpecOfCall(SpecPtr spec)
    : place_(static_cast<int64_t>(specs_of_calls().size())) {
  specs_of_calls().push_back(std::move(spec));
}

SpecOfCall::~SpecOfCall() {
  specs_of_calls().pop_back();
}

SpecPtr spec_of_call(int64_t place) {
  const auto& specs = specs_of_calls();
  TORCH_CHECK_VALUE(
      place >= 0 && place < static_cast<int64_t>(specs.size()),
      "expected the place of a spec of ",
      specs.size(),
      ", got ",
      place);
  return specs[place];
}

} // namespace shardtensor::detail
