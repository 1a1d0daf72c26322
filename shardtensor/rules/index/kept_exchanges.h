#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/rules/index/row_exchange.h"

namespace shardtensor::detail {

// Note [Indices made anew]
// Layers make an index in each call, of the same values: torch.cat([edge_index,
// loops]). It is another tensor each time, so Note [Shown elements] does not
// know it. Each rank compares its part with those that the last exchanges of
// the same layouts were made for; the ranks' findings travel in the reduction
// that checks the bounds of an index that is not known, and needs no message
// more. An exchange that all of them found is taken again. Of an index that
// every rank has a digest is compared, without a message.

/// The exchanges used last on each mesh, latest first. Shared by all threads,
/// as KnownOfShown. Ranks agree about what is in it, for it depends on the
/// order of calls on the mesh, layouts, and findings of all ranks alone.
class RecentExchanges {
 public:
  using Exchange = std::shared_ptr<const RowExchange>;

  /// Those for an index and rows that lie so.
  std::vector<Exchange> find(const SpecPtr& index, const SpecPtr& rows);

  /// Puts one in front, which may be new. At most kMost stay, and of all of
  /// them no more elements of indices than kLargest times those of the largest.
  void use(const SpecPtr& rows, const Exchange& exchange);

 private:
  static constexpr size_t kMost = 32;
  static constexpr int64_t kLargest = 8;

  struct Entry {
    SpecPtr rows;
    Exchange exchange;
  };

  std::mutex mutex_;
  std::map<MeshPtr, std::list<Entry>> by_mesh_;
};

} // namespace shardtensor::detail
