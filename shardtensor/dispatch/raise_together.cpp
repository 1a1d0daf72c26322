#include "shardtensor/dispatch/raise_together.h"

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include "shardtensor/comm/known_error.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/comm/scope.h"

namespace shardtensor::detail {
namespace {

/// The highest `number` of all ranks that hold another piece.
at::Tensor highest(const at::Tensor& number, const ShardSpec& layout) {
  return all_reduce(number, Reduce::Max, *layout.mesh(), layout.sharded_axes());
}

/// `error`, which only one rank knows.
KnownError known_to_all(
    const std::optional<KnownError>& error,
    const ShardSpec& layout,
    c10::Device device) {
  return error_from(highest(bytes_of(error).to(device), layout));
}

} // namespace

void raise_together(
    const std::string& op,
    const SpecPtr& layout,
    const std::function<void()>& run,
    c10::Device device) {
  if (!layout || !layout->is_sharded()) {
    run();
    return;
  }
  const auto error = error_of(run);
  const CommScope scope(op);
  // The first rank that raised has the highest number.
  const auto ranks = layout->mesh()->ranks();
  const int64_t own = error ? ranks - layout->mesh()->position() : 0;
  const auto number = at::full({1}, own, at::device(device).dtype(at::kLong));
  const auto first = highest(number, *layout).item<int64_t>();
  if (first == 0) {
    return;
  }
  auto known =
      known_to_all(own == first ? error : std::nullopt, *layout, device);
  known.text =
      c10::str(op, ": ", known.text, " (mesh rank ", ranks - first, " has it)");
  raise(known);
}

} // namespace shardtensor::detail
