#include <numeric>

#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <torch/library.h>

#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/reshape_plan.h"
#include "shardtensor/rules/view/kept_plans.h"

// View operators, below autograd: a plan says in which layout the local view
// can be taken. Where the tensor must be redistributed for it, the result stays
// a view all the same: see Note [Moved views].

namespace shardtensor::detail {
namespace {

// ---- other sizes ------------------------------------------------------------

/// local.view(sizes), undefined where its strides forbid it. The call of the
/// dispatcher alone would take as long as all else here.
at::Tensor local_view(const at::Tensor& local, const at::DimVector& sizes) {
  const auto strides =
      at::detail::computeStride(local.sizes(), local.strides(), sizes);
  if (!strides) {
    return {};
  }
  if (is_traced(local) || at::isTensorSubclassLike(local)) {
    return local.view(sizes);
  }
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW,
      c10::Storage(local.storage()),
      local.key_set(),
      local.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(local.storage_offset());
  impl->set_sizes_and_strides(sizes, *strides);
  return view;
}

/// A local view that the strides of this rank's memory forbid is made from a
/// copy, on this rank alone.
at::Tensor reshaped(
    const char* op,
    const at::Tensor& self,
    at::IntArrayRef sizes) {
  const auto& own = spec(self);
  const auto plan = find_view_plan(
      "view",
      self,
      sizes,
      [&] { return plan_reshape(own, sizes.vec()); },
      [&](const at::Tensor& whole) { return whole.view(sizes); });
  note_view_repair(op, own, plan->wanted);
  auto source = view_source(self, plan->wanted);
  const at::DimVector local_sizes(plan->output->local_sizes());
  auto local = local_view(source.local, local_sizes);
  if (!local.defined()) {
    source = contiguous_source(source, self);
    local = source.local.view(local_sizes);
  }
  return wrap_view(
      local, plan->output, plan->strides, self, source, plan->offset);
}

at::Tensor view_kernel(const at::Tensor& self, at::IntArrayRef size) {
  return reshaped("view", self, at::infer_size_dv(size, self.numel()));
}

at::Tensor unsafe_view_kernel(const at::Tensor& self, at::IntArrayRef size) {
  return reshaped("_unsafe_view", self, at::infer_size_dv(size, self.numel()));
}

at::Tensor reshape_alias_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef) {
  return reshaped("reshape", self, size);
}

/// Strides speak of one memory that nobody has.
void check_as_strided(
    const char* op,
    bool allowed,
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      allowed,
      op,
      ": a ShardTensor has no memory of its global sizes, so sizes ",
      size,
      ", strides ",
      stride,
      " cannot be taken of sizes ",
      self.sizes(),
      "; use full_tensor() or to_local() first, or another view operator");
}

at::Tensor as_strided_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<int64_t> storage_offset) {
  const bool is_whole = size == self.sizes() && stride == self.strides() &&
      offset_within(self, storage_offset) == 0;
  check_as_strided("as_strided", is_whole, self, size, stride);
  const auto source = view_source(self, nullptr);
  return wrap_view(
      source.local.alias(), spec(self), self.strides(), self, source);
}

const at::Tensor& as_strided_in_place_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<int64_t>) {
  check_as_strided("as_strided_", false, self, size, stride);
  return self;
}

// ---- dims that move, appear and disappear -----------------------------------

/// Output dim i is input dim dims[i], -1 a new one; other dims have size 1.
struct DimView {
  ViewPlanPtr plan;
  ViewSource source;
  at::Tensor local;
};

at::Tensor rearranged(const at::Tensor& x, const std::vector<int64_t>& dims) {
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
      [&](const at::Tensor& whole) { return rearranged(whole, dims); });
  view.source = view_source(self, view.plan->wanted);
  view.local = rearranged(view.source.local, dims);
  return view;
}

at::Tensor viewed(const at::Tensor& self, const std::vector<int64_t>& dims) {
  const auto view = view_dims(self, dims);
  return wrap_view(
      view.local,
      view.plan->output,
      view.plan->strides,
      self,
      view.source,
      view.plan->offset);
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
at::Tensor& transpose_in_place_kernel(
    at::Tensor& self,
    int64_t dim0,
    int64_t dim1) {
  return view_in_place(self, transposed_dims(self, dim0, dim1));
}
at::Tensor t_kernel(const at::Tensor& self) {
  return viewed(self, t_dims(self));
}
at::Tensor& t_in_place_kernel(at::Tensor& self) {
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
at::Tensor& squeeze_in_place_kernel(at::Tensor& self) {
  return view_in_place(self, squeezed_dims(self, {}));
}
at::Tensor& squeeze_dim_in_place_kernel(at::Tensor& self, int64_t dim) {
  return view_in_place(self, squeezed_dims(self, at::IntArrayRef(&dim, 1)));
}
at::Tensor& squeeze_dims_in_place_kernel(
    at::Tensor& self,
    at::IntArrayRef dims) {
  return view_in_place(self, squeezed_dims(self, dims));
}
at::Tensor unsqueeze_kernel(const at::Tensor& self, int64_t dim) {
  return viewed(self, unsqueezed_dims(self, dim));
}
at::Tensor& unsqueeze_in_place_kernel(at::Tensor& self, int64_t dim) {
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
      source,
      plan->offset);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("view", view_kernel);
  m.impl("_unsafe_view", unsafe_view_kernel);
  m.impl("_reshape_alias", reshape_alias_kernel);
  m.impl("as_strided", as_strided_kernel);
  m.impl("as_strided_", as_strided_in_place_kernel);
  m.impl("permute", permute_kernel);
  m.impl("transpose.int", transpose_kernel);
  m.impl("transpose_", transpose_in_place_kernel);
  m.impl("t", t_kernel);
  m.impl("t_", t_in_place_kernel);
  m.impl("squeeze", squeeze_kernel);
  m.impl("squeeze.dim", squeeze_dim_kernel);
  m.impl("squeeze.dims", squeeze_dims_kernel);
  m.impl("squeeze_", squeeze_in_place_kernel);
  m.impl("squeeze_.dim", squeeze_dim_in_place_kernel);
  m.impl("squeeze_.dims", squeeze_dims_in_place_kernel);
  m.impl("unsqueeze", unsqueeze_kernel);
  m.impl("unsqueeze_", unsqueeze_in_place_kernel);
  m.impl("expand", expand_kernel);
}

} // namespace shardtensor::detail
