#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shardtensor {

// Entering and leaving regions in which ranks share one model's work, on local
// tensors. The backward of each is another one's forward, which is the
// derivative where all ranks compute the same loss; differentiable to any
// order. Sums of fp16 and bf16 are made in fp32. Arguments that do not fit on
// one rank, or to those of the other ranks, are one error on all of them, and
// so is an x that requires grad on some ranks only.
// Communication: what is said below, and in forward three integers from each
// rank to each. Thread safety / ordering: as in primitives.h.

/// A view of x, the same on all ranks, for work that each rank does a part of;
/// gradients are summed over the ranks. Communication: none; an all-reduce in
/// backward.
at::Tensor copy_to_parallel_region(
    const at::Tensor& x,
    const std::string& group);

/// The sum of every rank's x, a new tensor; the gradient passes as it is.
/// Communication: an all-reduce.
at::Tensor reduce_from_parallel_region(
    const at::Tensor& x,
    const std::string& group);

/// This rank's rows of x, the same on all ranks, a new tensor: sizes[r] are
/// those of rank r, side by side along dim. Gradients are joined.
/// Communication: none; an all-gather in backward.
at::Tensor scatter_to_parallel_region(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group);

/// Every rank's x, side by side along dim; sizes[r] is the extent of rank r's.
/// Of the gradient each rank takes its own rows. Communication: an all-gather.
///
/// Example: ranks 0 and 1 hold {1, 2} and {3}: with sizes {2, 1} both get
/// {1, 2, 3}, and of a gradient {4, 5, 6} on both ranks {4, 5} and {6}, where
/// all_gather_v's sums give {8, 10} and {12}.
at::Tensor gather_from_parallel_region(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group);

} // namespace shardtensor
