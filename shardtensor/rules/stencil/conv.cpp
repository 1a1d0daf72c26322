// Convolutions at the function level: gather the input rows that the owned
// outputs read, call the plain operator on them (halo/stencil.h); without
// joining them to the owned rows where that is possible (conv_overlap.h).
#include <algorithm>
#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_convolution_ops.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/conv_transpose3d.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/stencil/conv_overlap.h"
#include "shardtensor/rules/stencil/lone_column.h"
#include "shardtensor/rules/stencil/overlap_bytes.h"
#include "shardtensor/rules/stencil/run_stencil.h"
#include "shardtensor/rules/stencil/volume_conv.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;

/// The parameters of any convolution over `dims` dims, as the user gave them.
struct Conv {
  const char* op;
  size_t dims;
  bool transposed;
  IntArrayRef stride;
  IntArrayRef padding;
  IntArrayRef dilation;
  int64_t groups;
  IntArrayRef output_padding = {};
  std::optional<bool> same = {}; // padding="same" (true) or "valid" (false)
};

/// By sizes, or by name ("same", "valid").
template <class Padding>
Tensor plain_conv(
    const Conv& c,
    const Tensor& x,
    const Tensor& w,
    const Tensor& b,
    const Padding& padding) {
  switch (c.dims) {
    case 1:
      return at::conv1d(x, w, b, c.stride, padding, c.dilation, c.groups);
    case 2:
      return at::conv2d(x, w, b, c.stride, padding, c.dilation, c.groups);
    default:
      return at::conv3d(x, w, b, c.stride, padding, c.dilation, c.groups);
  }
}

Tensor plain_conv(
    const Conv& c,
    const Tensor& x,
    const Tensor& w,
    const Tensor& b,
    IntArrayRef padding,
    IntArrayRef output_padding) {
  if (!c.transposed) {
    return plain_conv(c, x, w, b, padding);
  }
  switch (c.dims) {
    case 1:
      return at::conv_transpose1d(
          x, w, b, c.stride, padding, output_padding, c.groups, c.dilation);
    case 2:
      return at::conv_transpose2d(
          x, w, b, c.stride, padding, output_padding, c.groups, c.dilation);
    default:
      return at::conv_transpose3d(
          x, w, b, c.stride, padding, output_padding, c.groups, c.dilation);
  }
}

Tensor call_plain(
    const Conv& c,
    const Tensor& x,
    const Tensor& w,
    const Tensor& b) {
  if (c.same) {
    return plain_conv(c, x, w, b, c10::string_view(*c.same ? "same" : "valid"));
  }
  return plain_conv(c, x, w, b, c.padding, c.output_padding);
}

std::vector<int64_t> output_sizes(
    const Conv& conv,
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(x.device());
  const auto w = at::empty(weight.sizes(), options);
  const auto b = bias.defined() ? at::empty(bias.sizes(), options) : Tensor();
  return infer_sizes(
      conv.op, x, static_cast<int64_t>(conv.dims), [&](const Tensor& empty) {
        return call_plain(conv, empty, w, b);
      });
}

/// A rank without outputs would take them.
void check_has_outputs(const Conv& conv, const Tensor& x, IntArrayRef sizes) {
  const auto outputs = sizes.slice(sizes.size() - conv.dims);
  const bool too_small =
      std::ranges::any_of(outputs, [](int64_t size) { return size == 0; });
  // PyTorch's kernels of these types give an empty result.
  const bool takes_none = c10::isReducedFloatingType(x.scalar_type());
  TORCH_CHECK(
      !too_small || takes_none || x.numel() == 0,
      conv.op,
      ": expected an output with rows in each dim, got ",
      outputs,
      " of an input of ",
      x.sizes());
}

struct ConvPlan {
  StencilCall call;
  std::vector<int64_t> padding; // of the local call
  std::vector<int64_t> output_padding;
  std::vector<int64_t> weight_axes; // mesh axes whose ranks share the weight
  std::shared_ptr<const ConvOverlap> overlap; // null: the rows must be joined
};

