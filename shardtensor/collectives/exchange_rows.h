#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <c10/util/ArrayRef.h>

#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/exchange.h"

namespace shardtensor::detail {

// What collectives_v.h has, for callers that know their arguments to fit on all
// ranks: nothing is compared, no message but the exchange.

/// See all_gather_v.
at::Tensor all_gather_rows(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group);

// Numbers of the host go by messages of the host, or of the group's device
// where it has none for the host.

/// Each rank's number, in their order.
std::vector<int64_t> gather_number(int64_t own, const std::string& group);

/// A host tensor reduced over all ranks.
at::Tensor reduce_numbers(
    const at::Tensor& own,
    Reduce reduce,
    const std::string& group);

/// See all_to_all_v.
at::Tensor all_to_all_rows(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef in_splits,
    c10::IntArrayRef out_splits,
    const std::string& group);

// ---- what they are made of --------------------------------------------------

int64_t sum(c10::IntArrayRef splits);

/// Sizes with another extent in dim.
std::vector<int64_t> with_extent(
    c10::IntArrayRef sizes,
    int64_t dim,
    int64_t extent);

/// What all ranks must have alike of rows of dim:
/// "all_gather_v of Float tensors [*, 3] along dim 0".
std::string text_of_rows(const char* op, const at::Tensor& x, int64_t dim);

/// One piece per rank, side by side along dim, and the elements of the largest.
std::pair<std::vector<Box>, int64_t> pieces(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents);

/// An exchange in which this rank sends sends[r] to and receives receives[r]
/// from each rank r.
EncodedExchange encode_between(
    std::vector<int64_t> source_sizes,
    const std::vector<Box>& sends,
    const std::vector<Box>& receives,
    std::vector<int64_t> target_sizes,
    std::optional<int64_t> largest_message,
    const Group& group);

/// Every rank's piece, of which `extents` are the extents along dim, to every
/// rank. `sizes` are those of any piece in the other dims.
EncodedExchange encode_all_gather(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents,
    const Group& group);

// Note [Sums of 16-bit numbers]
// An exchange adds what arrives in the tensor's own dtype, one rank after the
// other; fp16 and bf16 would lose small terms. Where a sum over ranks is made
// of them, in forward or backward, the terms arrive side by side instead and
// ATen adds them, in fp32. As many bytes travel.
bool adds_in_fp32(const at::Tensor& x);
bool backward_adds_in_fp32(const at::Tensor& x);

/// `count` times x, side by side along dim.
at::Tensor copies(const at::Tensor& x, int64_t dim, int64_t count);

} // namespace shardtensor::detail
