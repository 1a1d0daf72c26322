#include "shardtensor/rules/index/row_exchange.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/mesh_axes.h"
#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {
namespace {

/// How many of the sorted rows belong to each piece.
std::vector<int64_t> count_by_piece(
    const at::Tensor& rows,
    const Partition& partition) {
  const auto offsets = at::tensor(partition.offsets(), rows.options());
  auto counts = host_numbers(at::searchsorted(rows, offsets.slice(0, 1)));
  std::adjacent_difference(counts.begin(), counts.end(), counts.begin());
  return counts;
}

/// Of the own elements, flat: where they stand in the whole.
at::Tensor element_numbers(
    const ShardSpec& spec,
    const at::TensorOptions& options) {
  auto numbers = at::zeros({}, options);
  for (int64_t dim = 0; dim < spec.dim(); ++dim) {
    auto rows = at::arange(spec.local_sizes()[dim], options);
    if (spec.is_sharded(dim)) {
      const auto own = spec.interval(dim);
      const auto extent = std::max<int64_t>(own.extent(), 1);
      rows = rows.div(extent, "floor") * spec.partition(dim).period() +
          rows.remainder(extent) + own.begin;
    }
    numbers = numbers.unsqueeze(-1) * spec.size(dim) + rows;
  }
  return numbers.flatten();
}

at::Tensor piece_of(const at::Tensor& rows, const Partition& partition) {
  const auto offsets = at::tensor(partition.offsets(), rows.options());
  return at::searchsorted(
      offsets.slice(0, 1), rows, /*out_int32=*/false, /*right=*/true);
}

/// Of the elements of a whole index cut along one dim, flat.
at::Tensor piece_of_elements(
    const ShardSpec& spec,
    const at::TensorOptions& options) {
  const auto dim = spec.sharded_dims().front();
  const auto rows = at::arange(spec.size(dim), options);
  return viewed_along(piece_of(rows, spec.partition(dim)), dim, spec.dim())
      .expand(spec.sizes())
      .flatten();
}

/// A step of SplitMix64: every bit of x comes to depend on those above.
void mix(const at::Tensor& x, uint64_t factor) {
  const auto high = at::bitwise_right_shift(x, at::Scalar(29));
  x.bitwise_xor_(high).mul_(at::Scalar(static_cast<int64_t>(factor)));
}

} // namespace

IndexDigest digest_of(const at::Tensor& index) {
  constexpr uint64_t kPlaces = 0x9E3779B97F4A7C15;
  const auto flat = index.flatten().to(at::kLong);
  const auto bits = at::arange(1, flat.numel() + 1, flat.options());
  bits.mul_(at::Scalar(static_cast<int64_t>(kPlaces))).bitwise_xor_(flat);
  mix(bits, 0xBF58476D1CE4E5B9);
  mix(bits, 0x94D049BB133111EB);
  const auto first = bits.sum();
  mix(bits, 0xBF58476D1CE4E5B9);
  mix(bits, 0x94D049BB133111EB);
  const auto numbers = host_numbers(at::stack({first, bits.sum()}));
  return {numbers[0], numbers[1]};
}

at::Scalar neutral_of(c10::string_view reduce, at::ScalarType dtype) {
  if (reduce == "sum") {
    return 0;
  }
  if (reduce == "prod") {
    return 1;
  }
  const bool lowest = reduce == "amax";
  if (at::isFloatingType(dtype)) {
    const auto infinity = std::numeric_limits<double>::infinity();
    return lowest ? -infinity : infinity;
  }
  return AT_DISPATCH_INTEGRAL_TYPES_AND(
      at::kBool, dtype, "scatter_reduce", [&] {
        using Limits = std::numeric_limits<scalar_t>;
        return at::Scalar(
            static_cast<int64_t>(lowest ? Limits::lowest() : Limits::max()));
      });
}

void reduce_into(
    const at::Tensor& rows,
    int64_t dim,
    const at::Tensor& places,
    const at::Tensor& source,
    c10::string_view reduce) {
  if (reduce == "sum") {
    rows.index_add_(dim, places, source);
    return;
  }
  const auto index = viewed_along(places, dim, source.dim()).expand_as(source);
  rows.scatter_reduce_(dim, index, source, reduce);
}

