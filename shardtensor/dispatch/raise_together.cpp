#include "shardtensor/dispatch/raise_together.h"

#include <algorithm>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "shardtensor/comm/collectives.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kTextBytes = 512; // of a message

std::optional<std::string> error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return std::nullopt;
}

/// The highest `number` of all ranks that hold another piece.
at::Tensor highest(const at::Tensor& number, const ShardSpec& layout) {
  return all_reduce(number, Reduce::Max, *layout.mesh(), layout.sharded_axes());
}

/// `text`, which only one rank knows.
std::string known_to_all(const std::string& text, const ShardSpec& layout) {
  auto bytes = at::zeros({kTextBytes}, at::kLong);
  const auto length = std::min<int64_t>(text.size(), kTextBytes);
  std::copy_n(text.begin(), length, bytes.data_ptr<int64_t>());
  bytes = highest(bytes, layout).contiguous();
  const auto* begin = bytes.const_data_ptr<int64_t>();
  return {begin, std::find(begin, begin + kTextBytes, 0)};
}

} // namespace

void raise_together(
    const std::string& op,
    const SpecPtr& layout,
    const std::function<void()>& run) {
  if (!layout || !layout->is_sharded()) {
    run();
    return;
  }
  const auto error = error_of(run);
  const CommScope scope(op);
  // The first rank that raised has the highest number.
  const auto ranks = layout->mesh()->ranks();
  const int64_t own = error ? ranks - layout->mesh()->position() : 0;
  const auto first =
      highest(at::full({1}, own, at::kLong), *layout).item<int64_t>();
  if (first > 0) {
    const auto text =
        known_to_all(own == first && error ? *error : std::string(), *layout);
    TORCH_CHECK(false, op, ": ", text);
  }
}

} // namespace shardtensor::detail
