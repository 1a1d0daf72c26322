#include <algorithm>

#include <ATen/WrapDimUtils.h>
#include <ATen/core/List.h>
#include <ATen/ops/add.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/dist_native.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/native_channel_shuffle_native.h>
#include <ATen/ops/one_hot_ops.h>
#include <ATen/ops/rot90_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/layout/global_rows.h"
#include "shardtensor/tensor/keys.h"

// Operators that PyTorch makes of others, but not visibly to the dispatcher.
// What they are made of has rules.

namespace shardtensor::detail {
namespace {

/// aten::view_copy is a copy of what aten::view gives, and so on.
c10::OperatorHandle viewed_operator(const c10::OperatorName& copied) {
  const auto suffix = copied.name.rfind("_copy");
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      copied.name.substr(0, suffix).c_str(), copied.overload_name.c_str());
}

at::Tensor copy_of(const at::Tensor& view) {
  return view.clone(at::MemoryFormat::Contiguous);
}

void view_copy_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  viewed_operator(op.operator_name()).callBoxed(stack);
  auto& result = stack->back();
  if (result.isTensor()) {
    result = copy_of(result.toTensor());
    return;
  }
  c10::List<at::Tensor> copies;
  for (const at::Tensor& view : result.toTensorVector()) {
    copies.push_back(copy_of(view));
  }
  result = std::move(copies);
}

constexpr const char* kViewCopies[] = {
    "alias_copy",
    "detach_copy",
    "diagonal_copy",
    "expand_copy",
    "narrow_copy",
    "permute_copy",
    "select_copy.int",
    "slice_copy.Tensor",
    "split_copy.Tensor",
    "split_with_sizes_copy",
    "squeeze_copy",
    "squeeze_copy.dim",
    "squeeze_copy.dims",
    "t_copy",
    "transpose_copy.int",
    "unbind_copy.int",
    "unfold_copy",
    "unsqueeze_copy",
    "view_copy",
    "view_copy.dtype",
    "view_as_complex_copy",
    "view_as_real_copy",
};

/// Which elements of square matrices are on a diagonal, where the rows of these
/// are cut as the last dim of `rows`.
at::Tensor diagonal_mask(const at::Tensor& rows, int64_t offset) {
  const auto options = impl_of(rows)->local().options().dtype(at::kLong);
  const auto layout = without_partial(spec(rows));
  const auto last = layout->dim() - 1;
  const auto extent = layout->size(last);
  const auto own = own_rows(*layout, last, options).unsqueeze(-1);
  return wrap(
      own.add(offset).eq(at::arange(extent, options)),
      with_dims(layout, {extent, extent}, {last, -1}));
}

/// Row i of a result has the element i of the vector that is cut as the rows
/// are.
at::Tensor diag_embed_kernel(
    const at::Tensor& self,
    int64_t offset,
    int64_t dim1,
    int64_t dim2) {
  const auto dims = self.dim() + 1;
  const auto row = at::maybe_wrap_dim(dim1, dims);
  const auto column = at::maybe_wrap_dim(dim2, dims);
  TORCH_CHECK(
      row != column,
      "diagonal dimensions cannot be identical ",
      dim1,
      ", ",
      dim2);
  const auto rows = offset == 0
      ? self
      : at::constant_pad_nd(
            self,
            {std::max<int64_t>(-offset, 0), std::max<int64_t>(offset, 0)});
  const auto zero = at::zeros({}, impl_of(self)->local().options());
  return at::where(diagonal_mask(rows, offset), rows.unsqueeze(-1), zero)
      .movedim(at::IntArrayRef{-2, -1}, at::IntArrayRef{row, column})
      .contiguous();
}

void check_channel_groups(const at::Tensor& self, int64_t groups) {
  TORCH_CHECK(
      self.dim() > 2,
      "channel_shuffle: expected more than 2 dims, got sizes ",
      self.sizes());
  TORCH_CHECK(
      groups > 0 && self.size(1) % groups == 0,
      "channel_shuffle: expected groups of equal size, got ",
      groups,
      " groups of ",
      self.size(1),
      " channels");
}

/// PyTorch's composite one takes views, whatever the strides, and drops the
/// memory format that its kernels keep.
at::Tensor channel_shuffle_kernel(const at::Tensor& self, int64_t groups) {
  const auto format = self.suggest_memory_format();
  if (self.numel() == 0) { // no -1 can be inferred from it
    check_channel_groups(self, groups);
    return self.clone();
  }
  return at::native::math_channel_shuffle(self.contiguous(format), groups)
      .contiguous(format);
}

/// PyTorch's own fills a plain tensor that it makes. Communication: two
/// reductions of the classes, which are checked as on one device.
at::Tensor one_hot_function(const at::Tensor& classes, int64_t count) {
  TORCH_CHECK(
      classes.scalar_type() == at::kLong,
      "one_hot is only applicable to index tensor of type LongTensor.");
  if (classes.numel() == 0) {
    TORCH_CHECK(
        count > 0, "Can not infer total number of classes from empty tensor.");
  } else if (!has_no_values(impl_of(classes)->local())) {
    const auto [lowest, highest] = at::aminmax(classes);
    TORCH_CHECK(
        lowest.item<int64_t>() >= 0, "Class values must be non-negative.");
    const auto last = highest.item<int64_t>();
    TORCH_CHECK(
        count == -1 || count > last,
        "Class values must be smaller than num_classes.");
    count = count == -1 ? last + 1 : count;
  }
  TORCH_CHECK(
      count >= 0, "one_hot: a compiled function needs num_classes, got -1");
  const auto each = at::arange(count, impl_of(classes)->local().options());
  return at::eq(classes.unsqueeze(-1), each).to(at::kLong);
}

/// Numbers that the host reads, on every rank. Communication: that of
/// full_tensor for a ShardTensor.
std::vector<int64_t> lengths_on_host(const at::Tensor& given) {
  TORCH_CHECK(
      at::isIntegralType(given.scalar_type(), /*includeBool=*/false),
      "ctc_loss: expected lengths of integers, got ",
      given.scalar_type());
  return host_numbers(is_shard_tensor(given) ? full_tensor(given) : given);
}

/// PyTorch's own reads the memory of the lengths.
at::Tensor ctc_loss_function(
    const at::Tensor& log_probs,
    const at::Tensor& targets,
    const at::Tensor& input_lengths,
    const at::Tensor& target_lengths,
    int64_t blank,
    int64_t reduction,
    bool zero_infinity) {
  return at::ctc_loss(
      log_probs,
      targets,
      lengths_on_host(input_lengths),
      lengths_on_host(target_lengths),
      blank,
      reduction,
      zero_infinity);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "ctc_loss.Tensor",
      function_rule<at::_ops::ctc_loss_Tensor, ctc_loss_function>);
  m.impl("one_hot", function_rule<at::_ops::one_hot, one_hot_function>);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const char* name : kViewCopies) {
    m.impl(
        name, torch::CppFunction::makeFromBoxedFunction<&view_copy_kernel>());
  }
  m.impl("channel_shuffle", channel_shuffle_kernel);
  m.impl("native_channel_shuffle", channel_shuffle_kernel);
  m.impl("diag_embed", diag_embed_kernel);
  m.impl("dist", at::native::dist);
  m.impl("rot90", at::native::rot90);
}

} // namespace shardtensor::detail
