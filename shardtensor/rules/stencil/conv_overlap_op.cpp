#include "shardtensor/rules/stencil/conv_overlap_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include "shardtensor/comm/own_operator.h"
#include "shardtensor/rules/stencil/lone_column.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

// ---- local convolutions -----------------------------------------------------

std::vector<int64_t> zeros(const OverlapWork& work) {
  return std::vector<int64_t>(work.stride.size(), 0);
}

/// Of the output and of the gradients, as PyTorch chooses it.
at::MemoryFormat format_of(const Tensor& x, const Tensor& weight) {
  const auto format = x.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? weight.suggest_memory_format()
                                                : format;
}

/// The rows of an edge are all there.
std::vector<int64_t> edge_padding(const OverlapWork& work) {
  auto padding = work.padding;
  padding[work.slab.dim - 2] = 0;
  return padding;
}

Tensor convolve_rows(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    at::IntArrayRef padding,
    const OverlapWork& work) {
  const auto convolve = [&](const Tensor& given) {
    return at::convolution(
        given,
        weight,
        bias,
        work.stride,
        padding,
        work.dilation,
        false,
        zeros(work),
        work.groups);
  };
  const Window last{
      weight.size(-1),
      work.stride.back(),
      padding.back(),
      work.dilation.back()};
  return convolve_columns(x, last, /*transposed=*/false, convolve);
}

using Gradients = OverlapGradients;
using Wanted = std::array<bool, 3>;

/// All rows of an edge, with zeros in the place of the owned ones.
Tensor edge_rows_of_others(
    const Tensor& rows,
    const Slab::Edge& edge,
    const Slab& slab) {
  std::vector<int64_t> pad(2 * (rows.dim() - slab.dim), 0);
  pad[pad.size() - (edge.before ? 1 : 2)] = edge.owned.extent();
  return at::constant_pad_nd(along(rows, edge.slab, slab), pad);
}

OverlapOutput compute(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const OverlapWork& work) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  OverlapOutput result;
  result.slab = exchange_during(x, work.slab.bring, [&] {
    result.output = convolve_rows(x, weight, bias, work.padding, work);
  });
  for (const auto& edge : work.slab.edges) {
    const auto rows = edge_rows(x, result.slab, edge, work.slab);
    along(result.output, edge.outputs, work.slab)
        .copy_(convolve_rows(rows, weight, bias, edge_padding(work), work));
  }
  return result;
}

// ---- gradients --------------------------------------------------------------

/// What the slab contributes: its own gradient, and weight's. A tap of the
/// window reads rows before its output's middle, or after it; so each element
/// of weight's gradient has two terms at most that are not zero, those of owned
/// rows and of one edge. Their sum in half precision is the one in fp32,
/// rounded.
Gradients slab_gradients(
    const Tensor& grad,
    const Tensor& slab,
    const Tensor& weight,
    const Wanted& wanted,
    const OverlapWork& work) {
  std::vector<Tensor> of_edges;
  Gradients result;
  for (const auto& edge : work.slab.edges) {
    const auto part = convolution_gradients(
        along(grad, edge.outputs, work.slab),
        edge_rows_of_others(slab, edge, work.slab),
        weight,
        edge_padding(work),
        {wanted[0], wanted[1], false},
        work);
    of_edges.push_back(part.x);
    if (wanted[1]) {
      result.weight =
          result.weight.defined() ? result.weight + part.weight : part.weight;
    }
  }
  if (wanted[0]) {
    result.x = slab_gradient(of_edges, slab, work.slab);
  }
  return result;
}

Gradients compute_backward(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& slab,
    const Tensor& weight,
    const Wanted& wanted,
    const OverlapWork& work) {
  const auto of_slab = slab_gradients(grad, slab, weight, wanted, work);
  Gradients result;
  const auto of_owned = [&] {
    result = convolution_gradients(grad, x, weight, work.padding, wanted, work);
  };
  if (wanted[0]) {
    RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
    Tensor dx;
    exchange_onto(dx, of_slab.x, work.slab.bring_back, [&] {
      of_owned();
      dx = result.x;
    });
    result.x = dx;
  } else {
    of_owned();
  }
  if (of_slab.weight.defined()) {
    result.weight = result.weight + of_slab.weight;
  }
  return result;
}

// ---- as operators of a graph ------------------------------------------------

using Numbers = std::vector<int64_t>;

/// All but the exchanges, as the integers that an operator takes.
Numbers encode(const OverlapWork& work) {
  const auto& slab = work.slab;
  Numbers code{work.groups, slab.dim, static_cast<int64_t>(work.stride.size())};
  for (const auto* list : {&work.stride, &work.dilation, &work.padding}) {
    code.insert(code.end(), list->begin(), list->end());
  }
  for (const auto& edge : slab.edges) {
    code.push_back(edge.before);
    for (const auto& rows : {edge.slab, edge.owned, edge.outputs}) {
      code.insert(code.end(), {rows.begin, rows.end});
    }
  }
  return code;
}

