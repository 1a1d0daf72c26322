#include <algorithm>
#include <functional>
#include <numeric>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_backward.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/rules/view/kept_plans.h"
#include "shardtensor/rules/view/shared_windows.h"

// Views along dims that must be whole: windows, other element types.

namespace shardtensor::detail {
namespace {

// ---- windows ----------------------------------------------------------------

/// The layout of `wanted` when `dims` (whole) go and new whole dims of `sizes`
/// come at the end.
SpecPtr with_new_dims(
    const SpecPtr& wanted,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& sizes) {
  std::vector<int64_t> from;
  std::vector<int64_t> all_sizes;
  for (int64_t dim = 0; dim < wanted->dim(); ++dim) {
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
      from.push_back(dim);
      all_sizes.push_back(wanted->size(dim));
    }
  }
  from.resize(from.size() + sizes.size(), -1);
  all_sizes.insert(all_sizes.end(), sizes.begin(), sizes.end());
  return with_dims(wanted, std::move(all_sizes), from);
}

/// Windows of a dim, one after the other, that share no rows.
struct Tiles {
  int64_t dim;
  int64_t size;
  int64_t step;

  bool fit(const SpecPtr& own) const {
    return size > 0 && size <= step && step <= own->size(dim) &&
        own->is_sharded(dim) && own->partition(dim).is_contiguous();
  }
  int64_t count(const SpecPtr& own) const {
    return (own->size(dim) - size) / step + 1;
  }
  /// A view where every cut stands between two windows, as the nearest ones do.
  ViewPlan plan(const SpecPtr& own) const {
    const auto& cuts = own->partition(dim);
    const auto windows = count(own);
    std::vector<int64_t> rows;
    std::vector<int64_t> wholes;
    int64_t before = 0; // windows
    for (int64_t piece = 0; piece < cuts.pieces(); ++piece) {
      const auto end = cuts.interval(piece).end;
      const bool is_last = end == own->size(dim);
      const auto upto =
          is_last ? windows : std::min((2 * end + step) / (2 * step), windows);
      wholes.push_back(upto - before);
      rows.push_back((upto - before) * step);
      before = upto;
    }
    const auto wanted =
        with_partition(own, dim, Partition(rest_to_last(rows, own)));
    auto sizes = own->sizes();
    sizes[dim] = windows;
    return {
        wanted,
        with_new_dims(
            with_partition(wanted, dim, Partition(wholes)), {}, {size})};
  }
  /// Rows behind the last window belong to the piece that has it.
  std::vector<int64_t> rest_to_last(
      std::vector<int64_t> rows,
      const SpecPtr& own) const {
    auto last = rows.rbegin();
    while (std::next(last) != rows.rend() && *last == 0) {
      ++last;
    }
    *last +=
        own->size(dim) - std::accumulate(rows.begin(), rows.end(), int64_t{0});
    return rows;
  }
  at::Tensor of(const at::Tensor& local) const {
    if (local.size(dim) >= size) {
      return local.unfold(dim, size, step);
    }
    auto sizes = local.sizes().vec();
    sizes[dim] = 0;
    sizes.push_back(size);
    return local.narrow(dim, 0, 0).unsqueeze(-1).expand(sizes);
  }
};

at::Tensor unfold_kernel(
    const at::Tensor& self,
    int64_t dimension,
    int64_t size,
    int64_t step) {
  const auto dim = at::maybe_wrap_dim(dimension, self.dim());
  const auto extent = self.dim() == 0 ? 1 : self.size(dim);
  TORCH_CHECK(
      size >= 0 && size <= extent && step > 0,
      "unfold: expected a window of at most ",
      extent,
      " and a step of at least 1 for dim ",
      dim,
      " of sizes ",
      self.sizes(),
      ", got window ",
      size,
      ", step ",
      step);
  const auto& own = spec(self);
  if (windows_are_shared(own, dim, size, step)) {
    return shared_windows(self, dim, size, step);
  }
  const Tiles tiles{dim, size, step};
  const auto plan = find_view_plan(
      "unfold",
      self,
      {dim, size, step},
      [&] {
        if (own->dim() == 0) {
          return ViewPlan{own, with_new_dims(own, {}, {size})};
        }
        if (tiles.fit(own)) {
          return tiles.plan(own);
        }
        const auto wanted = whole_dims(own, {dim});
        auto sizes = own->sizes();
        sizes[dim] = (extent - size) / step + 1;
        return ViewPlan{
            wanted, with_new_dims(with_sizes(wanted, sizes), {}, {size})};
      },
      [&](const at::Tensor& whole) { return whole.unfold(dim, size, step); });
  const bool tiled = own->dim() > 0 && tiles.fit(own);
  if (!tiled) {
    note_view_repair("unfold", own, plan->wanted);
  }
  const auto source = view_source(self, plan->wanted);
  return wrap_view(
      tiled ? tiles.of(source.local) : source.local.unfold(dim, size, step),
      plan->output,
      plan->strides,
      self,
      source);
}

at::Tensor unfold_backward_kernel(
    const at::Tensor& grad,
    at::IntArrayRef input_sizes,
    int64_t dim,
    int64_t size,
    int64_t step) {
  const auto dims = static_cast<int64_t>(input_sizes.size());
  const auto wrapped = at::maybe_wrap_dim(dim, dims);
  const auto wanted = dims == 0
      ? without_shard(spec(grad), 0)
      : whole_dims(spec(grad), {wrapped, grad.dim() - 1});
  std::vector<int64_t> from(dims);
  std::iota(from.begin(), from.end(), 0);
  if (dims > 0) {
    from[wrapped] = -1;
  }
  const auto output = with_dims(wanted, input_sizes.vec(), from);
  const auto local = local_of(grad, wanted).tensor;
  return wrap(
      at::unfold_backward(local, output->local_sizes(), dim, size, step),
      output);
}

/// Windows of `dim`, `step` rows apart.
struct Windows {
  int64_t dim;
  int64_t step;
};

/// Sizes and strides that mean windows of one dim, in a new last one.
std::optional<Windows> find_windows(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  const auto dims = static_cast<size_t>(self.dim());
  const auto is_kept = [&](size_t dim) {
    const auto i = static_cast<int64_t>(dim);
    return size[dim] == self.size(i) &&
        (size[dim] == 1 || stride[dim] == self.stride(i));
  };
  for (size_t dim = 0; size.size() == dims + 1 && dim < dims; ++dim) {
    const auto i = static_cast<int64_t>(dim);
    const auto step = stride[dim] / std::max<int64_t>(self.stride(i), 1);
    bool fits = step > 0 && stride[dim] == step * self.stride(i) &&
        stride.back() == self.stride(i) && size[dim] > 0 &&
        (size[dim] - 1) * step + size.back() <= self.size(i);
    for (size_t other = 0; other < dims; ++other) {
      fits = fits && (other == dim || is_kept(other));
    }
    if (fits) {
      return Windows{i, step};
    }
  }
  return {};
}

/// A part of each dim, every `step`-th row; output dims in any order.
struct StridedBox {
  std::vector<int64_t> begin; // of each input dim
  std::vector<int64_t> dims; // of which output dims are, -1 a new one
  std::vector<int64_t> step; // of output dims
};

/// Sizes, strides and an offset from where `self` begins that mean such a part
/// of it: each stride is whole steps of one dim.
std::optional<StridedBox> find_box(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    int64_t offset) {
  std::vector<int64_t> by_stride;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (self.size(dim) > 1 && self.stride(dim) > 0) {
      by_stride.push_back(dim);
    }
  }
  std::ranges::stable_sort(
      by_stride, std::greater(), [&](int64_t dim) { return self.stride(dim); });
  if (offset < 0) {
    return {};
  }
  StridedBox box{std::vector<int64_t>(self.dim()), {}, {}};
  std::vector<int64_t> end(self.dim(), 1);
  for (const auto dim : by_stride) {
    box.begin[dim] = offset / self.stride(dim);
    end[dim] = self.size(dim);
    offset %= self.stride(dim);
    if (box.begin[dim] >= end[dim]) {
      return {};
    }
  }
  std::vector<bool> used(self.dim());
  for (size_t i = 0; i < size.size(); ++i) {
    const auto of = std::ranges::find_if(by_stride, [&](int64_t dim) {
      return !used[dim] && stride[i] > 0 && stride[i] % self.stride(dim) == 0 &&
          box.begin[dim] + (size[i] - 1) * (stride[i] / self.stride(dim)) <
          end[dim];
    });
    if (size[i] == 1) {
      box.dims.push_back(-1);
      box.step.push_back(1);
      continue;
    }
    if (size[i] == 0 || of == by_stride.end()) {
      return {};
    }
    used[*of] = true;
    box.dims.push_back(*of);
    box.step.push_back(stride[i] / self.stride(*of));
  }
  return offset == 0 && self.numel() > 0 ? std::optional(box) : std::nullopt;
}

