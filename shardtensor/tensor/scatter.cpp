#include "shardtensor/tensor/scatter.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "shardtensor/comm/check.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor {

using namespace detail;
namespace {

Box from_zero(const Box& box) {
  Box result;
  for (const auto& interval : box) {
    result.push_back(interval.shifted(-interval.begin));
  }
  return result;
}

ExchangePlan plan_scatter(const ShardSpec& spec, int64_t source) {
  const auto position = spec.mesh()->position();
  ExchangePlan plan;
  plan.source_sizes =
      position == source ? spec.sizes() : std::vector<int64_t>{0};
  plan.target_sizes = spec.local_sizes();
  plan.covers = true;
  int64_t largest = 0;
  for (int64_t dst = 0; dst < spec.mesh()->ranks(); ++dst) {
    const auto box = spec.box(dst);
    if (numel(box) == 0) {
      continue;
    }
    const Transfer transfer{source, dst, box, from_zero(box)};
    if (position == source) {
      plan.sends.push_back(transfer);
    }
    if (position == dst) {
      plan.receives.push_back(transfer);
    }
    if (dst != source) {
      largest = std::max(largest, numel(box));
    }
  }
  plan.largest_message = largest;
  return plan;
}

void check_scatter(
    const at::Tensor& tensor,
    int64_t source,
    const ShardSpec& spec) {
  const auto& mesh = *spec.mesh();
  TORCH_CHECK_VALUE(
      source >= 0 && source < mesh.ranks(),
      "scatter: the source position ",
      source,
      " is outside ",
      mesh);
  TORCH_CHECK_VALUE(
      !spec.has_partial(),
      "scatter: expected Shard and Replicate placements, got ",
      to_string(spec));
  TORCH_CHECK_TYPE(
      tensor.defined(),
      "scatter: got an undefined tensor, expected a plain one, on other ranks "
      "than the source an empty one of its dtype and device");
  TORCH_CHECK_TYPE(
      !is_shard_tensor(tensor),
      "scatter: expected a plain tensor, got a ShardTensor; use redistribute()");
  TORCH_CHECK_VALUE(
      mesh.position() != source ||
          tensor.sizes() == at::IntArrayRef(spec.sizes()),
      "scatter: the source's tensor has sizes ",
      tensor.sizes(),
      ", expected ",
      at::IntArrayRef(spec.sizes()));
}

/// Every rank raises what one of them would.
void agree_on_scatter(
    const at::Tensor& tensor,
    int64_t source,
    const ShardSpec& spec,
    at::MemoryFormat format) {
  const auto& mesh = *spec.mesh();
  if (!mesh.contains_this_rank()) {
    check_scatter(tensor, source, spec);
    return;
  }
  agree_on_call(Group(mesh.group()), tensor, [&]() -> Collective {
    check_scatter(tensor, source, spec);
    const auto text = c10::str(
        "scatter of a ",
        tensor.scalar_type(),
        " tensor from position ",
        source,
        " to ",
        to_string(spec),
        ", ",
        format);
    return {text, "", {}, {}};
  });
}

} // namespace

at::Tensor scatter(
    const at::Tensor& tensor,
    int64_t source,
    const SpecPtr& spec,
    at::MemoryFormat format) {
  TORCH_CHECK_VALUE(spec, "scatter: no spec, expected one");
  const at::NoGradGuard no_grad;
  agree_on_scatter(tensor, source, *spec, format);
  const auto& mesh = *spec->mesh();
  const CommScope scope("scatter " + to_string(*spec));
  const auto whole = mesh.position() == source
      ? tensor.detach()
      : at::empty({0}, tensor.options());
  const auto boxes = contiguous(spec); // one for each rank
  const auto local = exchange(whole, plan_scatter(*boxes, source), mesh);
  const auto strides = strides_of_format(format, spec->sizes());
  return redistribute(wrap(local, boxes, strides), spec);
}

} // namespace shardtensor
