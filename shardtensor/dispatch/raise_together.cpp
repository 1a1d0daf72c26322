#include "shardtensor/dispatch/raise_together.h"

#include <algorithm>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/scope.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kTextBytes = 512; // of a message

/// Of matrices that an algorithm cannot take, or any other.
enum Kind : int64_t { kOfMatrix = 1, kOther };

struct Error {
  int64_t kind;
  std::string text;
};

std::optional<Error> error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::LinAlgError& error) {
    return Error{kOfMatrix, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    return Error{kOther, error.what_without_backtrace()};
  }
  return std::nullopt;
}

/// The highest `number` of all ranks that hold another piece.
at::Tensor highest(const at::Tensor& number, const ShardSpec& layout) {
  return all_reduce(number, Reduce::Max, *layout.mesh(), layout.sharded_axes());
}

/// `error`, which only one rank knows.
Error known_to_all(
    const std::optional<Error>& error,
    const ShardSpec& layout,
    c10::Device device) {
  auto numbers = at::zeros({kTextBytes + 1}, at::kLong);
  if (error) {
    auto* const own = numbers.mutable_data_ptr<int64_t>();
    own[0] = error->kind;
    const auto length = std::min<int64_t>(error->text.size(), kTextBytes);
    std::copy_n(error->text.begin(), length, own + 1);
  }
  const auto all = host_numbers(highest(numbers.to(device), layout));
  return {all[0], {all.begin() + 1, std::find(all.begin() + 1, all.end(), 0)}};
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
  const auto known =
      known_to_all(own == first ? error : std::nullopt, *layout, device);
  const auto text =
      c10::str(op, ": ", known.text, " (mesh rank ", ranks - first, " has it)");
  TORCH_CHECK_LINALG(known.kind != kOfMatrix, text);
  TORCH_CHECK(false, text);
}

} // namespace shardtensor::detail
