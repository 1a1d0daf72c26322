#include <ATen/WrapDimUtils.h>

#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"

// glu multiplies one half of a dim with a gate made of the other: output row i
// takes the input rows i and i + half. A rank has both where the dim is cut
// like (2, half) merged, the same cut twice; another cut is moved there first.

namespace shardtensor::detail {
namespace {

/// The layouts of tensors with the whole dim and with half of it.
struct Halving {
  SpecPtr whole;
  SpecPtr half;
};

/// How a half is cut so that the whole moves least.
Partition half_of(const ShardSpec& whole, int64_t dim) {
  const auto& partition = whole.partition(dim);
  if (partition.repeat() % 2 == 0) {
    return Partition(partition.sizes(), partition.repeat() / 2);
  }
  std::vector<int64_t> ranks;
  for (const int64_t axis : whole.axes(dim)) {
    ranks.push_back(whole.mesh()->ranks(axis));
  }
  return Partition::chunked(partition.extent() / 2, ranks);
}

Halving plan_halving(const SpecPtr& given, int64_t dim) {
  const auto whole = without_partial(given);
  if (!whole->is_sharded(dim)) {
    auto sizes = whole->sizes();
    sizes[dim] /= 2;
    return {whole, with_sizes(whole, std::move(sizes))};
  }
  const auto half = half_of(*whole, dim);
  return {
      with_partition(whole, dim, Partition(half.sizes(), 2 * half.repeat())),
      with_partition(whole, dim, half)};
}

/// `input`: the argument that has the whole dim in each of these operators.
Decision halves_rule(Call& call, const char* input, bool gives_half) {
  const auto argument = call.argument_index(input);
  SpecPtr given;
  for (const auto& operand : call.operands()) {
    given = operand.argument == argument ? operand.spec : given;
  }
  const auto dim =
      at::maybe_wrap_dim(call.argument("dim").toInt(), given->dim());
  const auto [whole, half] = plan_halving(given, dim);
  const auto output = gives_half ? half : whole;
  Decision decision;
  for (const auto& operand : call.operands()) {
    const bool has_half =
        operand.spec && operand.spec->size(dim) == half->size(dim);
    decision.inputs.push_back(
        is_out_argument(call, operand) ? output
            : has_half                 ? half
                                       : whole);
  }
  decision.outputs = {output};
  return decision;
}

Decision glu_rule(Call& call) {
  auto sizes = call.operand(0).spec->sizes();
  TORCH_CHECK(!sizes.empty(), "glu does not support 0-dimensional tensors");
  const auto dim = at::maybe_wrap_dim(
      call.argument("dim").toInt(), static_cast<int64_t>(sizes.size()));
  TORCH_CHECK(
      sizes[dim] % 2 == 0,
      "Halving dimension must be even, but dimension ",
      dim,
      " is size ",
      sizes[dim]);
  sizes[dim] /= 2;
  call.set_output_sizes({std::move(sizes)});
  auto decision = halves_rule(call, "self", true);
  decision.strides_of = strides_of_first;
  return decision;
}

Decision glu_backward_rule(Call& call) {
  return halves_rule(call, "self", false);
}

Decision glu_jvp_rule(Call& call) {
  return halves_rule(call, "x", true);
}

Decision glu_backward_jvp_rule(Call& call) {
  return halves_rule(call, "x", false);
}

const RegisterRules halved{
    {"aten::glu", glu_rule},
    {"aten::glu.out", glu_rule},
    {"aten::glu_backward", glu_backward_rule},
    {"aten::glu_backward.grad_input", glu_backward_rule},
    {"aten::glu_jvp", glu_jvp_rule},
    {"aten::glu_backward_jvp", glu_backward_jvp_rule},
};

} // namespace
} // namespace shardtensor::detail
