#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "shardtensor/rules/norm/normalize.h"

namespace shardtensor::detail {

// How the arguments of a norm become this rank's.

/// The input of a norm on its way to local work: on the mesh of it and of the
/// other arguments, no Partial, the dtype that autocast wants. Communication:
/// none but for a Partial input.
at::Tensor norm_input(
    const char* op,
    const at::Tensor& input,
    std::initializer_list<std::optional<at::Tensor>> others);

/// Raises unless kernels take the parameters beside x: of its dtype, or in fp32
/// beside half precision.
void check_types(
    const char* op,
    const at::Tensor& x,
    std::initializer_list<std::optional<at::Tensor>> parameters);

/// What this rank needs of a plain tensor whose dims are the dims of `spec`
/// from `first` on.
at::Tensor cut_like(at::Tensor tensor, const ShardSpec& spec, int64_t first);

struct Affine {
  at::Tensor weight;
  at::Tensor bias;
};

/// Weight and bias for this rank's elements; `first` is the dim of the input
/// that their first dim belongs to. One message for both gradients.
Affine local_affine(
    const char* op,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    const ShardSpec& x,
    int64_t first);

/// A per-channel tensor as one that broadcasts with (N, C, ...).
at::Tensor per_channel(const at::Tensor& tensor, int64_t dims);

/// Raises unless `tensor` is absent or has one element per channel.
void check_channels(
    const char* op,
    const char* what,
    const std::optional<at::Tensor>& tensor,
    int64_t channels);

/// first, first + 1, ..., end - 1.
std::vector<int64_t> dims_from(int64_t first, int64_t end);

NormGeometry geometry_of(const SpecPtr& x, std::vector<int64_t> dims);

} // namespace shardtensor::detail
