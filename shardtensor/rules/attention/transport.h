#pragma once

#include <string>

namespace shardtensor {

/// How queries meet the keys of other ranks where both are cut along the
/// sequence. Auto chooses by sizes and mesh.
/// - Ring: blocks of keys and values pass all ranks, while those compute.
///   Source: Liu et al. 2023, Ring Attention with Blockwise Transformers.
/// - AllGather: every rank gets all keys and values first.
/// - AllToAll: heads are cut in the place of the sequence, and back.
/// - Grid: the last mesh axis that cuts the sequence cuts heads in its place,
///   along the other one blocks pass as in the ring. Where more than two axes
///   cut it: as Ring.
enum class AttentionTransport { Auto, Ring, AllGather, AllToAll, Grid };

/// For all calls of the process from now on, the same on all ranks.
void set_attention_transport(AttentionTransport transport);
AttentionTransport attention_transport();
/// "auto", "ring", "all_gather", "all_to_all", "grid".
const char* to_string(AttentionTransport transport);
/// Raises on another name.
AttentionTransport parse_attention_transport(const std::string& name);

} // namespace shardtensor
