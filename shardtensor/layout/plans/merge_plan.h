#pragma once

#include <cstdint>
#include <vector>

namespace shardtensor::detail {

/// What one piece does in one step of merging the terms of all pieces: it gets
/// the terms of `sources`, its own among them, and merges them in this order.
struct MergeStep {
  std::vector<int64_t> sources;
  std::vector<int64_t> receivers; // the other pieces that get its own term

  bool operator==(const MergeStep&) const = default;
};

/// More pieces than this merge their terms in several steps.
inline constexpr int64_t kMostTerms = 16;

/// The steps after which every piece has the terms of all of them, merged in
/// the same way; as many for every piece. Pieces are the leaves of a balanced
/// tree, in order. A step merges one level, from the leaves on: each piece
/// gets the other children's terms of its parent from one piece of each child,
/// which all have the same one by then. A piece so holds at most `most_terms`
/// terms at a time, and has O(log pieces) peers.
///
/// Example: 4 pieces, at most 2 terms. Piece 2 merges the terms of {2, 3}, then
/// those of {0, 2}; piece 3 those of {2, 3}, then {1, 3}.
std::vector<MergeStep> plan_merge(
    int64_t pieces,
    int64_t piece,
    int64_t most_terms = kMostTerms);

} // namespace shardtensor::detail