at::Tensor take_box(
    const at::Tensor& self,
    const StridedBox& box,
    at::IntArrayRef size) {
  auto out = self;
  std::vector<int64_t> order;
  for (size_t i = 0; i < size.size(); ++i) {
    const auto dim = box.dims[i];
    if (dim >= 0) {
      const auto begin = box.begin[dim];
      out = out.slice(
          dim, begin, begin + (size[i] - 1) * box.step[i] + 1, box.step[i]);
      order.push_back(dim);
    }
  }
  for (int64_t dim = self.dim() - 1; dim >= 0; --dim) {
    if (std::ranges::find(box.dims, dim) == box.dims.end()) {
      out = out.select(dim, box.begin[dim]);
      for (auto& kept : order) {
        kept -= kept > dim ? 1 : 0;
      }
    }
  }
  out = out.permute(order);
  for (size_t i = 0; i < size.size(); ++i) {
    out = box.dims[i] < 0 ? out.unsqueeze(static_cast<int64_t>(i)) : out;
  }
  return out;
}

/// A tensor in one piece of memory with a dim for each of these strides.
at::Tensor with_dims_of(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  std::vector<int64_t> steps;
  for (size_t i = 0; i < size.size(); ++i) {
    if (size[i] > 1) {
      steps.push_back(stride[i]);
    }
  }
  std::ranges::sort(steps, std::greater());
  std::vector<int64_t> sizes;
  auto rest = self.numel();
  for (const auto step : steps) {
    if (step <= 0 || rest % step != 0 || !self.is_contiguous()) {
      return self;
    }
    sizes.push_back(rest / step);
    rest = step;
  }
  sizes.push_back(rest);
  return self.reshape(sizes);
}

