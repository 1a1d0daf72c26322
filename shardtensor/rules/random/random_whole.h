#pragma once

#include <optional>
#include <string>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// What operators are made of that draw for the whole tensor and keep a part:
// see Note [Random numbers].

/// A plain tensor of the global sizes, laid out in memory like `self` would be
/// on one device: numbers are drawn in the order of memory.
at::Tensor empty_whole(const at::Tensor& self);

/// This rank's part of a tensor that every rank has; without the rest.
at::Tensor own_part(const at::Tensor& whole, const SpecPtr& spec);

/// Brings the local tensor to where its rows stand in a tensor of the global
/// sizes; all else in there stays.
void write_own_part(at::Tensor whole, at::Tensor local, const ShardSpec& spec);

/// What is drawn into `self`; a Partial becomes what it was drawn as.
void keep_own_part(const at::Tensor& self, const at::Tensor& whole);

/// Says once, on every rank, that numbers of a large tensor are drawn for a
/// smaller piece: `like` has their dtype.
void note_whole_draw(
    const std::string& op,
    const at::Tensor& like,
    const ShardSpec& spec);

/// Raises on all ranks when their generators differ. Communication: two
/// all-reduces of a number, in the check mode only.
void check_generators(
    const std::string& op,
    const std::optional<at::Generator>& generator,
    const at::Tensor& self);

} // namespace shardtensor::detail
