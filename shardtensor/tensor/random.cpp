#include "shardtensor/tensor/random.h"

#include <ATen/core/grad_mode.h>

#include "shardtensor/layout/enum_words.h"
#include "shardtensor/tensor/create.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor {
namespace {

Setting<RandomPolicy> policy_of_calls{"random_policy", RandomPolicy::OneDevice};

constexpr detail::EnumWords<RandomPolicy, 2> kRandomPolicies{
    "random policy",
    {{
        {RandomPolicy::OneDevice, "one_device"},
        {RandomPolicy::Counter, "counter"},
    }}};

} // namespace

RandomPolicy random_policy() {
  return policy_of_calls;
}

void set_random_policy(RandomPolicy policy) {
  policy_of_calls = policy;
}

const char* to_string(RandomPolicy policy) {
  return kRandomPolicies.word(policy);
}

RandomPolicy parse_random_policy(const std::string& name) {
  return kRandomPolicies.parse(name);
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
