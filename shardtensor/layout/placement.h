#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace shardtensor {

enum class Reduce { Sum, Avg, Prod, Max, Min };

/// "sum", "avg", "product", "max", "min": c10d's and DTensor's names.
const char* to_string(Reduce reduce);
/// Raises on another name.
Reduce parse_reduce(const std::string& name);

/// What one mesh axis does to a tensor: cuts dim `dim` over its ranks (Shard),
/// gives each rank the whole (Replicate), or leaves on each rank a term of a
/// reduction that is still to be done (Partial).
struct Placement {
  enum class Kind { Shard, Replicate, Partial };

  Kind kind = Kind::Replicate;
  int64_t dim = -1; // of a Shard
  Reduce reduce = Reduce::Sum; // of a Partial

  static Placement shard(int64_t dim) {
    return {Kind::Shard, dim, Reduce::Sum};
  }
  static Placement replicate() {
    return {};
  }
  static Placement partial(Reduce reduce = Reduce::Sum) {
    return {Kind::Partial, -1, reduce};
  }

  bool is_shard() const {
    return kind == Kind::Shard;
  }
  bool is_shard(int64_t of_dim) const {
    return is_shard() && dim == of_dim;
  }
  bool is_replicate() const {
    return kind == Kind::Replicate;
  }
  bool is_partial() const {
    return kind == Kind::Partial;
  }
  bool operator==(const Placement&) const = default;
};

/// The adjoint of such a reduction is one, too; a maximum, a minimum and a
/// product have none.
inline bool is_linear_reduce(Reduce reduce) {
  return reduce == Reduce::Sum || reduce == Reduce::Avg;
}
/// False for what only a maximum, a minimum or a product of the terms makes
/// whole.
inline bool is_linear(const Placement& placement) {
  return !placement.is_partial() || is_linear_reduce(placement.reduce);
}

namespace detail {

/// The mesh axes that shard this dim, in order.
std::vector<int64_t> axes_of(
    const std::vector<Placement>& placements,
    int64_t dim);

} // namespace detail

/// "Shard(dim=2)", "Replicate()", "Partial(sum)".
std::string to_string(const Placement& placement);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

} // namespace shardtensor
