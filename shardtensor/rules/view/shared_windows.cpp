#include "shardtensor/rules/view/shared_windows.h"

#include <memory>
#include <numeric>
#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/add.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/unfold_backward.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/halo/stencil_call.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/rules/view/kept_plans.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

struct SharedWindows {
  StencilCall call; // from the dim on
  EncodedExchange back;
};

std::shared_ptr<const SharedWindows> find_windows_call(
    const SpecPtr& own,
    int64_t dim,
    int64_t size,
    int64_t step) {
  static PlanCache<SharedWindows> plans;
  PlanKey key;
  key.add(own).add(dim).add(size).add(step);
  return plans.find(key, [&] {
    auto sizes = own->sizes();
    sizes[dim] = (sizes[dim] - size) / step + 1;
    std::vector<Stencil> stencils{
        Stencil::conv({size, step}, own->size(dim), sizes[dim])};
    for (auto other = dim + 1; other < own->dim(); ++other) {
      stencils.push_back(Stencil::conv({}, sizes[other], sizes[other]));
    }
    SharedWindows plan{
        plan_stencil_call(
            own, {}, stencils, std::vector<int64_t>(stencils.size()), sizes),
        {}};
    if (plan.call.gathers) {
      plan.back = adjoint(plan.call.gather);
    }
    return plan;
  });
}

SpecPtr with_window_dim(const SpecPtr& spec, int64_t size) {
  auto sizes = spec->sizes();
  sizes.push_back(size);
  std::vector<int64_t> from(spec->dim());
  std::iota(from.begin(), from.end(), 0);
  from.push_back(-1);
  return with_dims(spec, std::move(sizes), from);
}

/// The rows of this rank's windows, kept equal to those of `self`.
ViewSource rows_of_windows(
    const at::Tensor& self,
    const std::shared_ptr<const SharedWindows>& windows) {
  const auto& call = windows->call;
  const auto source = view_source(self, call.input);
  if (!call.gathers) {
    return source;
  }
  const auto rows = [windows](const at::Tensor& local) {
    return exchange(local, windows->call.gather);
  };
  const auto owned = [windows](const at::Tensor& changed) {
    return exchange(changed, windows->back);
  };
  auto copy = rows(source.local);
  return {
      copy,
      std::make_shared<MovedView>(
          copy,
          source.local,
          MovedView::Ways{rows, owned, /*shares_rows=*/true},
          source.moved,
          self)};
}

// ---- back -------------------------------------------------------------------

struct OverlapAdd {
  SpecPtr frames;
  SpecPtr signal;
  std::vector<int64_t> span; // sizes of the rows under this rank's frames
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

/// How the rows under frames are cut: as they were, if that is known.
Partition cut_of_rows(
    const SpecPtr& frames,
    const SpecPtr& origin,
    int64_t dim,
    const Stencil& rows) {
  const bool fits = origin && origin->is_sharded(dim) &&
      origin->placements() == frames->placements() &&
      origin->partition(dim).is_contiguous();
  return fits ? origin->partition(dim)
              : own_outputs(rows, frames->partition(dim));
}

OverlapAdd plan_overlap_add(
    const SpecPtr& frames,
    const SpecPtr& origin,
    const std::vector<int64_t>& sizes,
    int64_t dim,
    int64_t length,
    int64_t step) {
  std::vector<int64_t> from(sizes.size());
  std::iota(from.begin(), from.end(), 0);
  ShardSpec::Partitions partitions(sizes.size());
  partitions[dim] = cut_of_rows(
      frames,
      origin,
      dim,
      Stencil::conv_transpose({length, step}, frames->size(dim), sizes[dim]));
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
    const SpecPtr& origin,
    const std::vector<int64_t>& sizes,
    int64_t dim,
    int64_t length,
    int64_t step) {
  static PlanCache<OverlapAdd> plans;
  PlanKey key;
  key.add(frames).add(origin).add(sizes).add(dim).add(length).add(step);
  return plans.find(key, [&] {
    return plan_overlap_add(frames, origin, sizes, dim, length, step);
  });
}

/// Frames, in a new last dim, are added where they were taken from.
at::Tensor unfold_backward_function(
    c10::DispatchKeySet keys,
    const at::Tensor& grad,
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
  const auto origin =
      find_origin(layout, {input_sizes[time], time, size, step});
  const auto plan =
      find_overlap_add(layout, origin, input_sizes.vec(), time, size, step);
  const auto frames = to_local(redistribute(grad, layout));
  // Without frames the result depends on them all the same, or this rank would
  // leave backward's exchange to the others.
  const auto rows = frames.numel() == 0
      ? at::add(at::zeros(plan->span, frames.options()), at::sum(frames))
      : at::unfold_backward(frames, plan->span, time, size, step);
  return from_local(exchange(rows, plan->add), plan->signal);
}

} // namespace

bool windows_are_shared(
    const SpecPtr& own,
    int64_t dim,
    int64_t size,
    int64_t step) {
  return own->dim() > 0 && step > 0 && size > step && own->is_sharded(dim) &&
      own->mesh()->contains_this_rank();
}

at::Tensor shared_windows(
    const at::Tensor& self,
    int64_t dim,
    int64_t size,
    int64_t step) {
  const auto windows = find_windows_call(spec(self), dim, size, step);
  const auto plan = find_view_plan(
      "shared_windows",
      self,
      {dim, size, step},
      [&] {
        return ViewPlan{
            windows->call.input, with_window_dim(windows->call.output, size)};
      },
      [&](const at::Tensor& whole) { return whole.unfold(dim, size, step); });
  note_origin(self, plan->output, {self.size(dim), dim, size, step});
  const auto source = rows_of_windows(self, windows);
  return wrap_view(
      keep_owned(source.local.unfold(dim, size, step), windows->call),
      plan->output,
      plan->strides,
      self,
      source);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "unfold_backward",
      function_rule<at::_ops::unfold_backward, unfold_backward_function>);
}

} // namespace shardtensor::detail