/// Which PyTorch asks of pieces that have outputs, along the dims that they
/// keep.
void check_output_padding(
    const Conv& conv,
    IntArrayRef stride,
    IntArrayRef dilation) {
  const auto padding = expanded(conv.output_padding, conv.dims);
  for (size_t i = 0; i < conv.dims; ++i) {
    TORCH_CHECK(
        padding[i] < stride[i] || padding[i] < dilation[i],
        conv.op,
        ": output padding must be smaller than either stride or dilation, but "
        "got output_padding ",
        IntArrayRef(padding),
        ", stride ",
        stride,
        ", dilation ",
        dilation);
  }
}

ConvPlan plan_conv(
    const Conv& conv,
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias) {
  const auto sizes = output_sizes(conv, x, weight, bias);
  const size_t n = conv.dims;
  const auto first = x.dim() - static_cast<int64_t>(n);
  const auto stride = expanded(conv.stride, n);
  const auto dilation = expanded(conv.dilation, n);
  if (conv.transposed) {
    check_output_padding(conv, stride, dilation);
    check_has_outputs(conv, x, sizes);
  }
  auto padding =
      conv.same ? std::vector<int64_t>(n, 0) : expanded(conv.padding, n);
  std::vector<bool> uneven(n, false);
  std::vector<Stencil> stencils;
  for (size_t i = 0; i < n; ++i) {
    const auto dim = static_cast<int64_t>(i);
    Window w{weight.size(dim + 2), stride[i], padding[i], dilation[i]};
    if (conv.same.value_or(false)) {
      w.padding = padding[i] = (w.span() - 1) / 2;
      uneven[i] = (w.span() - 1) % 2 != 0;
    }
    const int64_t in = x.size(first + dim);
    const int64_t out = sizes[first + dim];
    stencils.push_back(
        conv.transposed ? Stencil::conv_transpose(w, in, out)
                        : Stencil::conv(w, in, out));
  }
  ConvPlan plan{
      plan_stencil_call(spec(x), {first - 1}, stencils, padding, sizes, uneven),
      padding,
      conv.transposed ? expanded(conv.output_padding, n)
                      : std::vector<int64_t>(n, 0),
      {},
      nullptr};
  for (size_t i = 0; i < n; ++i) {
    if (plan.call.is_cut[i]) {
      plan.padding[i] = plan.call.pieces[i].padding;
      plan.output_padding[i] = 0;
    }
  }
  plan.weight_axes = plan.call.input->sharded_axes();
  if (plan.call.gathers && first == 2) {
    plan.overlap = plan_conv_overlap(
        plan.call,
        x.suggest_memory_format(),
        stencils,
        plan.padding,
        stride,
        dilation,
        conv.groups);
  }
  return plan;
}

std::shared_ptr<const ConvPlan> find_plan(
    const Conv& conv,
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias) {
  static PlanCache<ConvPlan> plans;
  PlanKey key;
  key.add(spec(x))
      .add(static_cast<int64_t>(conv.dims))
      .add(static_cast<int64_t>(conv.transposed))
      .add(conv.same ? static_cast<int64_t>(*conv.same) : int64_t{-1})
      .add(static_cast<int64_t>(x.scalar_type()))
      .add(static_cast<int64_t>(x.device().type()))
      .add(static_cast<int64_t>(x.suggest_memory_format()))
      .add(conv.groups)
      .add(weight.sizes())
      .add(bias.defined() ? bias.sizes() : IntArrayRef{})
      .add(conv.stride)
      .add(conv.padding)
      .add(conv.dilation)
      .add(conv.output_padding);
  return plans.find(key, [&] { return plan_conv(conv, x, weight, bias); });
}

