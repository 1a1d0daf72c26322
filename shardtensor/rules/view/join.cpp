#include <algorithm>
#include <numeric>

#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>

#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"

// Tensors put together along a dim.

namespace shardtensor::detail {
namespace {

// ---- cat --------------------------------------------------------------------

/// cat skips 1-d tensors without elements.
bool is_skipped(const Operand& operand) {
  return operand.dim() == 1 && operand.spec->size(0) == 0;
}

/// The layouts of one cat: of its operands, without the skipped ones, and of
/// its result.
class Cat {
 public:
  Cat(Call& call, int64_t dim) : call_(call), dim_(dim) {
    for (size_t i = 0; i < call.operands().size(); ++i) {
      const auto& operand = call.operand(i);
      if (operand.spec && !is_out_argument(call, operand) &&
          !is_skipped(operand)) {
        parts_.push_back(i);
      }
    }
  }

  Decision decide() {
    adopt_cuts();
    keep_common_partial();
    const auto cuts = axes_.empty() ? std::vector<Partition>() : cut_parts();
    auto decision = replicate_rule(call_);
    for (size_t part = 0; part < parts_.size(); ++part) {
      decision.inputs[parts_[part]] = laid_out(
          spec(parts_[part]).sizes(),
          cuts.empty() ? std::nullopt : std::optional(cuts[part]));
    }
    decision.outputs = {laid_out(
        call_.output_sizes().at(0),
        cuts.empty() ? std::nullopt : std::optional(sum(cuts)))};
    for (size_t i = 0; i < call_.operands().size(); ++i) {
      if (is_out_argument(call_, call_.operand(i))) {
        decision.inputs[i] = decision.outputs[0];
      }
    }
    return decision;
  }

 private:
  const ShardSpec& spec(size_t operand) const {
    return *call_.operand(operand).spec;
  }

  /// As the largest part is cut, and along axes that it leaves as the next ones
  /// are: leaving out rows that every rank has moves nothing.
  void adopt_cuts() {
    auto by_size = parts_;
    std::ranges::stable_sort(by_size, std::greater<>(), [&](size_t part) {
      return spec(part).numel();
    });
    placements_.resize(call_.mesh()->axes());
    partitions_.resize(spec(parts_[0]).dim());
    for (const size_t part : by_size) {
      for (const int64_t dim : spec(part).sharded_dims()) {
        const auto& axes = spec(part).axes(dim);
        const bool free = std::ranges::all_of(axes, [&](int64_t axis) {
          return placements_[axis].is_replicate();
        });
        if (!free || partitions_[dim]) {
          continue;
        }
        for (const int64_t axis : axes) {
          placements_[axis] = Placement::shard(dim);
        }
        partitions_[dim] = spec(part).partition(dim);
        if (dim == dim_) {
          axes_ = axes;
        }
      }
    }
  }

  /// A reduction that all parts still need stays to be done.
  void keep_common_partial() {
    for (int64_t axis = 0; axis < call_.mesh()->axes(); ++axis) {
      const auto first = spec(parts_[0]).placement(axis);
      const bool common = std::ranges::all_of(parts_, [&](size_t part) {
        return spec(part).placement(axis) == first;
      });
      if (first.is_partial() && common) {
        placements_[axis] = first;
      }
    }
  }

  SpecPtr laid_out(
      const std::vector<int64_t>& sizes,
      const std::optional<Partition>& cut) const {
    auto partitions = partitions_;
    partitions[dim_] = cut;
    return make_spec(call_.mesh(), sizes, placements_, std::move(partitions));
  }

