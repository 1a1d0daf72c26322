#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor {

/// Where the tensor's elements are. Raises for a plain tensor. No
/// communication.
const SpecPtr& spec(const at::Tensor& tensor);

/// A ShardTensor of spec's global sizes whose shard on this rank is `local`
/// (no copy, shared version counter). Differentiable: the gradient of `local`
/// is the local part of the wrapper's gradient, brought to spec's layout with
/// each Partial axis made Replicate, and divided by the number of terms where
/// they are averaged. It shows the strides of `format` (channels-last where it
/// has the dims for it), however `local` lies. `grad_spec` is another layout to
/// bring the gradient to, with the same pieces: Partial on an axis where the
/// ranks' gradients of a replicated `local` shall stay terms. No communication;
/// that of redistribute in backward. Raises when local's sizes are not spec's
/// local sizes on this rank, for a grad_spec of other pieces, or within
/// torch.func; in backward for the terms of a maximum, a minimum or a product.
at::Tensor from_local(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::MemoryFormat format = at::MemoryFormat::Contiguous,
    const SpecPtr& grad_spec = nullptr);

namespace detail {
/// from_local, with strides to show; none: contiguous.
at::Tensor from_local_strided(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::IntArrayRef strides,
    const SpecPtr& grad_spec = nullptr);
} // namespace detail

/// This rank's shard as a plain tensor (no copy, shared version counter).
/// `grad_spec` says how the ranks' gradients of the result are to be read:
/// by default as from_local gives them, in the tensor's own layout with each
/// Partial made Replicate; give Partial on an axis where ranks use a replicated
/// tensor for different work. No communication; that of redistribute in
/// backward.
at::Tensor to_local(
    const at::Tensor& tensor,
    const SpecPtr& grad_spec = nullptr);

/// The same tensor in another layout and the same memory format. Differentiable
/// to any order: the gradient travels back the same way. Communication: none
/// when the layouts are equal (then the tensor itself is returned), only
/// Replicate axes are cut, or pieces become terms (Shard to Partial); an
/// all-reduce for each axis that goes from Partial to Replicate, or from a
/// maximum, a minimum or a product to Shard (one where those are all axes); one
/// exchange for everything else together. Raises when meshes or sizes differ,
/// and for a Partial from another Partial, an average, a maximum or a minimum
/// from a Shard, and a product: go through Replicate.
at::Tensor redistribute(const at::Tensor& tensor, const SpecPtr& to);
/// To with_placements(spec(tensor), placements, partitions).
at::Tensor redistribute(
    const at::Tensor& tensor,
    const std::vector<Placement>& placements,
    const ShardSpec::Partitions& partitions = {});

/// A tangent, which may be plain or lie differently, in the layout of its
/// tensor. Communication: that of redistribute.
at::Tensor tangent_as(const at::Tensor& tangent, const SpecPtr& spec);

/// The whole tensor, plain, on every rank: redistribute to Replicate, then
/// to_local. Without `grad_spec` ranks use it alike, and its gradient is the
/// same on all; under GradientPolicy::Deferred each has a term, and the average
/// of them is the gradient. Communication: that of redistribute.
at::Tensor full_tensor(
    const at::Tensor& tensor,
    const SpecPtr& grad_spec = nullptr);

/// From now on the gradients of this leaf arrive in its own layout (Partial
/// made Replicate), whatever layout an operator's backward finds convenient:
/// x.grad lies as x does. Operators call it when they meet a leaf; other
/// tensors are left alone. No communication.
void keep_gradient_layout(const at::Tensor& tensor);

/// In check mode: raises, on every rank, when a plain tensor that ranks use
/// together differs between them. Communication: two all-reduces in check mode,
/// else none.
void check_equal_on_all_ranks(const at::Tensor& tensor, const Mesh& mesh);

/// A plain tensor, equal on all ranks of the mesh, as a Replicate ShardTensor.
/// Its gradient is plain and complete: see GradientPolicy. In check mode the
/// ranks compare the values and raise when they differ. A ShardTensor is
/// returned as it is. No communication otherwise.
at::Tensor promote(const at::Tensor& tensor, const MeshPtr& mesh);

} // namespace shardtensor
