#include "shardtensor/dispatch/rule.h"

// PyTorch's own collectives with a ShardTensor for their local tensor, as a
// DTensor of ShardTensors has: along an axis that the tensor's mesh has not.
// Its ranks hold the same piece of the domain, so each piece is reduced by
// itself. Collectives that join or split dim 0 have no rule: they are gathered.

namespace shardtensor::detail {
namespace {

Decision each_piece_rule(Call& call) {
  const auto layout = without_partial(call.operand(0).spec);
  Decision decision;
  decision.inputs = {layout};
  decision.outputs = {layout};
  return decision;
}

const RegisterRules collectives{
    {"_c10d_functional::all_reduce", each_piece_rule},
    {"_c10d_functional::wait_tensor", each_piece_rule},
};

} // namespace
} // namespace shardtensor::detail