  /// How each part is cut along the dim, so that the pieces of the parts, put
  /// together rank by rank, are the pieces of the whole.
  std::vector<Partition> cut_parts() const {
    if (auto kept = kept_cuts()) {
      return *kept;
    }
    // Every rank gets as many rows as it has now, of the whole.
    std::vector<int64_t> sizes(pieces(), 0);
    int64_t loose = 0; // rows that are on every rank
    for (const size_t part : parts_) {
      if (!is_cut(part)) {
        loose += spec(part).size(dim_);
        continue;
      }
      for (int64_t piece = 0; piece < pieces(); ++piece) {
        sizes[piece] += spec(part).partition(dim_).local_extent(piece);
      }
    }
    const auto even = Partition::chunked(loose, pieces()).sizes();
    for (int64_t piece = 0; piece < pieces(); ++piece) {
      sizes[piece] += even[piece];
    }
    const Partition whole(sizes);
    std::vector<Partition> cuts;
    int64_t begin = 0;
    for (const size_t part : parts_) {
      const Interval rows{begin, begin + spec(part).size(dim_)};
      std::vector<int64_t> own;
      for (int64_t piece = 0; piece < pieces(); ++piece) {
        own.push_back(intersect(whole.interval(piece), rows).extent());
      }
      cuts.emplace_back(own);
      begin = rows.end;
    }
    return cuts;
  }

  int64_t pieces() const {
    return partitions_[dim_]->pieces();
  }
  bool is_cut(size_t part) const {
    return spec(part).is_sharded(dim_) && spec(part).axes(dim_) == axes_;
  }

  /// The parts' own cuts, when their pieces stand in rank order already: no
  /// part has rows on an earlier rank than the part before it. A replicated
  /// part goes where its neighbours meet, unless most rows are in such parts.
  std::optional<std::vector<Partition>> kept_cuts() const {
    int64_t surplus = 0;
    for (const size_t part : parts_) {
      surplus += (is_cut(part) ? -1 : 1) * spec(part).size(dim_);
    }
    if (surplus > 0) {
      return {};
    }
    std::vector<Partition> cuts;
    int64_t last = -1; // the last rank that has rows
    for (size_t i = 0; i < parts_.size(); ++i) {
      const auto& part = spec(parts_[i]);
      if (!is_cut(parts_[i])) {
        if (!can_be_cut(part)) {
          return {};
        }
        const auto piece = last >= 0 ? last : first_rank(i);
        std::vector<int64_t> sizes(pieces(), 0);
        sizes[piece] = part.size(dim_);
        cuts.emplace_back(sizes);
        continue;
      }
      const auto& cut = part.partition(dim_);
      if (!cut.is_contiguous()) {
        return {};
      }
      for (int64_t piece = 0; piece < pieces(); ++piece) {
        if (cut.local_extent(piece) == 0) {
          continue;
        }
        if (piece < last) {
          return {};
        }
        last = piece;
      }
      cuts.push_back(cut);
    }
    return cuts;
  }

  /// Every rank has these rows: leaving some out moves nothing.
  bool can_be_cut(const ShardSpec& part) const {
    return std::all_of(axes_.begin(), axes_.end(), [&](int64_t axis) {
      return part.placement(axis).is_replicate();
    });
  }

  /// The first rank with rows of a part after `i`.
  int64_t first_rank(size_t i) const {
    for (size_t next = i + 1; next < parts_.size(); ++next) {
      if (is_cut(parts_[next])) {
        const auto sizes = spec(parts_[next]).partition(dim_).sizes();
        const auto found = std::find_if(
            sizes.begin(), sizes.end(), [](int64_t size) { return size > 0; });
        if (found != sizes.end()) {
          return found - sizes.begin();
        }
      }
    }
    return 0;
  }

  Partition sum(const std::vector<Partition>& cuts) const {
    std::vector<int64_t> sizes(pieces(), 0);
    for (const auto& cut : cuts) {
      for (int64_t piece = 0; piece < pieces(); ++piece) {
        sizes[piece] += cut.local_extent(piece);
      }
    }
    return Partition(sizes);
  }