RowExchange::RowExchange(
    const at::Tensor& named_rows,
    SpecPtr index_spec,
    const SpecPtr& rows,
    const at::Tensor& whole)
    : index_spec_(std::move(index_spec)),
      group_(*group_of(*rows->mesh(), rows->axes(0))) {
  const auto own = rows->interval(0);
  first_row_ = own.begin;
  own_rows_ = own.end - own.begin;
  if (named_rows.is_meta()) {
    places_ = named_rows;
    rows_of_others_ = sent_rows_ = named_rows.narrow(0, 0, 0);
    sent_.resize(rows->partition(0).pieces());
    received_ = sent_;
    silent_ = true;
    return;
  }

  const auto is_other =
      named_rows.lt(own.begin).logical_or_(named_rows.ge(own.end));
  const auto others = is_other.nonzero().select(1, 0);
  const auto named = named_rows.index_select(0, others);
  const auto [unique, inverse, counts] =
      at::_unique2(named, /*sorted=*/true, /*return_inverse=*/true);
  rows_of_others_ = unique;
  other_rows_ = unique.numel();
  places_ = named_rows - own.begin;
  places_.index_copy_(0, others, inverse + own_rows_);

  received_ = count_by_piece(unique, rows->partition(0));
  if (whole.defined()) {
    whole_ = digest_of(whole);
    look_up_others(whole, rows->partition(0));
  } else {
    ask_others(unique, *rows);
  }
}

void RowExchange::ask_others(
    const at::Tensor& named_of_others,
    const ShardSpec& rows) {
  const auto options = named_of_others.options();
  const std::vector<int64_t> ones(received_.size(), 1);
  sent_ = host_numbers(
      all_to_all_rows(at::tensor(received_, options), 0, ones, ones, group_));
  sent_rows_ = all_to_all_rows(named_of_others, 0, received_, sent_, group_) -
      first_row_;
  const auto most = at::full({1}, other_rows_, options);
  silent_ = all_reduce(most, Reduce::Max, *rows.mesh(), rows.axes(0))
                .item<int64_t>() == 0;
}

void RowExchange::look_up_others(
    const at::Tensor& whole,
    const Partition& rows) {
  const auto readers = piece_of_elements(*index_spec_, whole.options());
  const auto owners = piece_of(whole, rows);
  const auto travel = readers.ne(owners);
  silent_ = !travel.any().item<bool>();
  const auto to_others = travel.logical_and_(owners.eq(Group(group_).rank()));
  const auto keys = (readers * rows.extent() + whole).masked_select(to_others);
  const auto unique = std::get<0>(at::_unique2(keys, /*sorted=*/true));
  sent_rows_ = unique.remainder(rows.extent()) - first_row_;
  sent_ = host_numbers(
      at::bincount(unique.div(rows.extent(), "floor"), {}, rows.pieces()));
}

at::Tensor RowExchange::differs_from(const at::Tensor& named_rows) const {
  const auto differs = [&](int64_t step) {
    const auto places = places_.slice(0, 0, std::nullopt, step);
    const auto of_others = rows_of_others_.numel() == 0
        ? places
        : rows_of_others_.index_select(0, places.sub(own_rows_).clamp_min_(0));
    const auto rows =
        at::where(places.lt(own_rows_), places + first_row_, of_others);
    return rows.ne(named_rows.slice(0, 0, std::nullopt, step)).any();
  };
  constexpr int64_t kSamples = 1024;
  const auto step = places_.numel() / kSamples;
  if (step > 1 && places_.is_cpu()) { // a device is not waited for
    const auto found = differs(step);
    if (found.item<bool>()) {
      return found;
    }
  }
  return differs(1);
}

at::Tensor RowExchange::all_to_all(const at::Tensor& x, int64_t dim, bool back)
    const {
  return back ? all_to_all_rows(x, dim, received_, sent_, group_)
              : all_to_all_rows(x, dim, sent_, received_, group_);
}

at::Tensor RowExchange::table(const at::Tensor& own, int64_t dim) const {
  if (silent_) {
    return own;
  }
  const auto of_others = others(own, dim);
  return other_rows_ > 0 ? at::cat({own, of_others}, dim) : own;
}

at::Tensor RowExchange::others(const at::Tensor& own, int64_t dim) const {
  return silent_
      ? own.narrow(dim, 0, 0)
      : all_to_all(own.index_select(dim, sent_rows_), dim, /*back=*/false);
}

