#include "shardtensor/tensor/random.h"

#include <atomic>

#include <ATen/core/grad_mode.h>

#include "shardtensor/tensor/create.h"

namespace shardtensor {
namespace {

std::atomic<RandomPolicy> policy_of_process{RandomPolicy::OneDevice};

} // namespace

RandomPolicy random_policy() {
  return policy_of_process;
}

void set_random_policy(RandomPolicy policy) {
  policy_of_process = policy;
}

const char* to_string(RandomPolicy policy) {
  switch (policy) {
    case RandomPolicy::OneDevice:
      return "one_device";
    case RandomPolicy::Counter:
      return "counter";
  }
  return "unknown";
}

RandomPolicy parse_random_policy(const std::string& name) {
  for (auto policy : {RandomPolicy::OneDevice, RandomPolicy::Counter}) {
    if (name == to_string(policy)) {
      return policy;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "random policy: expected 'one_device' or 'counter', got '",
      name,
      "'");
}

at::Tensor rand(const SpecPtr& spec, const at::TensorOptions& options) {
  detail::check_made("rand", spec);
  const at::NoGradGuard no_grad;
  return empty(spec, options).uniform_(0, 1);
}

at::Tensor randn(const SpecPtr& spec, const at::TensorOptions& options) {
  detail::check_made("randn", spec);
  const at::NoGradGuard no_grad;
  return empty(spec, options).normal_(0, 1);
}

} // namespace shardtensor
