#include <limits>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/slice_backward.h>
#include <ATen/ops/tensor_split.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/traced_messages.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/rules/view/kept_plans.h"
#include "shardtensor/tensor/known_zeros.h"

// Parts of a dim. Every rank keeps its own rows of a slice, so slicing never
// communicates; a selected row of a sharded dim goes to every rank.

namespace shardtensor::detail {
namespace {

/// Start and end as ATen reads them: negative ones count from the end, both
/// are clamped.
std::pair<int64_t, int64_t> clamped(
    std::optional<int64_t> start,
    std::optional<int64_t> end,
    int64_t size) {
  const auto clamp = [&](int64_t row) {
    return std::clamp<int64_t>(row < 0 ? row + size : row, 0, size);
  };
  const auto first = clamp(start.value_or(0));
  const auto last = clamp(end.value_or(std::numeric_limits<int64_t>::max()));
  return {first, std::max(first, last)};
}

at::Tensor sliced(
    const at::Tensor& self,
    int64_t dim,
    int64_t start,
    int64_t end,
    int64_t step = 1) {
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "slice",
      self,
      {dim, start, end, step},
      [&] { return plan_slice(own, dim, start, end, step); },
      [&](const at::Tensor& whole) {
        return whole.slice(dim, start, end, step);
      });
  note_view_repair("slice", own, plan->wanted);
  note_origin(self, plan->output, {self.size(dim), dim, start, end, step});
  const auto source = view_source(self, plan->wanted);
  return wrap_view(
      source.local.slice(dim, plan->arguments[0], plan->arguments[1], step),
      plan->output,
      plan->strides,
      self,
      source,
      plan->offset);
}

at::Tensor slice_kernel(
    const at::Tensor& self,
    int64_t dim,
    std::optional<int64_t> start,
    std::optional<int64_t> end,
    int64_t step) {
  TORCH_CHECK_INDEX(
      self.dim() > 0, "slice: expected a tensor with dims, got a 0-d one");
  TORCH_CHECK_VALUE(
      step > 0, "slice: expected a step of at least 1, got ", step);
  dim = at::maybe_wrap_dim(dim, self.dim());
  const auto [first, last] = clamped(start, end, self.size(dim));
  return sliced(self, dim, first, last, step);
}

int64_t wrapped_index(const char* op, int64_t index, int64_t size) {
  TORCH_CHECK_INDEX(
      index >= -size && index < size,
      op,
      ": expected an index in [",
      -size,
      ", ",
      size - 1,
      "] along a dim of size ",
      size,
      ", got ",
      index);
  return index < 0 ? index + size : index;
}

/// The one row of a dim of size 1, on every rank that may need it.
at::Tensor only_row(const at::Tensor& self, int64_t dim) {
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "only_row",
      self,
      dim,
      [&] {
        std::vector<int64_t> dims;
        for (int64_t other = 0; other < own->dim(); ++other) {
          if (other != dim) {
            dims.push_back(other);
          }
        }
        return plan_dims(own, dims);
      },
      [&](const at::Tensor& whole) { return whole.select(dim, 0); });
  const auto source = view_source(self, plan->wanted);
  return wrap_view(
      source.local.select(dim, 0),
      plan->output,
      plan->strides,
      self,
      source,
      plan->offset);
}

at::Tensor select_kernel(const at::Tensor& self, int64_t dim, int64_t index) {
  TORCH_CHECK_INDEX(
      self.dim() > 0, "select: expected a tensor with dims, got a 0-d one");
  dim = at::maybe_wrap_dim(dim, self.dim());
  index = wrapped_index("select", index, self.size(dim));
  const auto part = sliced(self, dim, index, index + 1);
  if (!self.is_inference()) { // a moved view watches the writes to self
    part.unsafeGetTensorImpl()->set_version_counter(
        self.unsafeGetTensorImpl()->version_counter());
  }
  auto row = only_row(part, dim);
  note_origin(self, spec(row), {self.size(dim), dim});
  return row;
}

// ---- several parts ----------------------------------------------------------

