#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace shardtensor {

/// From now on the gradients of the module's parameters (`recurse`: of its
/// submodules', too) are sums over the group: each backward's new term is,
/// before it is added to .grad(). For parameters that plain local tensors meet;
/// ShardTensors need nothing of this. fp16 and bf16 are summed in fp32 unless
/// told otherwise. Communication: one all-reduce of each gradient. Raises a
/// RuntimeError that names those that are shared already.
void mark_module_as_shared(
    const torch::nn::Module& module,
    const std::string& group,
    bool recurse = true,
    bool use_fp32_reduction = true);

/// Undoes mark_module_as_shared. Raises a RuntimeError that names those that
/// are not shared.
void unmark_module_as_shared(
    const torch::nn::Module& module,
    bool recurse = true);

// ---- for the Python package, whose modules are others ---

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

void share_gradients(
    const NamedParameters& parameters,
    const std::string& group,
    bool use_fp32_reduction);
void unshare_gradients(const NamedParameters& parameters);

} // namespace shardtensor