/// stft and others take their windows by strides; torch.func's transforms take
/// a part that was written, or its tangent.
at::Tensor as_strided_function(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<int64_t> storage_offset) {
  const bool is_whole = size == self.sizes() && stride == self.strides();
  const auto offset = offset_within(self, storage_offset);
  if (!is_whole) {
    const auto windows =
        offset == 0 ? find_windows(self, size, stride) : std::nullopt;
    if (windows) {
      return self.unfold(windows->dim, size.back(), windows->step)
          .narrow(windows->dim, 0, size[windows->dim]);
    }
    for (const auto& seen : {self, with_dims_of(self, size, stride)}) {
      if (const auto box = find_box(seen, size, stride, offset)) {
        return take_box(seen, *box, size);
      }
    }
  }
  return at::_ops::as_strided::redispatch(
      below_function_level(keys),
      self,
      c10::fromIntArrayRefSlow(size),
      c10::fromIntArrayRefSlow(stride),
      storage_offset);
}

// ---- other element types ----------------------------------------------------

/// Memory that holds the numbers themselves, not what conj() or imag makes of
/// them when it is read.
ViewSource resolved_source(ViewSource source, const at::Tensor& self) {
  const bool is_lazy = source.local.is_conj() || source.local.is_neg();
  return is_lazy ? contiguous_source(std::move(source), self) : source;
}

at::Tensor view_as_real_kernel(const at::Tensor& self) {
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "view_as_real",
      self,
      {},
      [&] { return ViewPlan{own, with_new_dims(own, {}, {2})}; },
      [](const at::Tensor& whole) { return at::view_as_real(whole); });
  const auto source = resolved_source(view_source(self, nullptr), self);
  return wrap_view(
      at::view_as_real(source.local),
      plan->output,
      plan->strides,
      self,
      source);
}

