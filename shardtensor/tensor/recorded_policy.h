#pragma once

#include <vector>

#include "shardtensor/tensor/parameter_gradients.h"

namespace shardtensor::detail {

/// complete_gradients by the policy under which forward recorded the node, not
/// the one of the moment: modules of several policies may share a backward.
std::vector<at::Tensor> complete_gradients(
    GradientPolicy policy,
    const std::vector<at::Tensor>& terms,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes);

} // namespace shardtensor::detail
