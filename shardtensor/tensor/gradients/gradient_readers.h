#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "shardtensor/layout/mesh.h"

namespace shardtensor {

// Note [Readers of gradients]
// DDP and FSDP average the gradients of parameters over their ranks. FSDP takes
// them inside backward, as soon as a module's inputs have theirs, and frees the
// parameters. Nothing in autograd says so: wrappers do, or who knows them. The
// note is a hook that does nothing, so it goes with the parameter, and a
// gradient that has a reader is one that cannot wait for the end of backward.

/// Whoever wraps `leaf` takes its gradient as soon as that is there, and
/// averages it over the global `ranks`. The last note counts.
void note_reader(const at::Tensor& leaf, std::vector<int64_t> ranks);

/// `tell` is called at the start of each backward that completes gradients, to
/// note readers that nobody has noted. Kept until the process ends.
void set_gradient_readers(std::function<void()> tell);

namespace detail {

/// Calls `tell` where this backward has not yet.
void learn_readers();

/// Raises, on every rank, where a reader of the gradient that `next` leads to
/// averages over other ranks than all that contribute a term, those of `axes`.
void check_averages_over(
    const torch::autograd::Node* next,
    const Mesh& mesh,
    const std::vector<int64_t>& axes);

} // namespace detail
} // namespace shardtensor
