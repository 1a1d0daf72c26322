#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "shardtensor/layout/placement.h"

namespace shardtensor {

// Values for logging: many in one message. As all_reduce, of which they are
// made, they expect the same call on every rank.

/// Every tensor reduced over the ranks of the group, new ones of the same
/// shapes, dtypes and devices: sum, average, maximum or minimum. They travel in
/// one buffer of `buffer_dtype` (none: the tensors' promoted dtype, floats as
/// fp32 at least, averages of integers as int64) on `device` (none: the first
/// tensor's). An average of integers is rounded towards zero, of booleans it is
/// whether all are true. Communication: one all-reduce of all
/// elements. Raises a ValueError for a product, and for integers beside floats
/// without a buffer_dtype.
///
/// Example: ranks 0 and 1 hold {1, 2} and {3, 4}: both get {4, 6}.
std::vector<at::Tensor> fused_all_reduce(
    const std::vector<at::Tensor>& tensors,
    Reduce reduce,
    const std::string& group,
    std::optional<at::ScalarType> buffer_dtype = std::nullopt,
    std::optional<at::Device> device = std::nullopt);

/// The mean (or sum) of every rank's loss, one number, in fp32; zero on other
/// ranks than `dst`. Communication: one all-reduce of one number.
at::Tensor reduce_loss(
    const at::Tensor& loss,
    int64_t dst,
    bool mean,
    const std::string& group);

// ---- for the Python package, whose messages may be asynchronous ---

/// The dtype that they travel in unless told otherwise.
at::ScalarType fused_dtype(
    const std::vector<at::Tensor>& tensors,
    Reduce reduce);
/// The tensors' elements in one buffer, and a buffer's as tensors like these.
at::Tensor fuse(
    const std::vector<at::Tensor>& tensors,
    at::ScalarType dtype,
    std::optional<at::Device> device);
std::vector<at::Tensor> split_like(
    const at::Tensor& buffer,
    const std::vector<at::Tensor>& tensors);
/// `sum` over the ranks divided by their number; integers towards zero.
at::Tensor average(const at::Tensor& sum, int64_t ranks);

} // namespace shardtensor
