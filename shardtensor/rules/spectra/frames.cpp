#include <optional>
#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/add.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/stft.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/halo/stencil_call.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

// Frames of signals that are cut along time. A frame belongs to the rank that
// holds the middle of its window; ranks send each other the rows that windows
// share. istft adds frames by unfold_backward (shared_windows.cpp).

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
/// Frames lie one after the other, as those that a transform is taken of.
Tensor wrapped(const Tensor& local, const StencilCall& call) {
  const auto time = call.output->dim() - 1;
  auto kept = local.transpose(time, time + 1)
                  .narrow(time, 0, call.pieces.back().outputs);
  auto sizes = kept.sizes().vec();
  Dims from(sizes.size(), -1);
  from[time] = time;
  sizes[time] = call.output->size(time);
  if (time == 1) {
    from[0] = 0;
    sizes[0] = call.output->size(0);
    kept = kept.narrow(0, 0, call.output->local_sizes()[0]);
  }
  return from_local(kept, with_dims(call.output, std::move(sizes), from))
      .transpose(time, time + 1);
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
}

} // namespace shardtensor::detail