OverlapWork decode(c10::IntArrayRef code) {
  const auto* next = code.begin();
  const auto list = [&](int64_t count) {
    next += count;
    return Numbers(next - count, next);
  };
  const auto interval = [&] {
    next += 2;
    return Interval{next[-2], next[-1]};
  };
  OverlapWork work;
  work.groups = *next++;
  work.slab.dim = *next++;
  const int64_t dims = *next++;
  work.stride = list(dims);
  work.dilation = list(dims);
  work.padding = list(dims);
  while (next != code.end()) {
    const bool before = *next++ != 0;
    work.slab.edges.push_back({before, interval(), interval(), interval()});
  }
  return work;
}

using Optional = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

Tensors forward_kernel(
    const Tensor& x,
    const Tensor& weight,
    const Optional& bias,
    c10::IntArrayRef code,
    c10::IntArrayRef bring_slab,
    std::string group) {
  auto work = decode(code);
  work.slab.bring = {bring_slab.vec(), std::move(group)};
  const auto result = compute(x, weight, bias.value_or(Tensor()), work);
  return {result.output.contiguous(format_of(x, weight)), result.slab};
}

Tensors forward_meta(
    const Tensor& x,
    const Tensor& weight,
    const Optional&,
    c10::IntArrayRef code,
    c10::IntArrayRef bring_slab,
    std::string group) {
  const auto work = decode(code);
  const auto sizes = at::native::conv_output_size(
      x.sizes(), weight.sizes(), work.padding, work.stride, work.dilation);
  return {
      at::empty(sizes, x.options().memory_format(format_of(x, weight))),
      exchange(x, {bring_slab.vec(), std::move(group)})};
}

Tensors backward_kernel(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& slab,
    const Tensor& weight,
    std::array<bool, 3> wanted,
    c10::IntArrayRef code,
    c10::IntArrayRef return_slab,
    std::string group) {
  auto work = decode(code);
  work.slab.bring_back = {return_slab.vec(), std::move(group)};
  const auto all = compute_backward(grad, x, slab, weight, wanted, work);
  Tensors results;
  if (wanted[0]) {
    results.push_back(all.x.contiguous(format_of(x, weight)));
  }
  if (wanted[1]) {
    results.push_back(all.weight.contiguous(format_of(x, weight)));
  }
  if (wanted[2]) {
    results.push_back(all.bias);
  }
  return results;
}

Tensors backward_meta(
    const Tensor& grad,
    const Tensor& x,
    const Tensor&,
    const Tensor& weight,
    std::array<bool, 3> wanted,
    c10::IntArrayRef,
    c10::IntArrayRef,
    std::string) {
  const auto format = format_of(x, weight);
  Tensors results;
  if (wanted[0]) {
    results.push_back(at::empty_like(x, format));
  }
  if (wanted[1]) {
    results.push_back(at::empty_like(weight, format));
  }
  if (wanted[2]) {
    results.push_back(at::empty({grad.size(1)}, grad.options()));
  }
  return results;
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("conv_overlap", forward_kernel);
  m.impl("conv_overlap_backward", backward_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("conv_overlap", forward_meta);
  m.impl("conv_overlap_backward", backward_meta);
}

} // namespace

OverlapGradients convolution_gradients(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    at::IntArrayRef padding,
    const Wanted& wanted,
    const OverlapWork& work) {
  const int64_t stride = work.stride.back();
  if (is_lone_column(x, grad.size(-1), stride)) {
    auto result = convolution_gradients(
        with_zero_columns(grad, 1),
        with_zero_columns(x, stride),
        weight,
        padding,
        wanted,
        work);
    if (wanted[0]) {
      result.x = result.x.narrow(-1, 0, x.size(-1));
    }
    return result;
  }
  const std::vector<int64_t> bias_sizes{weight.size(0)};
  auto [dx, dweight, dbias] = at::convolution_backward(
      grad,
      x,
      weight,
      at::OptionalIntArrayRef(bias_sizes),
      work.stride,
      padding,
      work.dilation,
      false,
      zeros(work),
      work.groups,
      wanted);
  return {dx, dweight, dbias};
}

OverlapOutput convolve_overlapped(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const OverlapWork& work) {
  if (!is_traced(x)) {
    return compute(x, weight, bias, work);
  }
  static const auto op =
      find_own_operator<decltype(forward_kernel)>("shardtensor::conv_overlap");
  const auto& [code, group] = work.slab.bring;
  const auto result = op.call(
      x,
      weight,
      bias.defined() ? Optional(bias) : std::nullopt,
      encode(work),
      code,
      group);
  return {result[0], result[1]};
}

OverlapGradients convolve_overlapped_backward(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& slab,
    const Tensor& weight,
    const Wanted& wanted,
    const OverlapWork& work) {
  if (!is_traced(grad)) {
    return compute_backward(grad, x, slab, weight, wanted, work);
  }
  static const auto op = find_own_operator<decltype(backward_kernel)>(
      "shardtensor::conv_overlap_backward");
  const auto& [code, group] = work.slab.bring_back;
  auto results =
      op.call(grad, x, slab, weight, wanted, encode(work), code, group);
  auto next = results.begin();
  const auto take = [&](bool is_wanted) {
    return is_wanted ? *next++ : Tensor();
  };
  OverlapGradients gradients;
  gradients.x = take(wanted[0]);
  gradients.weight = take(wanted[1]);
  gradients.bias = take(wanted[2]);
  return gradients;
}

} // namespace shardtensor::detail
