#include "shardtensor/layout/placement.h"

#include <sstream>

#include <c10/util/Exception.h>

#include "shardtensor/layout/enum_words.h"

namespace shardtensor {

namespace {

constexpr detail::EnumWords<Reduce, 5> kReduces{
    "reduction",
    {{
        {Reduce::Sum, "sum"},
        {Reduce::Avg, "avg"},
        {Reduce::Prod, "product"},
        {Reduce::Max, "max"},
        {Reduce::Min, "min"},
    }}};

} // namespace

const char* to_string(Reduce reduce) {
  return kReduces.word(reduce);
}

Reduce parse_reduce(const std::string& name) {
  return kReduces.parse(name);
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