std::vector<at::Tensor> split_with_sizes_kernel(
    const at::Tensor& self,
    at::IntArrayRef split_sizes,
    int64_t dim) {
  TORCH_CHECK(
      self.dim() > 0, "split: expected a tensor with dims, got a 0-d one");
  dim = at::maybe_wrap_dim(dim, self.dim());
  std::vector<at::Tensor> parts;
  int64_t start = 0;
  for (const int64_t size : split_sizes) {
    TORCH_CHECK(
        size >= 0 && start + size <= self.size(dim),
        "split: expected sizes of at least 0 that sum to ",
        self.size(dim),
        ", got ",
        split_sizes);
    parts.push_back(sliced(self, dim, start, start + size));
    start += size;
  }
  TORCH_CHECK(
      start == self.size(dim),
      "split: expected sizes that sum to ",
      self.size(dim),
      ", got ",
      split_sizes);
  return parts;
}

std::vector<at::Tensor> split_kernel(
    const at::Tensor& self,
    int64_t split_size,
    int64_t dim) {
  TORCH_CHECK(
      self.dim() > 0, "split: expected a tensor with dims, got a 0-d one");
  const auto size = self.size(at::maybe_wrap_dim(dim, self.dim()));
  TORCH_CHECK(
      split_size > 0 || (split_size == 0 && size == 0),
      "split: expected a split size of at least 1 for a dim of size ",
      size,
      ", got ",
      split_size);
  std::vector<int64_t> sizes;
  int64_t left = size;
  do {
    sizes.push_back(std::min(left, split_size));
    left -= sizes.back();
  } while (left > 0);
  return split_with_sizes_kernel(self, sizes, dim);
}

/// All rows of a sharded dim are needed by all ranks: one gather for all.
std::vector<at::Tensor> unbind_kernel(const at::Tensor& self, int64_t dim) {
  TORCH_CHECK_INDEX(
      self.dim() > 0, "unbind: expected a tensor with dims, got a 0-d one");
  dim = at::maybe_wrap_dim(dim, self.dim());
  if (self.size(dim) == 0) {
    return {};
  }
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "unbind",
      self,
      dim,
      [&] {
        const auto wanted = without_shard(own, dim);
        return ViewPlan{
            wanted, reduced_spec(wanted, {dim}, false, Placement::replicate())};
      },
      [&](const at::Tensor& whole) { return whole.select(dim, 0); });
  note_view_repair("unbind", own, plan->wanted);
  const auto source = view_source(self, plan->wanted);
  std::vector<at::Tensor> rows;
  for (const auto& row : source.local.unbind(dim)) {
    const auto offset = static_cast<int64_t>(rows.size()) * self.stride(dim);
    rows.push_back(
        wrap_view(row, plan->output, plan->strides, self, source, offset));
  }
  return rows;
}

// ---- their gradients --------------------------------------------------------

/// The slice that `origin` was cut by, with the parts of its result and itself
/// exchanged.
ViewPlanPtr into_origin(
    const SpecPtr& origin,
    int64_t dim,
    int64_t start,
    int64_t end,
    int64_t step) {
  return find_view_plan("into_origin", origin, {dim, start, end, step}, [&] {
    auto plan = plan_slice(origin, dim, start, end, step);
    std::swap(plan.wanted, plan.output);
    return plan;
  });
}

at::Tensor slice_backward_kernel(
    const at::Tensor& grad,
    at::IntArrayRef input_sizes,
    int64_t dim,
    int64_t start,
    int64_t end,
    int64_t step) {
  dim = at::maybe_wrap_dim(dim, grad.dim());
  const auto size = input_sizes[dim];
  const auto [first, last] = clamped(start, end, size);
  const auto& own = spec(grad);
  const int64_t from = first;
  const int64_t to = last;
  const auto origin = find_origin(own, {size, dim, from, to, step});
  const auto plan = origin
      ? into_origin(origin, dim, from, to, step)
      : find_view_plan("slice_backward", own, {size, dim, from, to, step}, [&] {
          return plan_slice_backward(own, size, dim, from, to, step);
        });
  const auto local = local_of(grad, plan->wanted).tensor;
  const auto result = wrap(
      at::slice_backward(
          local,
          plan->output->local_sizes(),
          dim,
          plan->arguments[0],
          plan->arguments[1],
          step),
      plan->output);
  if (grad.is_complex()) { // transforms ask
    const auto* known = nonzero_box(grad);
    auto box = known ? *known : whole_box(grad.sizes());
    box[dim] = {from, to};
    note_known_zeros(result, std::move(box));
  }
  return result;
}