// Note [When convolutions overlap]
// Rows that are joined cost four copies of the input in a step, and are waited
// for; rows that are kept apart cost some thirty calls more. On a device calls
// count until the input is large: kDeviceBytes is an estimate, four copies at 3
// TB/s against thirty calls of a few us, of which computation hides a part. On
// CPUs copies cost more, but not with few numbers in half precision, which
// oneDNN brings to other formats and back for each call, and not with volumes,
// where its kernels for the weight's gradient are up to five times slower if
// the dim is padded. `make bench ARGS=overlap` measures it.

constexpr int64_t kDeviceBytes = 32 << 20;
constexpr int64_t kHalfOnHostBytes = 2 << 20;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

int64_t default_overlap_bytes(const Tensor& local, at::ScalarType dtype) {
  if (!local.is_cpu()) {
    return kDeviceBytes;
  }
  if (local.dim() == 5) {
    return kNever;
  }
  return at::isReducedFloatingType(dtype) ? kHalfOnHostBytes : 0;
}

/// Of the input on one rank, on average: the same on all ranks.
int64_t mean_bytes(const ShardSpec& input, at::ScalarType dtype) {
  int64_t pieces = 1;
  for (const int64_t axis : input.sharded_axes()) {
    pieces *= input.mesh()->ranks(axis);
  }
  return input.numel() / pieces * static_cast<int64_t>(c10::elementSize(dtype));
}

bool overlaps(
    const ConvPlan& plan,
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias) {
  const auto& local = impl_of(x)->local();
  if (!plan.overlap || local.is_meta() || !local.is_floating_point() ||
      has_tangent({x, weight, bias})) {
    return false;
  }
  const auto dtype = autocast_lower_precision(local);
  return mean_bytes(*plan.call.input, dtype) >=
      conv_overlap_bytes().value_or(default_overlap_bytes(local, dtype));
}

Tensor local_conv(
    const Conv& conv,
    const ConvPlan& plan,
    const Tensor& rows,
    const Tensor& weight,
    const Tensor& bias) {
  if (!conv.transposed && suits_volume_conv(rows, weight, bias)) {
    return volume_conv(
        rows,
        weight,
        bias,
        expanded(conv.stride, 3),
        plan.padding,
        expanded(conv.dilation, 3),
        conv.groups);
  }
  const auto convolve = [&](const Tensor& given) {
    return plain_conv(
        conv, given, weight, bias, plan.padding, plan.output_padding);
  };
  if (!may_leave_columns(rows)) {
    return convolve(rows);
  }
  const Window last{
      weight.size(-1),
      expanded(conv.stride, conv.dims).back(),
      plan.padding.back(),
      expanded(conv.dilation, conv.dims).back()};
  return convolve_columns(rows, last, conv.transposed, convolve);
}

/// Channels-last if one of them is, but for volumes that oneDNN leaves to ATen,
/// and for doubles on devices, which cuDNN takes row-major.
at::MemoryFormat result_format(const Tensor& x, const Tensor& weight) {
  const auto type = x.scalar_type();
  if (x.is_cpu() ? weight.dim() == 5 && type != at::kFloat
                 : type == at::kDouble) {
    return at::MemoryFormat::Contiguous;
  }
  const auto format = x.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous && weight.dim() == x.dim()
      ? weight.suggest_memory_format()
      : format;
}

Tensor convolve(
    const Conv& conv,
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& maybe_bias) {
  const Tensor bias = value_or_undefined(maybe_bias);
  const auto mesh = common_mesh(conv.op, {input, weight, bias});
  check_promotions({weight, bias}, conv.op);
  const Tensor x = promote_operand(input, mesh, conv.op);
  const auto plan = find_plan(conv, x, weight, bias);
  const auto& call = plan->call;
  const auto weights = shared_weights({weight, bias}, mesh, plan->weight_axes);
  const auto format = result_format(x, weight);
  if (overlaps(*plan, x, weight, bias)) {
    const auto cast = autocast_to_lower_precision;
    return from_local(
        conv_overlap(
            cast(to_local(redistribute(x, call.input))),
            cast(weights[0]),
            cast(weights[1]),
            plan->overlap),
        call.output,
        format);
  }
  return run_stencil(
      x,
      call,
      format,
      [&](const Tensor& rows) {
        return local_conv(conv, *plan, rows, weights[0], weights[1]);
      },
      autocast_to_lower_precision); // half the bytes travel
}

