#include "shardtensor/rules/attention/cost.h"

#include <algorithm>
#include <vector>

namespace shardtensor::detail {
namespace {

// One core and gloo, as measured. A GPU's products, bytes and passes are some
// hundred times as fast, its messages and stops less so: there this takes a
// ring for cheaper than it is where pieces are small.
constexpr double kProducts = 6e10; // in a second
constexpr double kBytes = 2e9;
constexpr double kPassing = 6e9; // bytes read and written in memory
constexpr double kMessage = 1e-4; // seconds
// What a stop of a ring costs besides: smaller products, results that are
// merged, and ranks that wait for each other (make bench ARGS=transports).
constexpr double kStop = 4e-3;

class Model {
 public:
  explicit Model(const AttentionSizes& sizes)
      : s_(sizes), ranks_(static_cast<double>(sizes.ranks)) {}

  double ring() const {
    return ring_of(ranks_, 1);
  }
  double all_gather() const {
    const double block = key_bytes(static_cast<double>(s_.keys));
    return products(share_of_rows()) +
        block * ((ranks_ - 1) / ranks_ / kBytes + 5 / kPassing) + kMessage +
        balancing(); // packed, unpacked, read, its gradients packed and summed
  }
  double all_to_all() const {
    return products(share_of_heads(s_.ranks)) + cutting_heads(ranks_);
  }
  double grid() const {
    const auto last = static_cast<double>(s_.last_ranks);
    const double grown = last * share_of_heads(s_.last_ranks);
    return ring_of(ranks_ / last, grown) + cutting_heads(last);
  }

 private:
  /// Where a rank has so many times its rows and heads.
  double ring_of(double ranks, double grown) const {
    const double work = products(share_of_rows() * grown);
    const double block = key_bytes(static_cast<double>(s_.most_keys)) * grown;
    const double hidden = work / ranks;
    const double stop = std::max(block / kBytes - hidden, 0.0) + kMessage +
        kStop + output_bytes() * grown / kPassing;
    return work + 2 * block / kPassing + (ranks - 1) * stop +
        balancing() * grown;
  }
  /// Heads in the place of rows, and back.
  double cutting_heads(double ranks) const {
    return moved_bytes() * (ranks - 1) / ranks / kBytes +
        moved_bytes() / kPassing + 4 * kMessage;
  }
  double share_of_heads(int64_t ranks) const {
    const int64_t most = (s_.key_heads + ranks - 1) / ranks;
    return static_cast<double>(most) /
        static_cast<double>(std::max<int64_t>(s_.key_heads, 1));
  }
  /// Of the busiest rank.
  double share_of_rows() const {
    if (is_balanced()) {
      return 1 / ranks_;
    }
    return static_cast<double>(s_.most_queries) /
        static_cast<double>(std::max<int64_t>(s_.queries, 1));
  }
  bool is_balanced() const {
    return s_.causal && s_.queries == s_.keys;
  }
  double products(double share) const {
    const double all = 2.0 * static_cast<double>(s_.batch * s_.heads) *
        static_cast<double>(s_.queries) * static_cast<double>(s_.keys) *
        static_cast<double>(s_.features + s_.value_features);
    return all * share * (s_.causal ? 0.5 : 1) / kProducts;
  }
  double key_bytes(double rows) const {
    return static_cast<double>(
               s_.batch * s_.key_heads * (s_.features + s_.value_features) *
               s_.bytes) *
        rows;
  }
  double output_bytes() const {
    return static_cast<double>(
        s_.batch * s_.heads * s_.value_features * s_.bytes * s_.most_queries);
  }
  /// Query, key, value and output of the rank that has most.
  double moved_bytes() const {
    return output_bytes() * static_cast<double>(s_.features) /
        static_cast<double>(s_.value_features) +
        output_bytes() + key_bytes(static_cast<double>(s_.most_keys));
  }
  /// Rows in zigzag, and back: half of them to another rank.
  double balancing() const {
    return is_balanced()
        ? moved_bytes() * (0.5 / kBytes + 2 / kPassing) + 4 * kMessage
        : 0;
  }

  const AttentionSizes& s_;
  double ranks_;
};

} // namespace

double attention_cost(
    const AttentionSizes& sizes,
    AttentionTransport transport) {
  const Model model(sizes);
  switch (transport) {
    case AttentionTransport::AllGather:
      return model.all_gather();
    case AttentionTransport::AllToAll:
      return model.all_to_all();
    case AttentionTransport::Grid:
      return model.grid();
    default:
      return model.ring();
  }
}

AttentionTransport choose_transport(const AttentionSizes& sizes) {
  std::vector<AttentionTransport> others{AttentionTransport::AllGather};
  if (!sizes.has_mask_rows) {
    others.push_back(AttentionTransport::AllToAll);
    if (sizes.last_ranks > 1) {
      others.push_back(AttentionTransport::Grid);
    }
  }
  auto best = AttentionTransport::Ring;
  for (const auto other : others) {
    if (attention_cost(sizes, other) < attention_cost(sizes, best)) {
      best = other;
    }
  }
  return best;
}

} // namespace shardtensor::detail
