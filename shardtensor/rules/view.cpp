#include <numeric>

#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/diagonal_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_backward.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

#include "shardtensor/rules/view_call.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor.h"

// View operators, below autograd: a plan says in which layout the local view
// can be taken. Where the tensor must be redistributed for it, the result stays
// a view all the same: see Note [Moved views].

namespace shardtensor {
namespace {

// ---- other sizes ------------------------------------------------------------

bool is_viewable(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return at::detail::computeStride(tensor.sizes(), tensor.strides(), sizes)
      .has_value();
}

/// A local view that the strides of this rank's memory forbid is made from a
/// copy, on this rank alone.
at::Tensor reshaped(
    const char* op,
    const at::Tensor& self,
    const std::vector<int64_t>& sizes) {
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "view",
      self,
      sizes,
      [&] { return plan_reshape(own, sizes); },
      [&](const at::Tensor& whole) { return whole.view(sizes); });
  note_view_repair(op, own, plan->wanted);
  auto source = view_source(self, plan->wanted);
  const auto& local_sizes = plan->output->local_sizes();
  if (!is_viewable(source.local, local_sizes)) {
    source = contiguous_source(source, self);
  }
  return wrap_view(
      source.local.view(local_sizes),
      plan->output,
      plan->strides,
      self,
      source);
}

at::Tensor view_kernel(const at::Tensor& self, at::IntArrayRef size) {
  return reshaped("view", self, at::infer_size(size, self.numel()));
}

at::Tensor unsafe_view_kernel(const at::Tensor& self, at::IntArrayRef size) {
  return reshaped("_unsafe_view", self, at::infer_size(size, self.numel()));
}

at::Tensor reshape_alias_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef) {
  return reshaped("reshape", self, size.vec());
}

/// Strides speak of one memory that nobody has.
at::Tensor as_strided_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<int64_t> storage_offset) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      size == self.sizes() && stride == self.strides() &&
          storage_offset.value_or(0) == 0,
      "as_strided: a ShardTensor has no memory of its global sizes, so sizes ",
      size,
      ", strides ",
      stride,
      " cannot be taken of sizes ",
      self.sizes(),
      "; use full_tensor() or to_local() first, or another view operator");
  const auto source = view_source(self, nullptr);
  return wrap_view(
      source.local.alias(), spec(self), self.strides(), self, source);
}

// ---- dims that move, appear and disappear -----------------------------------

/// Output dim i is input dim dims[i], -1 a new one; other dims have size 1.
struct DimView {
  ViewPlanPtr plan;
  ViewSource source;
  at::Tensor local;
};

at::Tensor with_dims(const at::Tensor& x, const std::vector<int64_t>& dims) {
  std::vector<int64_t> order;
  std::vector<bool> kept(x.dim(), false);
  for (const int64_t dim : dims) {
    if (dim >= 0) {
      order.push_back(dim);
      kept[dim] = true;
    }
  }
  const auto named = order.size();
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (!kept[dim]) {
      order.push_back(dim);
    }
  }
  auto view = x.permute(order);
  for (auto dropped = named; dropped < order.size(); ++dropped) {
    view = view.squeeze(-1);
  }
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    if (dims[dim] < 0) {
      view = view.unsqueeze(static_cast<int64_t>(dim));
    }
  }
  return view;
}

DimView view_dims(const at::Tensor& self, const std::vector<int64_t>& dims) {
  const auto& own = spec(self);
  DimView view;
  view.plan = find_view_plan(
      "permute",
      self,
      dims,
      [&] { return plan_dims(own, dims); },
      [&](const at::Tensor& whole) { return with_dims(whole, dims); });
  view.source = view_source(self, view.plan->wanted);
  view.local = with_dims(view.source.local, dims);
  return view;
}

at::Tensor viewed(const at::Tensor& self, const std::vector<int64_t>& dims) {
  const auto view = view_dims(self, dims);
  return wrap_view(
      view.local, view.plan->output, view.plan->strides, self, view.source);
}

/// The in-place form: the tensor itself looks at its memory in another way.
at::Tensor& view_in_place(at::Tensor& self, const std::vector<int64_t>& dims) {
  const auto view = view_dims(self, dims);
  impl_of(self)->set(view.local, view.plan->output, view.plan->strides);
  impl_of(self)->set_moved_view(view.source.moved);
  return self;
}

