#include <algorithm>
#include <numeric>

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/tensor/constant.h"
#include "shardtensor/tensor/known_zeros.h"

namespace shardtensor::detail {
namespace {

/// zeros_like and friends: the layout of the input, which they do not read.
Decision like_rule(Call& call) {
  Decision decision;
  decision.inputs = {call.operand(0).spec};
  decision.outputs = {without_partial(call.operand(0).spec)};
  decision.strides_of = strides_of_elements;
  return decision;
}

/// Of a spectrum, whose few modes a layer writes there: Note [Known zeros].
/// Others are seldom asked, and knowing costs their operators time.
void zeros_like_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  run_rule(op, like_rule, stack);
  const auto& zeros = stack->back().toTensor();
  if (zeros.is_complex()) {
    note_known_zeros(zeros, Box(zeros.dim(), Interval{0, 0}));
  }
}

/// new_zeros(sizes) and friends. The sizes of the input give its layout, others
/// become Replicate.
SpecPtr layout_of_new(const SpecPtr& like, const std::vector<int64_t>& sizes) {
  return like->sizes() == sizes ? without_partial(like)
                                : make_replicated(like->mesh(), sizes);
}

Decision new_rule(Call& call) {
  Decision decision;
  const auto spec =
      layout_of_new(call.operand(0).spec, call.argument("size").toIntVector());
  decision.inputs = {nullptr};
  decision.outputs = {spec};
  decision.arguments.emplace_back(
      call.argument_index("size"), spec->local_sizes());
  return decision;
}

/// Other sizes: a constant, which takes the layout of what is written into it.
/// A compiler keeps no such promise.
void new_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto arguments = stack->end() - static_cast<int64_t>(count);
  const auto layout = spec(arguments[0].toTensor());
  const auto local = impl_of(arguments[0].toTensor())->local();
  auto sizes = arguments[1].toIntVector();
  if (layout->sizes() == sizes || is_traced(local)) {
    run_rule(op, new_rule, stack);
    return;
  }
  arguments[0] = local;
  arguments[1] = std::vector<int64_t>{};
  op.callBoxed(stack);
  auto value = stack->back().toTensor();
  const bool is_empty = op.operator_name().name == "aten::new_empty";
  if (is_empty) {
    value.zero_(); // the same on all ranks
  }
  const bool is_zero = is_empty || op.operator_name().name == "aten::new_zeros";
  stack->back() = constant(value, layout->mesh(), std::move(sizes), is_zero);
}

/// The dims of a dense tensor of these strides, the innermost first.
std::vector<int64_t> order_of(const std::vector<int64_t>& strides) {
  std::vector<int64_t> order(strides.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::ranges::stable_sort(
      order, {}, [&](int64_t dim) { return strides[dim]; });
  return order;
}

at::Tensor new_empty_strided_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  const auto layout_of = layout_of_new(spec(self), size.vec());
  const auto local = impl_of(self)->local().new_empty_strided(
      layout_of->local_sizes(),
      dense_strides(order_of(stride.vec()), layout_of->local_sizes()),
      dtype,
      layout,
      device,
      pin_memory);
  return wrap(local, layout_of, stride);
}

/// Where a tangent lies: as `other` does, behind the dims of a batch.
at::Tensor new_zeros_with_same_feature_meta_kernel(
    const at::Tensor& self,
    const at::Tensor& other,
    int64_t self_num_batch_dims) {
  auto sizes = self.sizes().slice(0, self_num_batch_dims).vec();
  std::vector<int64_t> from(sizes.size(), -1);
  std::vector<int64_t> strides(sizes.size());
  auto step = other.numel();
  for (auto dim = self_num_batch_dims - 1; dim >= 0; --dim) {
    strides[dim] = step;
    step *= sizes[dim];
  }
  for (int64_t dim = 0; dim < other.dim(); ++dim) {
    sizes.push_back(other.size(dim));
    strides.push_back(other.stride(dim));
    from.push_back(dim);
  }
  const auto layout = with_dims(without_partial(spec(other)), sizes, from);
  const auto zeros =
      at::zeros(layout->local_sizes(), impl_of(self)->local().options());
  const auto result = wrap(zeros, layout, strides);
  impl_of(result)->set_storage_offset(other.storage_offset());
  return result;
}

const RegisterRules factories{
    {"aten::ones_like", like_rule},
    {"aten::empty_like", like_rule},
    {"aten::full_like", like_rule},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const char* name : {"new_zeros", "new_ones", "new_empty", "new_full"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&new_kernel>());
  }
  m.impl(
      "zeros_like",
      torch::CppFunction::makeFromBoxedFunction<&zeros_like_kernel>());
  m.impl("new_empty_strided", new_empty_strided_kernel);
  m.impl(
      "_new_zeros_with_same_feature_meta",
      new_zeros_with_same_feature_meta_kernel);
}

} // namespace shardtensor::detail
