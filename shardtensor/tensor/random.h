#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// Which numbers random operators draw; process-wide, the same on all ranks.
/// Whatever the policy, the ranks' generators must be in the same state: seed
/// them alike, and draw alike.
enum class RandomPolicy {
  /// Those of one device with the same seed (the default). Each rank draws for
  /// the whole tensor and keeps its part: time and passing memory for all of
  /// it.
  OneDevice,
  /// Functions of the generator's state and of where an element stands in the
  /// whole tensor: the same for any number of ranks and in any layout, other
  /// ones than PyTorch's. Each rank draws for its own piece.
  Counter,
};

RandomPolicy random_policy();
void set_random_policy(RandomPolicy policy);
/// "one_device", "counter".
const char* to_string(RandomPolicy policy);
/// Raises for another name.
RandomPolicy parse_random_policy(const std::string& name);

/// As at::rand and at::randn of spec's global sizes: the numbers of the random
/// policy, the same in any layout, when the ranks' generators are in the same
/// state. The result is a leaf. No communication. Raises for a Partial
/// placement.
at::Tensor rand(const SpecPtr& spec, const at::TensorOptions& options = {});
at::Tensor randn(const SpecPtr& spec, const at::TensorOptions& options = {});

} // namespace shardtensor