at::Tensor view_as_complex_kernel(const at::Tensor& self) {
  TORCH_CHECK(
      self.dim() > 0 && self.size(-1) == 2,
      "Tensor must have a last dimension of size 2"); // PyTorch's own
  const auto& own = spec(self);
  const auto last = self.dim() - 1;
  const auto plan = find_view_plan(
      "view_as_complex",
      self,
      {},
      [&] {
        const auto wanted = whole_dims(own, {last});
        return ViewPlan{wanted, with_new_dims(wanted, {last}, {})};
      },
      [](const at::Tensor& whole) { return at::view_as_complex(whole); });
  note_view_repair("view_as_complex", own, plan->wanted);
  auto source = resolved_source(view_source(self, plan->wanted), self);
  if (!has_row_major_strides(source.local)) {
    source = contiguous_source(source, self);
  }
  auto local = source.local.numel() == 0
      ? at::empty(
            plan->output->local_sizes(),
            source.local.options().dtype(
                c10::toComplexType(self.scalar_type())))
      : at::view_as_complex(source.local);
  return wrap_view(local, plan->output, plan->strides, self, source);
}

/// The last dim in elements of another width: cut points scale with it.
ViewPlan plan_dtype(const SpecPtr& spec, int64_t from_width, int64_t to_width) {
  const auto last = spec->dim() - 1;
  if (from_width == to_width || last < 0) {
    return {spec, spec};
  }
  auto sizes = spec->sizes();
  sizes[last] = sizes[last] * from_width / to_width;
  if (!spec->is_sharded(last)) {
    return {
        spec,
        make_spec(spec->mesh(), sizes, spec->placements(), spec->partitions())};
  }
  auto partitions = spec->partitions();
  if (from_width > to_width) {
    partitions[last] = spec->partition(last).scaled(from_width / to_width);
    return {
        spec, make_spec(spec->mesh(), sizes, spec->placements(), partitions)};
  }
  const auto output = with_sizes(contiguous_dim(spec, last), std::move(sizes));
  const auto wanted = with_partition(
      spec, last, output->partition(last).scaled(to_width / from_width));
  return {wanted, output};
}

at::Tensor view_dtype_kernel(const at::Tensor& self, at::ScalarType dtype) {
  const auto from = static_cast<int64_t>(self.element_size());
  const auto to = static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_CHECK(
      from >= to || (self.dim() > 0 && self.size(-1) * from % to == 0),
      "view: expected a last dim divisible by ",
      std::max<int64_t>(to / from, 1),
      " to view ",
      self.scalar_type(),
      " as ",
      dtype,
      ", got sizes ",
      self.sizes());
  const auto& own = spec(self);
  // Bits of terms are no terms of the bits.
  const auto read = dtype == self.scalar_type() ? own : without_partial(own);
  const auto plan = find_view_plan(
      "view.dtype",
      self,
      {from, to, dtype == self.scalar_type()},
      [&] { return plan_dtype(read, from, to); },
      [&](const at::Tensor& whole) { return whole.view(dtype); });
  note_view_repair("view.dtype", own, plan->wanted);
  auto source = resolved_source(view_source(self, plan->wanted), self);
  if (from != to && !has_row_major_strides(source.local)) {
    source = contiguous_source(source, self);
  }
  // Strides of tensors without elements may not divide.
  auto local = source.local.numel() == 0
      ? at::empty(
            plan->output->local_sizes(), source.local.options().dtype(dtype))
      : source.local.view(dtype);
  return wrap_view(local, plan->output, plan->strides, self, source);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "as_strided", function_rule<at::_ops::as_strided, as_strided_function>);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("unfold", unfold_kernel);
  m.impl("unfold_backward", unfold_backward_kernel);
  m.impl("view_as_real", view_as_real_kernel);
  m.impl("view_as_complex", view_as_complex_kernel);
  m.impl("view.dtype", view_dtype_kernel);
}

} // namespace shardtensor::detail
