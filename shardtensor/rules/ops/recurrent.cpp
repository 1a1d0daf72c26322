#include <array>
#include <string>

#include <torch/library.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/joined_operands.h"
#include "shardtensor/layout/view_plan.h"
#include "shardtensor/tensor/keys.h"

// Recurrent layers. Steps follow each other, so where they are cut, samples are
// cut in their place: one exchange of the input and one of the output, which
// lies as the input does. Where samples are too few the layer is left alone,
// and its operators gather what each step needs.

namespace shardtensor::detail {
namespace {

/// Where the samples of a recurrent layer's input and output are, and its
/// steps.
struct Dims {
  int64_t steps;
  int64_t samples;
};

/// The layout with steps whole and samples cut; null where it would be
/// gathered, or lies so.
SpecPtr with_whole_steps(const SpecPtr& given, const Dims& dims) {
  if (given->dim() != 3 || !given->is_sharded(dims.steps)) {
    return nullptr;
  }
  const auto wanted = whole_dims(given, {dims.steps}, {dims.samples});
  for (const int64_t axis : given->axes(dims.steps)) {
    if (!wanted->placements()[axis].is_shard()) {
      return nullptr;
    }
  }
  return wanted;
}

void recurrent_function(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto base = stack->size() - op.schema().arguments().size();
  const auto input = (*stack)[base].toTensor();
  if (keys.has_any(kTransformKeys) || must_join(op, keys, *stack) ||
      !is_shard_tensor(input)) {
    run_below_function_level(op, keys, stack);
    return;
  }
  const auto name = c10::toString(op.operator_name());
  const CommScope scope(name.c_str());
  const bool batch_first = stack->back().toBool();
  const auto given = without_partial(spec(input));
  const auto wanted =
      with_whole_steps(given, batch_first ? Dims{1, 0} : Dims{0, 1});
  if (wanted) {
    (*stack)[base] = redistribute(input, wanted);
  }
  run_below_function_level(op, keys, stack);
  if (wanted) {
    auto& output = (*stack)[base];
    const auto layout =
        with_dims(given, output.toTensor().sizes().vec(), {0, 1, -1});
    output = redistribute(output.toTensor(), layout);
  }
}

constexpr std::array kRecurrent{
    "gru.input",
    "lstm.input",
    "rnn_relu.input",
    "rnn_tanh.input",
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  for (const char* name : kRecurrent) {
    m.impl(
        name, torch::CppFunction::makeFromBoxedFunction<&recurrent_function>());
  }
}

} // namespace shardtensor::detail
