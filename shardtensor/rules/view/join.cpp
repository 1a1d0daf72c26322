#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/repeat_ops.h>
#include <torch/library.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/layout/plan_cache.h"
#include "shardtensor/layout/view_plan.h"
#include "shardtensor/tensor/known_zeros.h"

// Tensors put together along a dim, and dims repeated, rolled and flipped.

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

Decision cat_rule(Call& call) {
  if (auto sizes = cat_sizes(call)) {
    call.set_output_sizes({*std::move(sizes)});
  }
  const auto dims = static_cast<int64_t>(call.output_sizes().at(0).size());
  const auto dim = at::maybe_wrap_dim(call.argument("dim").toInt(), dims);
  const bool all_skipped = std::all_of(
      call.operands().begin(), call.operands().end(), [&](const auto& operand) {
        return !operand.spec || is_out_argument(call, operand) ||
            is_skipped(operand);
      });
  return all_skipped ? replicate_rule(call) : Cat(call, dim).decide();
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
  return rule_by_labels(call, labels, Linearity::Additive);
}

// ---- repeat -----------------------------------------------------------------

/// A repeated cut dim is cut repeatedly: every rank repeats its own rows.
Decision repeat_rule(Call& call) {
  const auto& own = call.operand(0).spec;
  const auto repeats = call.argument("repeats").toIntVector();
  const auto shift = static_cast<int64_t>(repeats.size()) - own->dim();
  TORCH_CHECK(
      shift >= 0,
      "repeat: expected at least as many numbers as dims, got ",
      repeats.size(),
      " for a tensor of ",
      own->dim(),
      " dims");
  std::vector<int64_t> from(repeats.size(), -1);
  std::iota(from.begin() + shift, from.end(), 0);
  ShardSpec::Partitions partitions(repeats.size());
  for (const int64_t dim : own->sharded_dims()) {
    partitions[dim + shift] =
        own->partition(dim).repeated(repeats[dim + shift]);
  }
  Decision decision;
  decision.inputs = {own};
  decision.outputs = {with_dims(
      own,
      call.output_sizes().at(0),
      from,
      Placement::replicate(),
      std::move(partitions))};
  return decision;
}

/// ATen's gradient of nothing is a plain tensor of zeros. An empty slice has
/// the same elements, none, and a sharded gradient.
at::Tensor repeat_function(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    at::IntArrayRef repeats) {
  const auto dims = static_cast<int64_t>(repeats.size());
  if (std::find(repeats.begin(), repeats.end(), 0) == repeats.end() ||
      dims < self.dim()) {
    return at::_ops::repeat::redispatch(
        below_function_level(keys), self, c10::fromIntArrayRefSlow(repeats));
  }
  auto kept = self;
  while (kept.dim() < dims) {
    kept = kept.unsqueeze(0);
  }
  std::vector<int64_t> copies(repeats.begin(), repeats.end());
  for (int64_t dim = 0; dim < dims; ++dim) {
    if (repeats[dim] == 0) {
      kept = kept.narrow(dim, 0, 0);
      copies[dim] = 1;
    }
  }
  return kept.repeat(copies);
}

// ---- roll and flip ----------------------------------------------------------

using RowOfRow = std::function<int64_t(int64_t dim, int64_t row)>;

EncodedExchange plan_rows(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const RowOfRow& source) {
  const auto rows = [&](int64_t dim, int64_t position) {
    const auto own = spec->interval(dim, position);
    RowSource result;
    for (int64_t row = own.begin; row < own.end; ++row) {
      result.push_back(source(dim, row));
    }
    return result;
  };
  const auto& mesh = *spec->mesh();
  return encode(plan_gather_rows(spec, dims, rows, mesh.position()), mesh);
}

/// Every rank's rows along the sharded `dims`, taken from the rows that
/// `source` names, in the layout of `spec` of a tensor that shows `format`.
/// Planned once for `op`, a literal, and `arguments`, which say what `source`
/// does. Communication: one exchange.
at::Tensor take_rows(
    const char* op,
    const std::vector<int64_t>& arguments,
    const at::Tensor& local,
    const SpecPtr& spec,
    at::MemoryFormat format,
    const std::vector<int64_t>& dims,
    const RowOfRow& source) {
  if (dims.empty()) {
    return local;
  }
  static PlanCache<EncodedExchange> plans;
  PlanKey key;
  key.add(reinterpret_cast<int64_t>(op)).add(spec).add(dims).add(arguments);
  const auto plan =
      plans.find(key, [&] { return plan_rows(spec, dims, source); });
  return exchange(local, *plan, format);
}

/// Dims and how far each is rolled; a dim that is named twice rolls twice.
std::map<int64_t, int64_t> shifts_of(
    const at::Tensor& self,
    at::IntArrayRef shifts,
    at::IntArrayRef dims) {
  std::map<int64_t, int64_t> result;
  for (size_t i = 0; i < dims.size(); ++i) {
    const auto dim = at::maybe_wrap_dim(dims[i], self.dim());
    if (const auto size = self.size(dim); size > 0) {
      auto& shift = result[dim];
      shift = (shift + shifts[i] % size + size) % size;
    }
  }
  return result;
}

