#pragma once

#include "shardtensor/rules/rule.h"

namespace shardtensor {

// One function per file of rules/: its operators. Read by install.cpp.
void add_pointwise_rules(RuleTable& table);
void add_factory_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_matmul_rules(RuleTable& table);
void add_optimizer_rules(RuleTable& table);
void add_join_rules(RuleTable& table);
void add_along_dim_rules(RuleTable& table);
void add_indexing_rules(RuleTable& table);
void add_loss_rules(RuleTable& table);

// The rules that operators of other libraries can be registered with.

/// x[i, :, j] with index tensors (no masks) along dims that are not sharded,
/// and writing there.
Decision index_rule(Call& call);
Decision index_put_rule(Call& call);

/// Output element i depends on the elements i of the inputs (broadcast).
Decision pointwise_rule(Call& call);

} // namespace shardtensor