// ---- the operators ----------------------------------------------------------

bool is_same(const char* op, c10::string_view padding) {
  TORCH_CHECK(
      padding == "same" || padding == "valid",
      op,
      ": expected padding 'same', 'valid' or integers, got '",
      padding,
      "'");
  return padding == "same";
}

template <class Op, size_t dims>
Tensor conv_function(
    const Tensor& x,
    const Tensor& w,
    const std::optional<Tensor>& b,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    int64_t groups) {
  return convolve(
      {Op::name, dims, false, stride, padding, dilation, groups}, x, w, b);
}

template <class Op, size_t dims>
Tensor conv_by_name_function(
    const Tensor& x,
    const Tensor& w,
    const std::optional<Tensor>& b,
    IntArrayRef stride,
    c10::string_view padding,
    IntArrayRef dilation,
    int64_t groups) {
  const bool same = is_same(Op::name, padding);
  return convolve(
      {Op::name, dims, false, stride, {}, dilation, groups, {}, same}, x, w, b);
}

template <class Op, size_t dims>
Tensor conv_transpose_function(
    const Tensor& x,
    const Tensor& w,
    const std::optional<Tensor>& b,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef output_padding,
    int64_t groups,
    IntArrayRef dilation) {
  return convolve(
      {Op::name, dims, true, stride, padding, dilation, groups, output_padding},
      x,
      w,
      b);
}

/// The switches are those of _convolution.
template <class Op, class... Switches>
Tensor convolution_function(
    const Tensor& x,
    const Tensor& w,
    const std::optional<Tensor>& b,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    Switches...) {
  const int64_t dims = w.dim() - 2;
  TORCH_CHECK(
      dims >= 1 && dims <= 3,
      Op::name,
      ": expected a weight of 3 to 5 dims, got sizes ",
      w.sizes());
  return convolve(
      {Op::name,
       static_cast<size_t>(dims),
       transposed,
       stride,
       padding,
       dilation,
       groups,
       output_padding},
      x,
      w,
      b);
}

namespace ops = at::_ops;

template <class Op, size_t dims>
constexpr auto conv = function_rule<Op, conv_function<Op, dims>>;
template <class Op, size_t dims>
constexpr auto conv_by_name =
    function_rule<Op, conv_by_name_function<Op, dims>>;
template <class Op, size_t dims>
constexpr auto conv_transpose =
    function_rule<Op, conv_transpose_function<Op, dims>>;
template <class Op, class... Switches>
constexpr auto convolution =
    function_rule<Op, convolution_function<Op, Switches...>>;

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("conv1d", conv<ops::conv1d, 1>);
  m.impl("conv2d", conv<ops::conv2d, 2>);
  m.impl("conv3d", conv<ops::conv3d, 3>);
  m.impl("conv1d.padding", conv_by_name<ops::conv1d_padding, 1>);
  m.impl("conv2d.padding", conv_by_name<ops::conv2d_padding, 2>);
  m.impl("conv3d.padding", conv_by_name<ops::conv3d_padding, 3>);
  m.impl("conv_transpose1d", conv_transpose<ops::conv_transpose1d, 1>);
  m.impl(
      "conv_transpose2d.input", conv_transpose<ops::conv_transpose2d_input, 2>);
  m.impl(
      "conv_transpose3d.input", conv_transpose<ops::conv_transpose3d_input, 3>);
  m.impl("convolution", convolution<ops::convolution>);
  m.impl(
      "_convolution", convolution<ops::_convolution, bool, bool, bool, bool>);
}

} // namespace shardtensor::detail