/// Of a rolled tensor: CUDA's kernel makes it row-major.
at::MemoryFormat rolled_format(const at::Tensor& self) {
  return self.is_cuda() ? at::MemoryFormat::Contiguous
                        : self.suggest_memory_format();
}

at::Tensor roll_kernel(
    const at::Tensor& self,
    at::IntArrayRef shifts,
    at::IntArrayRef dims) {
  if (dims.empty()) {
    TORCH_CHECK(
        shifts.size() == 1,
        "roll: expected one shift without dims, got ",
        shifts);
    return self.flatten().roll(shifts, 0).reshape(self.sizes());
  }
  TORCH_CHECK(
      shifts.size() == dims.size(),
      "roll: expected as many shifts as dims, got shifts ",
      shifts,
      ", dims ",
      dims);
  auto [local, layout] = local_of(self, contiguous(spec(self)));
  const auto rolled = shifts_of(self, shifts, dims);
  std::vector<int64_t> cut;
  std::vector<int64_t> shifts_of_cut;
  for (const auto& [dim, shift] : rolled) {
    if (layout->is_sharded(dim)) {
      cut.push_back(dim);
      shifts_of_cut.push_back(shift);
    } else {
      local = local.roll(shift, dim);
    }
  }
  const auto from = [&](int64_t dim, int64_t row) {
    return (row - rolled.at(dim) + self.size(dim)) % self.size(dim);
  };
  local = take_rows(
      "roll", shifts_of_cut, local, layout, rolled_format(self), cut, from);
  const auto result = wrap(
      local.is_alias_of(impl_of(self)->local()) ? local.clone() : local,
      layout,
      strides_of_format(rolled_format(self), self.sizes().vec()));
  if (const auto* known = nonzero_box(self)) {
    auto box = *known;
    for (const auto& [dim, shift] : rolled) {
      box[dim] = {0, self.size(dim)};
    }
    note_known_zeros(result, std::move(box));
  }
  return result;
}

/// Each rank gets its rows' mirror images in increasing order, in one piece per
/// peer, and flips them.
at::Tensor flip_kernel(const at::Tensor& self, at::IntArrayRef dims) {
  auto [local, layout] = local_of(self, contiguous(spec(self)));
  std::vector<int64_t> wrapped;
  std::vector<int64_t> cut;
  for (const int64_t given : dims) {
    const auto dim = at::maybe_wrap_dim(given, self.dim());
    TORCH_CHECK(
        std::find(wrapped.begin(), wrapped.end(), dim) == wrapped.end(),
        "flip: a dim appears twice in ",
        dims);
    wrapped.push_back(dim);
    if (self.dim() > 0 && layout->is_sharded(dim)) {
      cut.push_back(dim);
    }
  }
  const auto from_the_end = [&, &layout = layout](int64_t dim, int64_t row) {
    const auto& partition = layout->partition(dim);
    const auto& offsets = partition.offsets();
    const auto piece = partition.owner(row);
    return self.size(dim) - offsets[piece + 1] + (row - offsets[piece]);
  };
  local = take_rows(
      "flip",
      {},
      local,
      layout,
      self.suggest_memory_format(),
      cut,
      from_the_end);
  return wrap(
      local.flip(wrapped),
      layout,
      at::infer_dense_strides(self.sizes(), self.strides()));
}

// ---- triangles --------------------------------------------------------------

/// Column j of row i is kept by its distance from the diagonal, which every
/// rank counts from where its piece begins.
Decision triangle_rule(Call& call) {
  const auto& own = call.operand(0).spec;
  const auto dims = own->dim();
  auto spec = own;
  for (const int64_t dim : {dims - 2, dims - 1}) {
    spec = dim >= 0 ? contiguous_dim(spec, dim) : spec;
  }
  const auto begin = [&](int64_t dim) {
    return dim >= 0 && spec->is_sharded(dim) ? spec->interval(dim).begin : 0;
  };
  Decision decision;
  for (const auto& operand : call.operands()) {
    decision.inputs.push_back(operand.spec ? spec : nullptr);
  }
  decision.outputs = {spec};
  decision.arguments.emplace_back(
      call.argument_index("diagonal"),
      call.argument("diagonal").toInt() + begin(dims - 2) - begin(dims - 1));
  return decision;
}

const RegisterRules joins{
    {"aten::cat", cat_rule},
    {"aten::cat.out", cat_rule},
    {"aten::stack", stack_rule},
    {"aten::repeat", repeat_rule},
    {"aten::tril", triangle_rule},
    {"aten::triu", triangle_rule},
    {"aten::tril_", triangle_rule},
    {"aten::triu_", triangle_rule},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("roll", roll_kernel);
  m.impl("flip", flip_kernel);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("repeat", function_rule<at::_ops::repeat, repeat_function>);
}

} // namespace shardtensor::detail
