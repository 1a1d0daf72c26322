#include "shardtensor/rules/spectra/complex_transform.h"

#include <algorithm>
#include <optional>

#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/known_zeros.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

bool transforms(const Dims& dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

/// Some rows of some dims of a layout.
struct Part {
  struct Rows {
    int64_t dim;
    Interval local; // of this rank
  };
  SpecPtr spec;
  std::vector<Rows> rows;

  Tensor of(Tensor local) const {
    for (const auto& [dim, own] : rows) {
      local = local.narrow(dim, own.begin, own.extent());
    }
    return local;
  }
};

/// The rows of `box` of `dims`.
Part part_of(SpecPtr spec, const Box& box, const Dims& dims) {
  Part part{std::move(spec), {}};
  for (const int64_t dim : dims) {
    const auto& rows = box[dim];
    const auto plan = plan_slice(part.spec, dim, rows.begin, rows.end, 1);
    part.rows.push_back({dim, {plan.arguments[0], plan.arguments[1]}});
    part.spec = plan.output;
  }
  return part;
}

bool is_contiguous_along(const SpecPtr& spec, int64_t dim) {
  return !spec->is_sharded(dim) || spec->partition(dim).is_contiguous();
}

/// The dims of which rows outside of the box may stay where they are.
Dims narrow_dims(
    const SpecPtr& from,
    const ComplexTransform& work,
    const Box& box) {
  Dims dims;
  for (int64_t dim = 0; dim < from->dim(); ++dim) {
    if (!transforms(work.dims, dim) &&
        2 * box[dim].extent() <= from->size(dim) &&
        is_contiguous_along(from, dim) && is_contiguous_along(work.at, dim) &&
        is_contiguous_along(work.to, dim)) {
      dims.push_back(dim);
    }
  }
  return dims;
}

/// A redistribution whose result has `dims` innermost in memory, as their
/// transform wants it: it would copy the tensor for that.
Tensor redistribute_lines(
    const Tensor& local,
    const SpecPtr& from,
    const SpecPtr& to,
    const Dims& dims) {
  if (from == to) {
    return local;
  }
  Dims order;
  for (int64_t dim = 0; dim < from->dim(); ++dim) {
    if (!transforms(dims, dim)) {
      order.push_back(dim);
    }
  }
  order.insert(order.end(), dims.begin(), dims.end());
  Dims back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    back[order[i]] = static_cast<int64_t>(i);
  }
  return redistribute_local(
             local.permute(order),
             plan_dims(from, order).output,
             plan_dims(to, order).output)
      .permute(back);
}

Tensor transform_lines(
    const Tensor& local,
    const SpecPtr& from,
    const SpecPtr& at,
    const SpecPtr& to,
    const ComplexTransform& work) {
  auto lines = redistribute_lines(local, from, at, work.dims);
  if (lines.numel() > 0) { // PyTorch takes no empty tensor
    lines = at::_fft_c2c(lines, work.dims, work.normalization, work.forward);
  }
  return redistribute_local(lines, at, to);
}

Tensor transform_part(
    const Tensor& local,
    const SpecPtr& from,
    const ComplexTransform& work,
    const Box& box,
    const Dims& dims) {
  const auto given = part_of(from, box, dims);
  const auto at = part_of(work.at, box, dims);
  const auto to = part_of(work.to, box, dims);
  const auto lines =
      transform_lines(given.of(local), given.spec, at.spec, to.spec, work);
  auto result = at::zeros(work.to->local_sizes(), lines.options());
  to.of(result).copy_(lines);
  return result;
}

/// Of `rows`, if any, only those of the dims that may be narrowed.
Tensor transform_local(
    const Tensor& x,
    const ComplexTransform& work,
    const Box* rows,
    const Dims& narrowed) {
  const auto& local = impl_of(x)->local();
  const auto& from = spec(x);
  const auto result = narrowed.empty()
      ? transform_lines(local, from, work.at, work.to, work)
      : transform_part(local, from, work, *rows, narrowed);
  return result.is_alias_of(local) ? result.clone() : result;
}

/// Outside of which the result is zero: of a box of zeros, but lines that are
/// transformed have none left, ...
Box transformed_box(Box box, const SpecPtr& spec, const Dims& dims) {
  for (const int64_t dim : dims) {
    box[dim] = {0, spec->size(dim)};
  }
  return box;
}

/// ... or of a box of what is read, of which some dims were narrowed.
Box narrowed_box(const Box& read, const SpecPtr& spec, const Dims& narrowed) {
  auto box = whole_box(spec->sizes());
  for (const int64_t dim : narrowed) {
    box[dim] = read[dim];
  }
  return box;
}

struct ComplexTransformBackward : PassesZerosOn {
  ComplexTransformBackward(ComplexTransform adjoint, std::optional<Box> nonzero)
      : adjoint_(std::move(adjoint)), nonzero_(std::move(nonzero)) {}
  std::string name() const override {
    return "ShardTensorComplexTransformBackward";
  }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {Tensor()};
    }
    const auto grad = promote(grads[0], adjoint_.at->mesh());
    auto adjoint = adjoint_;
    if (nonzero_ && !zeros_are_read(*next_edge(0).function)) {
      adjoint.read = nonzero_;
    }
    return {complex_transform(grad.resolve_conj().resolve_neg(), adjoint)};
  }
  ComplexTransform adjoint_;
  std::optional<Box> nonzero_; // outside of it the transformed tensor is zero
};

} // namespace

Tensor complex_transform(
    const Tensor& x,
    const ComplexTransform& work,
    at::IntArrayRef strides) {
  const auto* known = nonzero_box(x);
  const auto* rows = work.read ? &*work.read : known;
  const auto narrowed = rows ? narrow_dims(spec(x), work, *rows) : Dims();
  Tensor result;
  {
    at::NoGradGuard no_grad;
    result = wrap(transform_local(x, work, rows, narrowed), work.to, strides);
  }
  if (work.read) {
    note_known_zeros(result, narrowed_box(*rows, work.to, narrowed));
  } else if (known) {
    note_known_zeros(result, transformed_box(*known, work.to, work.dims));
  }
  connect<ComplexTransformBackward>(
      result,
      x,
      ComplexTransform{
          work.at,
          without_partial(spec(x)),
          work.dims,
          work.normalization,
          !work.forward,
          work.read},
      known ? std::optional<Box>(*known) : std::nullopt);
  carry_tangent(result, x, [&](const auto& t) {
    return complex_transform(tangent_as(t, spec(x)), work, strides);
  });
  return result;
}

} // namespace shardtensor::detail