std::vector<int64_t> all_dims(const at::Tensor& self) {
  std::vector<int64_t> dims(self.dim());
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

std::vector<int64_t> permuted_dims(
    const at::Tensor& self,
    at::IntArrayRef dims) {
  TORCH_CHECK(
      static_cast<int64_t>(dims.size()) == self.dim(),
      "permute: expected ",
      self.dim(),
      " dims, got ",
      dims);
  std::vector<int64_t> result;
  std::vector<bool> seen(self.dim(), false);
  for (const int64_t dim : dims) {
    result.push_back(at::maybe_wrap_dim(dim, self.dim()));
    TORCH_CHECK(!seen[result.back()], "permute: a dim appears twice in ", dims);
    seen[result.back()] = true;
  }
  return result;
}

std::vector<int64_t> transposed_dims(
    const at::Tensor& self,
    int64_t dim0,
    int64_t dim1) {
  auto dims = all_dims(self);
  dim0 = at::maybe_wrap_dim(dim0, self.dim());
  dim1 = at::maybe_wrap_dim(dim1, self.dim());
  if (!dims.empty()) {
    std::swap(dims[dim0], dims[dim1]);
  }
  return dims;
}

std::vector<int64_t> t_dims(const at::Tensor& self) {
  TORCH_CHECK(
      self.dim() <= 2,
      "t: expected a tensor with at most 2 dims, got sizes ",
      self.sizes());
  return transposed_dims(self, 0, self.dim() < 2 ? 0 : 1);
}

/// All dims but those of size 1 among `dims`.
std::vector<int64_t> squeezed_dims(
    const at::Tensor& self,
    at::OptionalIntArrayRef dims) {
  std::vector<bool> named(self.dim(), !dims.has_value());
  for (const int64_t dim : dims.value_or(at::IntArrayRef())) {
    const auto wrapped = at::maybe_wrap_dim(dim, self.dim());
    if (self.dim() > 0) {
      named[wrapped] = true;
    }
  }
  std::vector<int64_t> result;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!named[dim] || self.size(dim) != 1) {
      result.push_back(dim);
    }
  }
  return result;
}

std::vector<int64_t> unsqueezed_dims(const at::Tensor& self, int64_t dim) {
  auto dims = all_dims(self);
  dims.insert(dims.begin() + at::maybe_wrap_dim(dim, self.dim() + 1), -1);
  return dims;
}

at::Tensor permute_kernel(const at::Tensor& self, at::IntArrayRef dims) {
  return viewed(self, permuted_dims(self, dims));
}
at::Tensor transpose_kernel(
    const at::Tensor& self,
    int64_t dim0,
    int64_t dim1) {
  return viewed(self, transposed_dims(self, dim0, dim1));
}
at::Tensor& transpose_in_place(at::Tensor& self, int64_t dim0, int64_t dim1) {
  return view_in_place(self, transposed_dims(self, dim0, dim1));
}
at::Tensor t_kernel(const at::Tensor& self) {
  return viewed(self, t_dims(self));
}
at::Tensor& t_in_place(at::Tensor& self) {
  return view_in_place(self, t_dims(self));
}
at::Tensor squeeze_kernel(const at::Tensor& self) {
  return viewed(self, squeezed_dims(self, {}));
}
at::Tensor squeeze_dim_kernel(const at::Tensor& self, int64_t dim) {
  return viewed(self, squeezed_dims(self, at::IntArrayRef(&dim, 1)));
}
at::Tensor squeeze_dims_kernel(const at::Tensor& self, at::IntArrayRef dims) {
  return viewed(self, squeezed_dims(self, dims));
}
at::Tensor& squeeze_in_place(at::Tensor& self) {
  return view_in_place(self, squeezed_dims(self, {}));
}
at::Tensor& squeeze_dim_in_place(at::Tensor& self, int64_t dim) {
  return view_in_place(self, squeezed_dims(self, at::IntArrayRef(&dim, 1)));
}
at::Tensor& squeeze_dims_in_place(at::Tensor& self, at::IntArrayRef dims) {
  return view_in_place(self, squeezed_dims(self, dims));
}
at::Tensor unsqueeze_kernel(const at::Tensor& self, int64_t dim) {
  return viewed(self, unsqueezed_dims(self, dim));
}
at::Tensor& unsqueeze_in_place(at::Tensor& self, int64_t dim) {
  return view_in_place(self, unsqueezed_dims(self, dim));
}