  Call& call_;
  int64_t dim_;
  std::vector<size_t> parts_;
  // Of the result, and of what it is made of.
  std::vector<Placement> placements_;
  ShardSpec::Partitions partitions_;
  std::vector<int64_t> axes_; // that cut the dim
};

/// The tensors among the arguments that are put together.
std::vector<std::vector<int64_t>> sizes_of_parts(const Call& call) {
  std::vector<std::vector<int64_t>> parts;
  for (const auto& operand : call.operands()) {
    if (!is_out_argument(call, operand)) {
      parts.push_back(operand.tensor.sizes().vec());
    }
  }
  return parts;
}

/// Nothing where the parts do not fit, which PyTorch puts into words.
std::optional<std::vector<int64_t>> cat_sizes(const Call& call) {
  const std::vector<int64_t> skipped{0};
  auto parts = sizes_of_parts(call);
  parts.erase(std::remove(parts.begin(), parts.end(), skipped), parts.end());
  if (parts.empty()) {
    return skipped;
  }
  auto sizes = parts[0];
  const auto dim = at::maybe_wrap_dim(
      call.argument("dim").toInt(), static_cast<int64_t>(sizes.size()));
  int64_t extent = 0;
  for (auto& part : parts) {
    if (sizes.empty() || part.size() != sizes.size()) {
      return {};
    }
    extent += part[dim];
    part[dim] = sizes[dim];
    if (part != sizes) {
      return {};
    }
  }
  sizes[dim] = extent;
  return sizes;
}

/// The parts' format where all have the same.
at::MemoryFormat common_format(const Call& call) {
  const auto format = call.operand(0).tensor.suggest_memory_format();
  const bool common =
      std::ranges::all_of(call.operands(), [&](const auto& own) {
        return own.written || own.tensor.suggest_memory_format() == format;
      });
  return common ? format : at::MemoryFormat::Contiguous;
}

std::vector<int64_t> cat_strides(
    const Call& call,
    const std::vector<int64_t>& sizes) {
  return strides_of_format(common_format(call), sizes);
}

/// As of a cat along the dim, seen with one more: what ATen's stack does.
std::vector<int64_t> stack_strides(
    const Call& call,
    const std::vector<int64_t>& sizes) {
  const auto dim = at::maybe_wrap_dim(
      call.argument("dim").toInt(), static_cast<int64_t>(sizes.size()));
  auto joined = sizes;
  joined.erase(joined.begin() + dim);
  if (dim == static_cast<int64_t>(joined.size())) {
    return {};
  }
  joined[dim] *= sizes[dim];
  auto strides = cat_strides(call, joined);
  if (!strides.empty()) {
    strides.insert(strides.begin() + dim, strides[dim] * sizes[dim + 1]);
  }
  return strides;
}

Decision cat_rule(Call& call) {
  if (auto sizes = cat_sizes(call)) {
    call.set_output_sizes({*std::move(sizes)});
  }
  const auto& joined = call.output_sizes().at(0);
  const auto dim = joined == std::vector<int64_t>{0}
      ? 0 // PyTorch takes any dim of tensors that it skips
      : at::maybe_wrap_dim(
            call.argument("dim").toInt(), static_cast<int64_t>(joined.size()));
  const bool all_skipped = std::all_of(
      call.operands().begin(), call.operands().end(), [&](const auto& operand) {
        return !operand.spec || is_out_argument(call, operand) ||
            is_skipped(operand);
      });
  auto decision = all_skipped ? replicate_rule(call) : Cat(call, dim).decide();
  decision.strides_of = cat_strides;
  return decision;
}

Decision stack_rule(Call& call) {
  const auto parts = sizes_of_parts(call);
  if (std::count(parts.begin(), parts.end(), parts[0]) ==
      static_cast<int64_t>(parts.size())) {
    auto sizes = parts[0];
    const auto dim = at::maybe_wrap_dim(
        call.argument("dim").toInt(), static_cast<int64_t>(sizes.size()) + 1);
    sizes.insert(sizes.begin() + dim, static_cast<int64_t>(parts.size()));
    call.set_output_sizes({std::move(sizes)});
  }
  const auto dims = static_cast<int64_t>(call.output_sizes().at(0).size());
  const auto dim = at::maybe_wrap_dim(call.argument("dim").toInt(), dims);
  std::vector<int64_t> own(dims - 1);
  std::iota(own.begin(), own.end(), 0);
  auto stacked = own;
  stacked.insert(stacked.begin() + dim, kPrivate);
  Labels labels;
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(
        is_out_argument(call, operand) ? stacked
            : operand.spec             ? own
                                       : std::vector<int64_t>());
  }
  labels.outputs = {stacked};
  auto decision = rule_by_labels(call, labels, Linearity::Additive);
  decision.strides_of = stack_strides;
  return decision;
}

const RegisterRules joins{
    {"aten::cat", cat_rule},
    {"aten::cat.out", cat_rule},
    {"aten::stack", stack_rule},
};

} // namespace
} // namespace shardtensor::detail
