// What x.repeat_interleave(counts) chooses: where the counts are cut, each rank
// names the rows that its own stand for.
#include <ATen/ops/repeat_interleave.h>
#include <torch/library.h>

#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/raise_together.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/rules/index/masks.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

constexpr auto kRepeat = "aten::repeat_interleave";

at::Tensor rows_gathered(
    const at::Tensor& counts,
    std::optional<int64_t> output_size) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      "aten::repeat_interleave", "Tensor");
  torch::jit::Stack stack{counts, output_size};
  run_fallback(op, &stack);
  return stack.back().toTensor();
}

/// Communication: an all-reduce and an exchange of a number.
at::Tensor repeat_interleave_kernel(
    const at::Tensor& counts,
    std::optional<int64_t> output_size) {
  if (!is_shard_tensor(counts) || counts.dim() != 1 ||
      !spec(counts)->is_sharded(0) || has_no_values(impl_of(counts)->local())) {
    return rows_gathered(counts, output_size);
  }
  const CommScope scope(kRepeat);
  const auto layout = contiguous_dim(without_partial(spec(counts)), 0);
  const auto own = local_of(counts, layout);
  at::Tensor rows;
  raise_together(kRepeat, layout, [&] {
    rows = at::repeat_interleave(own.tensor).add(layout->interval(0).begin);
  });
  const auto pieces = count_pieces(layout, 0, rows.numel(), rows.device());
  TORCH_CHECK(
      !output_size || *output_size == pieces.extent(),
      kRepeat,
      ": output_size ",
      output_size.value_or(0),
      ", expected ",
      pieces.extent(),
      ", the sum of the counts");
  return wrap(rows, with_partition(layout, 0, pieces));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("repeat_interleave.Tensor", repeat_interleave_kernel);
}

} // namespace shardtensor::detail
