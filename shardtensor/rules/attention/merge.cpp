#include "shardtensor/rules/attention/merge.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logaddexp.h>

namespace shardtensor::detail {

void merge(const Attended& into, const Attended& part) {
  auto output = into.output;
  auto log_sum = into.log_sum;
  // exp(b) / (exp(a) + exp(b)); -inf - -inf is no number.
  const auto share = (part.log_sum - log_sum)
                         .sigmoid_()
                         .masked_fill_(part.log_sum.isneginf(), 0);
  output.lerp_(
      part.output.to(output.scalar_type()),
      share.unsqueeze(-1).to(output.scalar_type()));
  log_sum.copy_(at::logaddexp(log_sum, part.log_sum));
}

} // namespace shardtensor::detail
