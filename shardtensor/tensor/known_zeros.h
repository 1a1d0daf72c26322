#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "shardtensor/layout/interval.h"

namespace shardtensor::detail {

/// Note [Known zeros]
/// A spectral layer keeps a few modes, and the rest of its spectrum is zero: of
/// what it writes into a tensor of zeros, and of the gradient of what it took
/// from a spectrum. A transform that knows it moves and transforms rows that
/// are not zero alone. So a ShardTensor may know a box outside of which its
/// elements are zero whatever was computed. It is knowledge beside the values,
/// which are there as always: who does not ask is right. It holds for one
/// version of the tensor, and ends where its data, or that of a view, gets
/// versions of its own (`.data`); views and detached copies do not have it.
/// Ranks that run the same program agree about it, as about moved views. What
/// PyTorch's versions do not see, writes into to_local().numpy(), it does not.
///
/// Example: out = zeros(2, 3, 64, 33); out[:, :, :8, :9] = f(x): out knows
/// [0, 2) x [0, 3) x [0, 8) x [0, 9).

/// Says that `tensor` is zero outside of `box`, of global indices, as it is
/// now; outside of an empty one it is zero everywhere. Nothing is noted where
/// writes leave no trace: in inference mode and where a compiler traces.
void note_known_zeros(const at::Tensor& tensor, Box box);

/// Outside of it `tensor` is zero; null: nothing is known, or nothing was
/// written yet.
const Box* nonzero_box(const at::Tensor& tensor);

/// What a tensor knows after a write into a view of it.
struct ZerosBesideWrite {
  at::Tensor base;
  Box box;
};
/// To be asked before the write, and noted after it. None where nothing is
/// known, or where the view stands in its base is not.
std::optional<ZerosBesideWrite> zeros_beside_write(const at::Tensor& view);

/// Outside of which a sum of both is zero, as that of the gradients of two
/// parts of a spectrum. None where nothing is known of one.
std::optional<Box> nonzero_box_of_sum(const at::Tensor& a, const at::Tensor& b);

/// A node whose tensor has known zeros where its first input has them.
struct PassesZerosOn : torch::autograd::Node {};

/// Note [Gradients of zeros]
/// Known zeros depend on nothing, so their gradient leads nowhere, and nobody
/// misses it but who asks for it on the way: by a hook, by retain_grad or by
/// torch.autograd.grad. Inside backward, whether anybody does, of a tensor that
/// `made` returned; true where something other than writes and moves made it.
/// Ranks must agree about who asks, as about all that backward sends.
bool zeros_are_read(torch::autograd::Node& made);

} // namespace shardtensor::detail