at::Tensor RowExchange::others_during(
    const at::Tensor& own,
    int64_t dim,
    c10::function_ref<void()> meanwhile) const {
  if (silent_) {
    meanwhile();
    return own.narrow(dim, 0, 0).clone();
  }
  const auto named = own.index_select(dim, sent_rows_);
  return exchange_during(named, encoded(named, dim), meanwhile);
}

at::Tensor RowExchange::returned(const at::Tensor& others, int64_t dim) const {
  auto sizes = others.sizes().vec();
  sizes[dim] = own_rows_;
  const auto none = at::zeros(sizes, others.options());
  return silent_
      ? none
      : none.index_add(dim, sent_rows_, all_to_all(others, dim, /*back=*/true));
}

/// As all_to_all_rows has it: no rank knows the other ranks' splits.
EncodedExchange RowExchange::encoded(const at::Tensor& x, int64_t dim) const {
  const Group group(group_);
  ExchangePlan plan;
  plan.source_sizes = plan.target_sizes = x.sizes().vec();
  plan.target_sizes[dim] = other_rows_;
  plan.largest_message = std::nullopt;
  int64_t sent = 0;
  int64_t received = 0;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    const auto out =
        box_of_rows(plan.source_sizes, dim, sent, sent + sent_[rank]);
    const auto in = box_of_rows(
        plan.target_sizes, dim, received, received + received_[rank]);
    plan.sends.push_back({group.rank(), rank, out, out});
    plan.receives.push_back({rank, group.rank(), in, in});
    sent += sent_[rank];
    received += received_[rank];
  }
  return encode(std::move(plan), group);
}

RowExchange::Arrived RowExchange::arrived(const at::Tensor& others, int64_t dim)
    const {
  const auto first = sent_.begin();
  return {
      sent_rows_,
      silent_ ? others : all_to_all(others.contiguous(), dim, /*back=*/true),
      std::accumulate(first, first + Group(group_).rank(), int64_t{0})};
}

at::Tensor RowExchange::own_rows(
    const at::Tensor& table,
    int64_t dim,
    c10::string_view reduce) const {
  if (silent_) {
    return table;
  }
  auto own = table.narrow(dim, 0, own_rows_);
  const auto others = table.narrow(dim, own_rows_, other_rows_).contiguous();
  const auto arrived = all_to_all(others, dim, /*back=*/true);
  reduce_into(own, dim, sent_rows_, arrived, reduce);
  return own;
}

const at::Tensor& RowExchange::counts() const {
  if (!counts_.defined()) {
    const auto rows = at::zeros({table_rows()}, places_.options());
    rows.index_add_(0, places_, at::ones_like(places_));
    counts_ = own_rows(rows, 0, "sum");
  }
  return counts_;
}

const at::Tensor& RowExchange::last_elements() const {
  if (!last_elements_.defined()) {
    const auto numbers = element_numbers(*index_spec_, places_.options());
    const auto rows = at::full({table_rows()}, -1, places_.options());
    reduce_into(rows, 0, places_, numbers, "amax");
    const auto last = table(own_rows(rows, 0, "amax"), 0);
    last_elements_ = last.index_select(0, places_).eq(numbers);
  }
  return last_elements_;
}

// ---- reading and reducing ---------------------------------------------------

SpecPtr rows_spec(
    const RowExchange& exchange,
    const SpecPtr& spec,
    int64_t dim) {
  return with_dims_of(spec, {dim}, dim, exchange.index_spec());
}

at::Tensor read_rows(
    const RowExchange& exchange,
    const at::Tensor& local,
    const SpecPtr& spec,
    int64_t dim) {
  const auto result = rows_spec(exchange, spec, dim);
  const auto rows =
      exchange.table(local, dim).index_select(dim, exchange.places());
  return wrap(rows.view(result->local_sizes()), result);
}

at::Tensor reduce_rows_by_index(
    const RowExchange& exchange,
    const at::Tensor& source,
    int64_t dim,
    c10::string_view reduce) {
  const auto dims = exchange.index_spec()->dim();
  auto sizes = source.sizes().vec();
  sizes.erase(sizes.begin() + dim, sizes.begin() + dim + dims);
  auto flat = sizes;
  flat.insert(flat.begin() + dim, exchange.places().numel());
  sizes.insert(sizes.begin() + dim, exchange.table_rows());
  const auto table = at::full(
      sizes, neutral_of(reduce, source.scalar_type()), source.options());
  reduce_into(table, dim, exchange.places(), source.reshape(flat), reduce);
  return exchange.own_rows(table, dim, reduce);
}

} // namespace shardtensor::detail
