#include "shardtensor/layout/placement.h"

#include <array>
#include <sstream>

#include <c10/util/Exception.h>

namespace shardtensor {

namespace {

constexpr std::array kReduces{
    Reduce::Sum,
    Reduce::Avg,
    Reduce::Prod,
    Reduce::Max,
    Reduce::Min};

} // namespace

const char* to_string(Reduce reduce) {
  switch (reduce) {
    case Reduce::Sum:
      return "sum";
    case Reduce::Avg:
      return "avg";
    case Reduce::Prod:
      return "product";
    case Reduce::Max:
      return "max";
    case Reduce::Min:
      return "min";
  }
  TORCH_INTERNAL_ASSERT(false, "not a Reduce: ", static_cast<int>(reduce));
}

Reduce parse_reduce(const std::string& name) {
  for (Reduce reduce : kReduces) {
    if (name == to_string(reduce)) {
      return reduce;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "Partial: reduction '",
      name,
      "', expected sum, avg, product, max or min");
}

std::vector<int64_t> detail::axes_of(
    const std::vector<Placement>& placements,
    int64_t dim) {
  std::vector<int64_t> axes;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard(dim)) {
      axes.push_back(static_cast<int64_t>(axis));
    }
  }
  return axes;
}

std::string to_string(const Placement& placement) {
  std::ostringstream out;
  out << placement;
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::Shard:
      return out << "Shard(dim=" << placement.dim << ')';
    case Placement::Kind::Replicate:
      return out << "Replicate()";
    case Placement::Kind::Partial:
      return out << "Partial(" << to_string(placement.reduce) << ')';
  }
  TORCH_INTERNAL_ASSERT(false, "not a Placement::Kind");
}

} // namespace shardtensor
