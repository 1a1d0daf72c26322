#include <numeric>
#include <optional>
#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/add.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/stft.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/unfold.h>
#include <ATen/ops/unfold_backward.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/exchange.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/promotion.h"
#include "shardtensor/halo/stencil_call.h"
#include "shardtensor/layout/plan_cache.h"
#include "shardtensor/tensor/parameter_gradients.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

// Frames of signals that are cut along time. A frame belongs to the rank that
// holds the middle of its window; ranks send each other the rows that windows
// share, there for stft and unfold and, summed, back for istft.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

// ---- a signal to its frames -------------------------------------------------

/// What stft was asked for.
struct Frames {
  int64_t length; // of one frame
  int64_t step;
  int64_t window;
};

Frames frames_of(
    int64_t n_fft,
    std::optional<int64_t> hop_length,
    std::optional<int64_t> win_length) {
  return {n_fft, hop_length.value_or(n_fft / 4), win_length.value_or(n_fft)};
}

/// What this file leaves to PyTorch's own kernel: bad arguments, which it
/// refuses, and signals that are whole.
bool frames_are_cut(
    const Tensor& self,
    const Frames& frames,
    const std::optional<Tensor>& window) {
  return is_shard_tensor(self) && (self.dim() == 1 || self.dim() == 2) &&
      (self.is_floating_point() || self.is_complex()) &&
      spec(self)->is_sharded(self.dim() - 1) && frames.length > 0 &&
      frames.length <= self.size(-1) && frames.step > 0 && frames.window > 0 &&
      frames.window <= frames.length &&
      (!window || !window->defined() ||
       (window->dim() == 1 && window->size(0) == frames.window));
}

/// As stft does it.
Tensor padded(const Tensor& self, int64_t width, c10::string_view mode) {
  const auto batched = self.dim() == 1 ? self.view({1, 1, -1})
                                       : self.view({1, self.size(0), -1});
  const auto wide = at::pad(batched, {width, width}, mode);
  return self.dim() == 1 ? wide.view({-1}) : wide.view({self.size(0), -1});
}

std::shared_ptr<const StencilCall> plan_frames(
    const SpecPtr& spec,
    const Frames& frames) {
  static PlanCache<StencilCall> plans;
  PlanKey key;
  key.add(spec).add(frames.length).add(frames.step);
  return plans.find(key, [&] {
    auto sizes = spec->sizes();
    const auto extent = sizes.back();
    sizes.back() = (extent - frames.length) / frames.step + 1;
    const auto stencil = Stencil::conv(
        {frames.length, frames.step, /*padding=*/0}, extent, sizes.back());
    return plan_stencil_call(spec, {}, {stencil}, {0}, sizes);
  });
}

/// Local spectra, (samples, frequencies, frames) or more, as `call` has them.
Tensor wrapped(const Tensor& local, const StencilCall& call) {
  const auto time = call.output->dim(); // frequencies come before it
  auto kept = local.narrow(time, 0, call.pieces.back().outputs);
  auto sizes = local.sizes().vec();
  Dims from(sizes.size(), -1);
  from[time] = time - 1;
  sizes[time] = call.output->size(time - 1);
  if (time == 2) {
    from[0] = 0;
    sizes[0] = call.output->size(0);
    kept = kept.narrow(0, 0, call.output->local_sizes()[0]);
  }
  return from_local(kept, with_dims(call.output, std::move(sizes), from));
}

Tensor stft_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    int64_t n_fft,
    std::optional<int64_t> hop_length,
    std::optional<int64_t> win_length,
    const std::optional<Tensor>& window,
    bool center,
    c10::string_view pad_mode,
    bool normalized,
    std::optional<bool> onesided,
    std::optional<bool> return_complex,
    std::optional<bool> align_to_window) {
  const auto frames = frames_of(n_fft, hop_length, win_length);
  if (align_to_window.has_value() || !frames_are_cut(self, frames, window)) {
    return without_rule<at::_ops::stft_center>(
        keys,
        self,
        n_fft,
        hop_length,
        win_length,
        window,
        center,
        pad_mode,
        normalized,
        onesided,
        return_complex,
        align_to_window);
  }
  check_promotions({value_or_undefined(window)}, "aten::stft");
  const auto signal = center ? padded(self, n_fft / 2, pad_mode) : self;
  const auto call = plan_frames(spec(signal), frames);
  const auto weights = shared_weights(
      {window.value_or(Tensor())},
      call->input->mesh(),
      call->input->sharded_axes());
  const auto rows =
      gather_rows(to_local(redistribute(signal, call->input)), *call);
  const auto spectra = at::stft(
      rows,
      n_fft,
      frames.step,
      frames.window,
      weights[0].defined() ? std::optional(weights[0]) : std::nullopt,
      /*center=*/false,
      pad_mode,
      normalized,
      onesided,
      return_complex);
  return wrapped(spectra, *call);
}

