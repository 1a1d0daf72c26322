#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/stencil_call.h"
#include "shardtensor/rules/stencil/conv_overlap_op.h"

namespace shardtensor::detail {

// A convolution over a dim that is cut, without the copy that would join a
// rank's rows with its neighbours': the local operator runs on the rows that
// the rank owns while the neighbours' rows (the slab) travel, then the
// outermost windows are computed again from slab and owned rows. In backward
// the slab's gradient travels while that of the owned rows is computed.

struct ConvOverlap {
  OverlapWork work;
  at::MemoryFormat format; // of the input
  StencilCall joined; // for double backward, which joins the rows
  std::vector<int64_t> joined_padding;
  EncodedExchange return_joined;
};

/// A plan for the call that `joined` describes, on an input that shows
/// `format`, if one dim is all that gathers and every rank has rows, and its
/// outputs are all that the owned rows give. The same answer on every rank.
std::shared_ptr<const ConvOverlap> plan_conv_overlap(
    const StencilCall& joined,
    at::MemoryFormat format,
    const std::vector<Stencil>& stencils,
    const std::vector<int64_t>& joined_padding,
    const std::vector<int64_t>& stride,
    const std::vector<int64_t>& dilation,
    int64_t groups);

/// The owned outputs of this rank's input with a batch dim, weight and bias, in
/// one dtype. Differentiable twice. Communication: one
/// exchange, and one in backward.
at::Tensor conv_overlap(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const std::shared_ptr<const ConvOverlap>& plan);

} // namespace shardtensor::detail
