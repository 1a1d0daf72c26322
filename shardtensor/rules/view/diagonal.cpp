#include <algorithm>
#include <array>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/diagonal_backward.h>
#include <ATen/ops/fill_diagonal_ops.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/rules/view/kept_plans.h"

// Diagonals. Where one of the two dims is cut, a rank's rows (or columns) have
// a part of the diagonal, which lies in its piece by another offset.

namespace shardtensor::detail {
namespace {

struct Diagonal {
  int64_t offset;
  int64_t dim1; // of rows
  int64_t dim2; // of columns

  Diagonal(int64_t offset, int64_t dim1, int64_t dim2, int64_t dims)
      : offset(offset),
        dim1(at::maybe_wrap_dim(dim1, dims)),
        dim2(at::maybe_wrap_dim(dim2, dims)) {
    TORCH_CHECK(
        this->dim1 != this->dim2,
        "diagonal: expected two different dims, got ",
        dim1);
  }

  /// What a plan goes by, beside the layout.
  std::array<int64_t, 5> arguments(at::IntArrayRef sizes) const {
    return {offset, dim1, dim2, sizes[dim1], sizes[dim2]};
  }

  /// The rows of `dim` that have an element of it, of these sizes.
  Interval rows(at::IntArrayRef sizes, int64_t dim) const {
    const auto first_row = std::max<int64_t>(-offset, 0);
    const auto first_column = std::max<int64_t>(offset, 0);
    const auto count =
        std::min(sizes[dim1] - first_row, sizes[dim2] - first_column);
    const auto begin = dim == dim1 ? first_row : first_column;
    return count > 0 ? Interval{begin, begin + count} : Interval{0, 0};
  }

  /// Its offset in this rank's piece.
  int64_t local_offset(const ShardSpec& spec, int64_t dim) const {
    const auto begin = spec.is_sharded(dim) ? spec.interval(dim).begin : 0;
    return dim == dim1 ? offset + begin : offset - begin;
  }

  /// The dims of a matrix that the dims of its diagonal are, `along` the last.
  std::vector<int64_t> dims_left(int64_t dims, int64_t along) const {
    std::vector<int64_t> left;
    for (int64_t dim = 0; dim < dims; ++dim) {
      if (dim != dim1 && dim != dim2) {
        left.push_back(dim);
      }
    }
    left.push_back(along);
    return left;
  }

  /// One of the dims may be cut: its rows stay where they are.
  ViewPlan plan(const SpecPtr& own) const {
    const auto along = own->is_sharded(dim1) ? dim1 : dim2;
    auto wanted = whole_dims(own, {along == dim1 ? dim2 : dim1});
    if (wanted->is_sharded(along)) {
      wanted = contiguous_dim(wanted, along);
    }
    const auto [begin, end] = rows(own->sizes(), along);
    const auto part = plan_slice(wanted, along, begin, end, 1).output;
    const auto from = dims_left(own->dim(), along);
    std::vector<int64_t> sizes;
    for (const auto dim : from) {
      sizes.push_back(part->size(dim));
    }
    return {
        wanted,
        with_dims(part, std::move(sizes), from),
        {local_offset(*wanted, along)}};
  }