at::Tensor expand_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    bool implicit) {
  TORCH_CHECK(
      static_cast<int64_t>(size.size()) >= self.dim(),
      "expand: expected at least ",
      self.dim(),
      " sizes for a tensor of sizes ",
      self.sizes(),
      ", got ",
      size);
  const auto sizes =
      std::get<0>(at::inferExpandGeometry(self.sizes(), self.strides(), size));
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "expand",
      self,
      sizes,
      [&] { return plan_expand(own, sizes); },
      [&](const at::Tensor& whole) { return whole.expand(sizes); });
  const auto source = view_source(self, plan->wanted);
  return wrap_view(
      source.local.expand(plan->output->local_sizes(), implicit),
      plan->output,
      plan->strides,
      self,
      source);
}

// ---- views along dims that must be whole ------------------------------------

/// The layout of `wanted` when `dims` (whole) go and new whole dims of `sizes`
/// come at the end.
SpecPtr with_new_dims(
    const SpecPtr& wanted,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& sizes) {
  std::vector<int64_t> kept;
  for (int64_t dim = 0; dim < wanted->dim(); ++dim) {
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
      kept.push_back(dim);
    }
  }
  auto order = kept;
  order.insert(order.end(), dims.begin(), dims.end());
  auto moved = plan_dims(wanted, order).output;
  auto new_sizes = moved->sizes();
  auto partitions = moved->partitions();
  new_sizes.resize(kept.size());
  partitions.resize(kept.size());
  new_sizes.insert(new_sizes.end(), sizes.begin(), sizes.end());
  partitions.resize(new_sizes.size());
  return make_spec(
      wanted->mesh(), new_sizes, moved->placements(), std::move(partitions));
}

int64_t diagonal_size(int64_t rows, int64_t columns, int64_t offset) {
  return std::max<int64_t>(
      offset >= 0 ? std::min(rows, columns - offset)
                  : std::min(rows + offset, columns),
      0);
}

at::Tensor diagonal_kernel(
    const at::Tensor& self,
    int64_t offset,
    int64_t dim1,
    int64_t dim2) {
  dim1 = at::maybe_wrap_dim(dim1, self.dim());
  dim2 = at::maybe_wrap_dim(dim2, self.dim());
  TORCH_CHECK(
      dim1 != dim2, "diagonal: expected two different dims, got ", dim1);
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "diagonal",
      self,
      {offset, dim1, dim2},
      [&] {
        const auto wanted = whole_dims(own, {dim1, dim2});
        const auto size =
            diagonal_size(self.size(dim1), self.size(dim2), offset);
        return ViewPlan{wanted, with_new_dims(wanted, {dim1, dim2}, {size})};
      },
      [&](const at::Tensor& whole) {
        return whole.diagonal(offset, dim1, dim2);
      });
  note_view_repair("diagonal", own, plan->wanted);
  const auto source = view_source(self, plan->wanted);
  return wrap_view(
      source.local.diagonal(offset, dim1, dim2),
      plan->output,
      plan->strides,
      self,
      source);
}

/// The layout of `spec` when whole dims are put where they were: dims[i] gets
/// sizes[i]; the other dims stand in order in front of the last `dropped`.
SpecPtr with_dims_back(
    const SpecPtr& spec,
    int64_t dropped,
    const std::vector<int64_t>& input_sizes,
    const std::vector<int64_t>& dims) {
  auto placements = spec->placements();
  ShardSpec::Partitions partitions(input_sizes.size());
  int64_t from = 0;
  for (int64_t dim = 0; dim < static_cast<int64_t>(input_sizes.size()); ++dim) {
    if (std::find(dims.begin(), dims.end(), dim) != dims.end()) {
      continue;
    }
    if (spec->is_sharded(from)) {
      partitions[dim] = spec->partition(from);
      for (const int64_t axis : spec->axes(from)) {
        placements[axis] = Placement::shard(dim);
      }
    }
    ++from;
  }
  TORCH_INTERNAL_ASSERT(from == spec->dim() - dropped);
  return make_spec(
      spec->mesh(), input_sizes, placements, std::move(partitions));
}

