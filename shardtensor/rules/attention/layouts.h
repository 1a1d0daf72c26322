#pragma once

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/rules/attention/transport.h"
#include "shardtensor/rules/attention/work.h"

namespace shardtensor::detail {

/// The layouts of an attention's operands, of shape (..., heads, rows,
/// features): all of the same number of dims, with the same extents before the
/// heads. Along each mesh axis, by how it cuts the query:
///
/// - a batch dim or heads: key and value are cut alike;
/// - rows: key and value are cut along theirs, and meet by a transport, or
///   whole, as they come;
/// - nothing: key and value may be cut along rows (see Meeting::Merge), and
///   where they are cut along batch or heads the query is, too.
struct AttentionLayouts {
  SpecPtr query;
  SpecPtr key;
  SpecPtr value;
  SpecPtr mask; // null without one
  SpecPtr output;
  SpecPtr result; // what the output is brought to: as the query came
  // In which ranks compute terms of gradients.
  SpecPtr query_terms;
  SpecPtr key_terms;
  SpecPtr value_terms;
  SpecPtr mask_terms;
  /// The query's heads are cut inside a group that shares a head of the key:
  /// key and value need a copy for each of the query's.
  bool splits_groups = false;
  AttentionWork work;
};

/// `mask` may be null; its extents are the scores' or 1. `bytes` of an element.
AttentionLayouts plan_attention(
    const SpecPtr& query,
    const SpecPtr& key,
    const SpecPtr& value,
    const SpecPtr& mask,
    bool causal,
    int64_t bytes,
    AttentionTransport transport);

} // namespace shardtensor::detail
