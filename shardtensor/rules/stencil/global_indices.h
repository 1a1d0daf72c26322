#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/stencil_call.h"

namespace shardtensor::detail {

/// Flat indices into this rank's gathered rows, as max pooling returns them,
/// turned into flat indices into the global input's stencil dims.
at::Tensor global_indices(const at::Tensor& indices, const StencilCall& call);

} // namespace shardtensor::detail
