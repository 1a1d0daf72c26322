#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shardtensor {

// Collectives whose pieces differ in size and may be empty, for programs that
// work on local tensors. Each is an exchange, hence differentiable to any
// order. Sums of fp16 and bf16, in backward, too, are made in fp32. Arguments
// that do not fit on one rank, or to those of the other ranks, are one error on
// all of them, before anything is sent, and so is an x that requires grad on
// some ranks only: backward would wait for the others. Communication: an
// exchange, and before it three integers from each rank to each. Thread safety
// / ordering: as in primitives.h.

/// Every rank's x, side by side along dim, on every rank. sizes[r] is the
/// extent of rank r's x in that dim. The adjoint is reduce_scatter_v.
///
/// Example: ranks 0 and 1 hold {1, 2} and {3}: with sizes {2, 1} both get
/// {1, 2, 3}.
at::Tensor all_gather_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group);

/// The sum of every rank's x (same sizes on all), of which rank r gets sizes[r]
/// rows along dim, in rank order. The adjoint is all_gather_v.
///
/// Example: ranks 0 and 1 hold {1, 2, 3} and {4, 5, 6}: with sizes {2, 1} they
/// get {5, 7} and {9}.
at::Tensor reduce_scatter_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group);

/// Sends in_splits[r] rows of x along dim to each rank r, in rank order, and
/// puts side by side the out_splits[r] rows that each rank r sends here. The
/// adjoint swaps the splits.
///
/// Example: rank 0 holds {1, 2, 3} with in_splits {1, 2}, rank 1 holds {4} with
/// {1, 0}. They get {1, 4} (out_splits {1, 1}) and {2, 3} ({2, 0}).
at::Tensor all_to_all_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef in_splits,
    c10::IntArrayRef out_splits,
    const std::string& group);

/// Every rank's x, side by side along dim, on the rank dst; zeros of that shape
/// elsewhere. sizes as in all_gather_v. The adjoint hands dst's gradient out
/// and ignores the others'.
///
/// Example: ranks 0 and 1 hold {1, 2} and {3}: with sizes {2, 1} and dst 1,
/// rank 1 gets {1, 2, 3} and rank 0 {0, 0, 0}.
at::Tensor gather_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    int64_t dst,
    const std::string& group);

/// The sizes[r] rows of src's x along dim that are rank r's, in rank order. Of
/// the others' x only the other dims' sizes, dtype, device and whether it
/// requires grad count; their gradient is zero, src's is joined from all.
///
/// Example: rank 0 holds {1, 2, 3}: with sizes {2, 1} and src 0, rank 0 gets
/// {1, 2} and rank 1 {3}.
at::Tensor scatter_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    int64_t src,
    const std::string& group);

/// The rows indices[r] of x along dim to each rank r; the out_splits[r] rows
/// that each rank r sends here, side by side. The adjoint adds up the gradients
/// of a row that went several ways.
///
/// Example: rank 0 holds {1, 2} and sends {[1], [1, 0]}, rank 1 holds {3} and
/// sends {[0], []}. They get {2, 3} (out_splits {1, 1}) and {2, 1} ({2, 0}).
at::Tensor indexed_all_to_all_v(
    const at::Tensor& x,
    int64_t dim,
    at::TensorList indices,
    c10::IntArrayRef out_splits,
    const std::string& group);

/// src's x on every rank. Of the others' x only sizes, dtype, device and
/// whether it requires grad count; their gradient is zero, src's is the sum of
/// all.
at::Tensor broadcast(
    const at::Tensor& x,
    int64_t src,
    const std::string& group);

} // namespace shardtensor