at::Tensor diagonal_backward_kernel(
    const at::Tensor& grad,
    at::IntArrayRef input_sizes,
    int64_t offset,
    int64_t dim1,
    int64_t dim2) {
  const auto dims = static_cast<int64_t>(input_sizes.size());
  const auto wanted = whole_dims(spec(grad), {grad.dim() - 1});
  const auto output = with_dims_back(
      wanted,
      1,
      input_sizes.vec(),
      {at::maybe_wrap_dim(dim1, dims), at::maybe_wrap_dim(dim2, dims)});
  const auto local =
      redistribute_local(impl_of(grad)->local(), spec(grad), wanted);
  return wrap(
      at::diagonal_backward(local, output->local_sizes(), offset, dim1, dim2),
      output);
}

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
  const auto plan = find_view_plan(
      "unfold",
      self,
      {dim, size, step},
      [&] {
        if (own->dim() == 0) {
          return ViewPlan{own, with_new_dims(own, {}, {size})};
        }
        const auto wanted = whole_dims(own, {dim});
        auto sizes = own->sizes();
        sizes[dim] = (extent - size) / step + 1;
        auto partitions = wanted->partitions();
        sizes.push_back(size);
        partitions.emplace_back();
        return ViewPlan{
            wanted,
            make_spec(own->mesh(), sizes, wanted->placements(), partitions)};
      },
      [&](const at::Tensor& whole) { return whole.unfold(dim, size, step); });
  note_view_repair("unfold", own, plan->wanted);
  const auto source = view_source(self, plan->wanted);
  return wrap_view(
      source.local.unfold(dim, size, step),
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
  auto partitions = wanted->partitions();
  partitions.resize(dims);
  const auto output = make_spec(
      wanted->mesh(), input_sizes.vec(), wanted->placements(), partitions);
  const auto local =
      redistribute_local(impl_of(grad)->local(), spec(grad), wanted);
  return wrap(
      at::unfold_backward(local, output->local_sizes(), dim, size, step),
      output);
}

// ---- other element types ----------------------------------------------------

/// Contiguous, with the usual strides for dims of size 0 and 1, too.
bool is_standard(const at::Tensor& tensor) {
  int64_t stride = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    if (tensor.stride(dim) != stride) {
      return false;
    }
    stride *= std::max<int64_t>(tensor.size(dim), 1);
  }
  return true;
}

at::Tensor view_as_real_kernel(const at::Tensor& self) {
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "view_as_real",
      self,
      {},
      [&] { return ViewPlan{own, with_new_dims(own, {}, {2})}; },
      [](const at::Tensor& whole) { return at::view_as_real(whole); });
  const auto source = view_source(self, nullptr);
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
      "view_as_complex: expected a last dim of size 2, got sizes ",
      self.sizes());
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
  auto source = view_source(self, plan->wanted);
  if (!is_standard(source.local)) {
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
  const auto plan = find_view_plan(
      "view.dtype",
      self,
      {from, to},
      [&] { return plan_dtype(own, from, to); },
      [&](const at::Tensor& whole) { return whole.view(dtype); });
  note_view_repair("view.dtype", own, plan->wanted);
  auto source = view_source(self, plan->wanted);
  if (from != to && !is_standard(source.local)) {
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

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("view", view_kernel);
  m.impl("_unsafe_view", unsafe_view_kernel);
  m.impl("_reshape_alias", reshape_alias_kernel);
  m.impl("as_strided", as_strided_kernel);
  m.impl("permute", permute_kernel);
  m.impl("transpose.int", transpose_kernel);
  m.impl("transpose_", transpose_in_place);
  m.impl("t", t_kernel);
  m.impl("t_", t_in_place);
  m.impl("squeeze", squeeze_kernel);
  m.impl("squeeze.dim", squeeze_dim_kernel);
  m.impl("squeeze.dims", squeeze_dims_kernel);
  m.impl("squeeze_", squeeze_in_place);
  m.impl("squeeze_.dim", squeeze_dim_in_place);
  m.impl("squeeze_.dims", squeeze_dims_in_place);
  m.impl("unsqueeze", unsqueeze_kernel);
  m.impl("unsqueeze_", unsqueeze_in_place);
  m.impl("expand", expand_kernel);
  m.impl("diagonal", diagonal_kernel);
  m.impl("diagonal_backward", diagonal_backward_kernel);
  m.impl("unfold", unfold_kernel);
  m.impl("unfold_backward", unfold_backward_kernel);
  m.impl("view_as_real", view_as_real_kernel);
  m.impl("view_as_complex", view_as_complex_kernel);
  m.impl("view.dtype", view_dtype_kernel);
}

} // namespace shardtensor