  /// Of its gradient, whose pieces become rows of dim1.
  ViewPlan plan_backward(const SpecPtr& grad, at::IntArrayRef input_sizes)
      const {
    const auto last = grad->dim() - 1;
    const auto wanted =
        grad->is_sharded(last) ? contiguous_dim(grad, last) : grad;
    const auto dims = static_cast<int64_t>(input_sizes.size());
    const auto left = dims_left(dims, dim1);
    std::vector<int64_t> from(dims, -1);
    for (size_t i = 0; i < left.size(); ++i) {
      from[left[i]] = static_cast<int64_t>(i);
    }
    const auto [begin, end] = rows(input_sizes, dim1);
    auto sizes = input_sizes.vec();
    sizes[dim1] = end - begin;
    const auto part = with_dims(wanted, std::move(sizes), from);
    const auto output =
        plan_slice_backward(part, input_sizes[dim1], dim1, begin, end, 1)
            .output;
    return {wanted, output, {local_offset(*output, dim1)}};
  }
};

at::Tensor diagonal_kernel(
    const at::Tensor& self,
    int64_t offset,
    int64_t dim1,
    int64_t dim2) {
  const Diagonal wanted(offset, dim1, dim2, self.dim());
  const auto& own = spec(self);
  const auto arguments = wanted.arguments(self.sizes());
  const auto plan = find_view_plan(
      "diagonal",
      self,
      arguments,
      [&] { return wanted.plan(own); },
      [&](const at::Tensor& whole) {
        return whole.diagonal(offset, dim1, dim2);
      });
  note_view_repair("diagonal", own, plan->wanted);
  note_origin(self, plan->output, arguments);
  const auto source = view_source(self, plan->wanted);
  return wrap_view(
      source.local.diagonal(plan->arguments[0], dim1, dim2),
      plan->output,
      plan->strides,
      self,
      source,
      plan->offset);
}

/// In the layout of the input, as far as it is known, else of the gradient.
at::Tensor diagonal_backward_kernel(
    const at::Tensor& grad,
    at::IntArrayRef input_sizes,
    int64_t offset,
    int64_t dim1,
    int64_t dim2) {
  const Diagonal wanted(
      offset, dim1, dim2, static_cast<int64_t>(input_sizes.size()));
  const auto& own = spec(grad);
  const auto arguments = wanted.arguments(input_sizes);
  const auto origin = find_origin(own, arguments);
  const auto plan = origin
      ? find_view_plan(
            "diagonal_of",
            origin,
            arguments,
            [&] { return wanted.plan(origin); })
      : find_view_plan("diagonal_backward", own, arguments, [&] {
          return wanted.plan_backward(own, input_sizes);
        });
  const auto& before = origin ? plan->output : plan->wanted;
  const auto& after = origin ? plan->wanted : plan->output;
  const auto local = local_of(grad, before).tensor;
  return wrap(
      at::diagonal_backward(
          local, after->local_sizes(), plan->arguments[0], dim1, dim2),
      after);
}

/// The rows below a tall matrix's diagonal have further ones, each a row apart.
at::Tensor is_on_wrapped_diagonal(const at::Tensor& self) {
  const auto options = impl_of(self)->local().options().dtype(at::kLong);
  const auto columns = at::arange(self.size(1), options);
  const auto rows =
      at::arange(self.size(0), options).remainder(self.size(1) + 1);
  return at::zeros_like(self, options).add_(columns).eq_(rows.unsqueeze(1));
}

/// PyTorch's own writes into the memory by its strides.
at::Tensor& fill_diagonal_function(
    at::Tensor& self,
    const at::Scalar& value,
    bool wrap) {
  TORCH_CHECK(
      self.dim() >= 2,
      "fill_diagonal_: expected at least 2 dims, got sizes ",
      self.sizes());
  const auto sizes = self.sizes();
  TORCH_CHECK(
      sizes.size() == 2 ||
          std::all_of(
              sizes.begin(),
              sizes.end(),
              [&](int64_t size) { return size == sizes[0]; }),
      "fill_diagonal_: expected all dims to be of equal length, got sizes ",
      sizes);
  if (wrap && sizes.size() == 2 && sizes[0] > sizes[1] + 1) {
    return self.masked_fill_(
        is_on_wrapped_diagonal(self.detach()).to(at::kBool), value);
  }
  auto diagonal = self.diagonal();
  while (diagonal.dim() > 1) {
    diagonal = diagonal.diagonal(0, 0, -1);
  }
  diagonal.fill_(value);
  return self;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "fill_diagonal_",
      function_rule<at::_ops::fill_diagonal_, fill_diagonal_function>);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("diagonal", diagonal_kernel);
  m.impl("diagonal_backward", diagonal_backward_kernel);
}

} // namespace shardtensor::detail