at::Tensor select_backward_kernel(
    const at::Tensor& grad,
    at::IntArrayRef input_sizes,
    int64_t dim,
    int64_t index) {
  dim = at::maybe_wrap_dim(dim, static_cast<int64_t>(input_sizes.size()));
  const auto size = input_sizes[dim];
  index = wrapped_index("select", index, size);
  const auto& own = spec(grad);
  const auto origin = find_origin(own, {size, dim});
  const bool fits = origin &&
      (!origin->is_sharded(dim) || origin->partition(dim).is_contiguous());
  const auto output =
      fits ? origin : find_view_plan("select_backward", own, {size, dim}, [&] {
                        return plan_select_backward(own, size, dim);
                      })->output;
  const auto& local = impl_of(grad)->local();
  auto result = at::zeros(output->local_sizes(), local.options());
  const auto rows =
      output->is_sharded(dim) ? output->interval(dim) : Interval{0, size};
  if (rows.begin <= index && index < rows.end) {
    result.select(dim, index - rows.begin).copy_(local);
  }
  return wrap(needing(result, local), output);
}

// ---- written parts of a copy ------------------------------------------------

/// Into the part of a copy; nothing is broadcast.
void write_part(const at::Tensor& part, const at::Tensor& src) {
  TORCH_CHECK(
      src.sizes() == part.sizes(),
      "expected src to have a size equal to the slice of self. src size = ",
      src.sizes(),
      ", slice size = ",
      part.sizes());
  part.copy_(src);
}

at::Tensor slice_scatter_kernel(
    const at::Tensor& self,
    const at::Tensor& src,
    int64_t dim,
    std::optional<int64_t> start,
    std::optional<int64_t> end,
    int64_t step) {
  auto result = self.clone();
  write_part(result.slice(dim, start, end, step), src);
  return result;
}

at::Tensor select_scatter_kernel(
    const at::Tensor& self,
    const at::Tensor& src,
    int64_t dim,
    int64_t index) {
  auto result = self.clone();
  write_part(result.select(dim, index), src);
  return result;
}

at::Tensor diagonal_scatter_kernel(
    const at::Tensor& self,
    const at::Tensor& src,
    int64_t offset,
    int64_t dim1,
    int64_t dim2) {
  auto result = self.clone();
  write_part(result.diagonal(offset, dim1, dim2), src);
  return result;
}

/// How many parts, or the rows where they begin: numbers for the host, which
/// every rank has.
std::vector<at::Tensor> tensor_split_function(
    const at::Tensor& self,
    const at::Tensor& indices_or_sections,
    int64_t dim) {
  const auto given = indices_or_sections.detach();
  TORCH_CHECK(
      given.is_cpu(),
      "tensor_split expected tensor_indices_or_sections to be on cpu, but it's "
      "on ",
      given.device());
  const auto numbers = is_shard_tensor(given) ? full_tensor(given) : given;
  TORCH_CHECK(
      numbers.dim() <= 1 && numbers.scalar_type() == at::kLong,
      "tensor_split: expected a number of sections or a list of indices of "
      "dtype Long, got ",
      numbers.scalar_type(),
      " of sizes ",
      numbers.sizes());
  if (numbers.dim() == 0) {
    return at::tensor_split(self, numbers.item<int64_t>(), dim);
  }
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < numbers.size(0); ++i) {
    indices.push_back(numbers[i].item<int64_t>());
  }
  return at::tensor_split(self, indices, dim);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "tensor_split.tensor_indices_or_sections",
      function_rule<
          at::_ops::tensor_split_tensor_indices_or_sections,
          tensor_split_function>);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("slice.Tensor", slice_kernel);
  m.impl("select.int", select_kernel);
  m.impl("split.Tensor", split_kernel);
  m.impl("split_with_sizes", split_with_sizes_kernel);
  m.impl("unsafe_split.Tensor", split_kernel);
  m.impl("unsafe_split_with_sizes", split_with_sizes_kernel);
  m.impl("unbind.int", unbind_kernel);
  m.impl("slice_backward", slice_backward_kernel);
  m.impl("select_backward", select_backward_kernel);
  m.impl("slice_scatter", slice_scatter_kernel);
  m.impl("select_scatter", select_scatter_kernel);
  m.impl("diagonal_scatter", diagonal_scatter_kernel);
}

} // namespace shardtensor::detail