/// Windows that overlap, in a new last dim: a copy, for the rows that pieces
/// share lie in no rank's memory. Others are views (windows.cpp).
Tensor unfold_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    int64_t dimension,
    int64_t size,
    int64_t step) {
  const auto dims = self.dim();
  const auto dim = at::maybe_wrap_dim(dimension, dims);
  const bool overlap = dims > 0 && step > 0 && size > step &&
      size <= self.size(dim) && spec(self)->is_sharded(dim) &&
      spec(self)->mesh()->contains_this_rank();
  if (!overlap) {
    return at::_ops::unfold::redispatch(
        below_function_level(keys), self, dim, size, step);
  }
  const auto last = self.movedim(dim, -1);
  const auto call = plan_frames(spec(last), {size, step, size});
  const auto rows =
      gather_rows(to_local(redistribute(last, call->input)), *call);
  const auto& piece = call->pieces.back();
  auto sizes = call->output->sizes();
  sizes.push_back(size);
  Dims from(dims);
  std::iota(from.begin(), from.end(), 0);
  from.push_back(-1);
  auto windows = rows.unfold(dims - 1, size, step)
                     .narrow(dims - 1, piece.crop, piece.outputs);
  const auto own = call->output->local_sizes();
  for (int64_t other = 0; other + 1 < dims; ++other) {
    windows = windows.narrow(other, 0, own[other]);
  }
  return from_local(windows, with_dims(call->output, std::move(sizes), from))
      .movedim(dims - 1, dim);
}

// ---- frames to a signal -----------------------------------------------------

struct OverlapAdd {
  SpecPtr frames;
  SpecPtr signal;
  Dims span; // sizes of the rows under this rank's frames
  EncodedExchange add; // from these to the signal
};

/// The rows under the frames of a position.
Interval span_of(
    const SpecPtr& frames,
    int64_t dim,
    int64_t position,
    int64_t length,
    int64_t step) {
  const auto own = frames->interval(dim, position);
  return own.empty()
      ? Interval{0, 0}
      : Interval{own.begin * step, (own.end - 1) * step + length};
}

OverlapAdd plan_overlap_add(
    const SpecPtr& frames,
    const Dims& sizes,
    int64_t dim,
    int64_t length,
    int64_t step) {
  Dims from(sizes.size());
  std::iota(from.begin(), from.end(), 0);
  ShardSpec::Partitions partitions(sizes.size());
  partitions[dim] = own_outputs(
      Stencil::conv_transpose({length, step}, frames->size(dim), sizes[dim]),
      frames->partition(dim));
  const auto signal = with_dims(
      frames, sizes, from, Placement::replicate(), std::move(partitions));
  const auto& mesh = *signal->mesh();
  const auto rows = [&](int64_t, int64_t position) {
    return boundary_rows(
        span_of(frames, dim, position, length, step), sizes[dim]);
  };
  auto span = signal->local_sizes();
  span[dim] = span_of(frames, dim, mesh.position(), length, step).extent();
  const auto gather = plan_gather_rows(signal, {dim}, rows, mesh.position());
  return {frames, signal, span, adjoint(encode(gather, mesh))};
}

std::shared_ptr<const OverlapAdd> find_overlap_add(
    const SpecPtr& frames,
    const Dims& sizes,
    int64_t dim,
    int64_t length,
    int64_t step) {
  static PlanCache<OverlapAdd> plans;
  PlanKey key;
  key.add(frames).add(sizes).add(dim).add(length).add(step);
  return plans.find(
      key, [&] { return plan_overlap_add(frames, sizes, dim, length, step); });
}

/// Frames, in a new last dim, are added where they were taken from.
Tensor unfold_backward_function(
    c10::DispatchKeySet keys,
    const Tensor& grad,
    at::IntArrayRef input_sizes,
    int64_t dim,
    int64_t size,
    int64_t step) {
  const auto dims = static_cast<int64_t>(input_sizes.size());
  const auto time = at::maybe_wrap_dim(dim, dims);
  const auto layout = dims == 0 ? nullptr : stencil_layout(spec(grad), {dims});
  if (!layout || !layout->is_sharded(time) || size == 0 ||
      !layout->mesh()->contains_this_rank()) {
    return at::_ops::unfold_backward::redispatch(
        below_function_level(keys),
        grad,
        c10::fromIntArrayRefSlow(input_sizes),
        dim,
        size,
        step);
  }
  const auto plan =
      find_overlap_add(layout, input_sizes.vec(), time, size, step);
  const auto frames = to_local(redistribute(grad, layout));
  // Without frames the result depends on them all the same, or this rank would
  // leave backward's exchange to the others.
  const auto rows = frames.numel() == 0
      ? at::add(at::zeros(plan->span, frames.options()), at::sum(frames))
      : at::unfold_backward(frames, plan->span, time, size, step);
  return from_local(exchange(rows, plan->add), plan->signal);
}

/// PyTorch's own, but for a plain window, which stays plain: where windows do
/// not overlap, it prints the least of their sums.
Tensor istft_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    int64_t n_fft,
    std::optional<int64_t> hop_length,
    std::optional<int64_t> win_length,
    const std::optional<Tensor>& window,
    bool center,
    bool normalized,
    std::optional<bool> onesided,
    std::optional<int64_t> length,
    bool return_complex) {
  return at::_ops::istft::redispatch(
      below_function_level(keys),
      self,
      n_fft,
      hop_length,
      win_length,
      window,
      center,
      normalized,
      onesided,
      length,
      return_complex);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("stft.center", function_rule<at::_ops::stft_center, stft_function>);
  m.impl("istft", function_rule<at::_ops::istft, istft_function>);
  m.impl("unfold", function_rule<at::_ops::unfold, unfold_function>);
  m.impl(
      "unfold_backward",
      function_rule<at::_ops::unfold_backward, unfold_backward_function>);
}

} // namespace shardtensor::detail
