#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Note [Indices out of bounds]
// Each rank works with a part of an index, and would raise alone where only its
// part is out of bounds: the others would wait for it. So the whole index is
// checked first, on CPUs; elsewhere PyTorch does not raise either, but kernels
// assert. A plan is made of numbers on the host: for one a device is waited
// for, and what is out of bounds is the error that it is on CPUs. A graph has
// the check of a cut index as an operator, for whenever it runs.

/// Raises on every rank where `index` leaves [0, extent), or [-extent, extent).
/// Communication: an all-reduce of two numbers where the index is cut.
void check_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative = false);

/// The same of an index from which a plan is made, on any device.
void check_planned_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative = false);

/// The same of a cut index, dim 0, and the largest of each of `numbers`, a
/// plain tensor of one dim, over all ranks of the mesh. Communication: an
/// all-reduce of them, and of two numbers where the bounds are not known.
std::vector<int64_t> check_planned_index_and_reduce(
    const std::string& op,
    const at::Tensor& index,
    int64_t extent,
    bool may_be_negative,
    const at::Tensor& numbers);

/// One of the indices that leave [lowest, extent), the same on all ranks; none
/// while a compiler traces. A device is waited for. Communication: as above.
std::optional<int64_t> find_outside(
    const std::string& op,
    const at::Tensor& index,
    int64_t lowest,
    int64_t extent);

/// As check_index where PyTorch raises a RuntimeError: gather, scatter and
/// unpooling.
void check_gather_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent);

} // namespace shardtensor::detail
