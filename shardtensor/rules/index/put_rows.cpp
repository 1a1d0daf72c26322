#include "shardtensor/rules/index/put_rows.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/rules/index/owners_order.h"
#include "shardtensor/rules/index/row_exchange.h"
#include "shardtensor/tensor/redistribute.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

constexpr auto kPut = "aten::index_put_";

// ---- the index --------------------------------------------------------------

/// How the values cut the dims of the index; null where they don't.
SpecPtr index_beside(
    const Tensor& values,
    int64_t position,
    const Dims& sizes,
    int64_t dims) {
  const auto count = static_cast<int64_t>(sizes.size());
  if (!is_cut(values)) {
    return nullptr;
  }
  const auto& own = spec(values);
  // Counted from the back, as values are broadcast.
  const auto shift = dims - values.dim() - position;
  std::vector<Placement> placements(own->mesh()->axes());
  ShardSpec::Partitions partitions(count);
  for (const auto axis : own->sharded_axes()) {
    const auto dim = own->placement(axis).dim;
    const auto place = dim + shift;
    if (place >= 0 && place < count && own->size(dim) == sizes[place]) {
      placements[axis] = Placement::shard(place);
      partitions[place] = own->partition(dim);
    }
  }
  const auto beside =
      make_spec(own->mesh(), sizes, placements, std::move(partitions));
  return beside->is_sharded() ? beside : nullptr;
}

/// Cut along all of the axes, and no others: as an index is, else as the
/// values, else along its longest dim. Null where nothing is cut.
SpecPtr layout_of_indices(
    const NamedDims& named,
    const Dims& axes,
    const Dims& sizes,
    const SpecPtr& beside) {
  const auto cut = std::ranges::find_if(named.indices, is_cut);
  const auto like = cut == named.indices.end()
      ? beside
      : without_partial(spec(cut->expand(sizes)));
  if (!like || sizes.empty()) {
    return nullptr;
  }
  const auto longest = std::ranges::max_element(sizes) - sizes.begin();
  std::vector<Placement> placements(like->mesh()->axes());
  for (const auto axis : axes) {
    const auto given = like->placement(axis);
    placements[axis] = given.is_shard() ? given : Placement::shard(longest);
  }
  return with_placements(like, std::move(placements));
}

/// The same tensor where it is cut so, for its plan is kept.
Tensor cut_as(const Tensor& given, const Tensor& self, const SpecPtr& layout) {
  const auto index = promote(given.to(self.device()), layout->mesh());
  const auto is_cut_so = std::ranges::all_of(
      layout->sharded_axes(),
      [&](int64_t axis) { return spec(index)->placement(axis).is_shard(); });
  return is_cut_so ? index : redistribute(index, layout);
}

/// Places in the dims as rows of the one that they are in the order of owners.
Tensor rows_of(
    const NamedDims& named,
    const Tensor& self,
    const OwnersOrder& order,
    const SpecPtr& layout) {
  std::vector<Tensor> places;
  for (size_t i = 0; i < named.dims.size(); ++i) {
    const auto extent = self.size(named.dims[i]);
    check_planned_index(kPut, named.indices[i], named.dims[i], extent, true);
    const auto index =
        promote(named.indices[i].to(self.device(), at::kLong), layout->mesh());
    const auto own = local_of(index.expand(layout->sizes()), layout).tensor;
    places.push_back(own.remainder(extent).contiguous());
  }
  return wrap(order.rows(places), layout);
}

// ---- the values -------------------------------------------------------------

/// Whether ranks in their order have the elements in theirs.
bool is_in_order(const ShardSpec& index) {
  const auto dims = index.sharded_dims();
  const auto& sizes = index.sizes();
  return dims.size() == 1 && index.is_contiguous() &&
      std::all_of(sizes.begin(), sizes.begin() + dims[0], [](int64_t size) {
           return size == 1;
         });
}

/// Own rows, and what is written into them in the order of ranks.
struct Written {
  Tensor rows;
  Tensor values; // along the dim in question
};

/// Communication: that of RowExchange::table().
Written written_rows(
    const RowExchange& exchange,
    const Tensor& source,
    int64_t dim,
    bool accumulate) {
  const auto own_rows = exchange.table_rows() - exchange.other_rows();
  const auto& places = exchange.places();
  const auto is_own = places.lt(own_rows);
  const auto own = is_own.nonzero().select(1, 0);
  const auto others = is_own.logical_not().nonzero().select(1, 0);
  auto sizes = source.sizes().vec();
  sizes[dim] = exchange.other_rows();
  auto of_others = at::zeros(sizes, source.options());
  of_others.transpose(0, dim).index_put_(
      {places.index_select(0, others) - own_rows},
      source.index_select(dim, others).transpose(0, dim),
      accumulate);
  const auto arrived = exchange.arrived(of_others, dim);
  const auto split = arrived.of_lower_ranks;
  return {
      at::cat(
          {arrived.rows.slice(0, 0, split),
           places.index_select(0, own),
           arrived.rows.slice(0, split)},
          0),
      at::cat(
          {arrived.values.slice(dim, 0, split),
           source.index_select(dim, own),
           arrived.values.slice(dim, split)},
          dim)};
}

/// The index of own rows in the own part of self.
Indices own_places(
    const NamedDims& named,
    const OwnersOrder& order,
    const Tensor& rows,
    int64_t dims) {
  const auto places = order.places(rows);
  Indices result;
  for (int64_t dim = 0; dim < dims; ++dim) {
    const auto found = std::ranges::find(named.dims, dim);
    result.push_back(
        found == named.dims.end()
            ? std::nullopt
            : std::optional(places[found - named.dims.begin()]));
  }
  return result;
}

/// The dims of the index as one.
Tensor with_one_index_dim(
    const Tensor& values,
    const SpecPtr& layout,
    int64_t position,
    int64_t dims) {
  return values.expand(layout->local_sizes())
      .flatten(position, position + dims - 1);
}

} // namespace

Tensor local_values(
    const Tensor& values,
    const SpecPtr& result,
    const Tensor& self) {
  TORCH_CHECK(
      values.scalar_type() == self.scalar_type(),
      "index_put_: expected values of dtype ",
      self.scalar_type(),
      ", got ",
      values.scalar_type());
  if (!is_shard_tensor(values)) {
    return values.to(self.device()); // a number
  }
  check_values_fit(values.sizes(), result->sizes());
  return local_of(values.expand(result->sizes()), result).tensor;
}

bool puts_rows(
    const Tensor& self,
    const Indices& indices,
    const Tensor& values,
    bool accumulate) {
  const auto named = named_by_rows(self, indices);
  if (!named || self.numel() == 0 || has_no_values(impl_of(self)->local())) {
    return false;
  }
  const auto wanted = without_partial(spec(self));
  const OwnersOrder order(wanted, named->dims);
  const auto sizes = shared_sizes(named->indices);
  const auto position = named->position();
  const auto index_dims = static_cast<int64_t>(sizes.size());
  const auto dims =
      self.dim() - static_cast<int64_t>(named->dims.size()) + index_dims;
  const auto layout = layout_of_indices(
      *named, order.axes(), sizes, index_beside(values, position, sizes, dims));
  if (order.axes().empty() || !layout || layout->numel() == 0) {
    return false;
  }
  const bool is_one = named->dims.size() == 1;
  const auto exchange = row_exchange(
      kPut,
      is_one ? cut_as(named->indices[0], self, layout)
             : rows_of(*named, self, order, layout),
      is_one ? layout_of_dim(wanted, named->dims[0]) : order.layout(),
      0,
      /*may_be_negative=*/true);
  if (!exchange) {
    return false;
  }
  const auto result =
      with_dims_of(wanted, named->dims, position, exchange->index_spec());
  auto source = with_one_index_dim(
      local_values(values, result, self), result, position, index_dims);
  const bool sums_last = !accumulate && !is_in_order(*exchange->index_spec());
  if (sums_last) {
    const auto is_last =
        viewed_along(exchange->last_elements(), position, source.dim());
    source = source.masked_fill(is_last.logical_not(), 0);
  }
  const auto written =
      written_rows(*exchange, source, position, accumulate || sums_last);
  const auto places = own_places(*named, order, written.rows, self.dim());
  const LocalToWrite target(self, wanted);
  if (sums_last) {
    target.local().index_put_(places, at::zeros({}, source.options()));
  }
  target.local().index_put_(places, written.values, accumulate || sums_last);
  target.finish();
  return true;
}

} // namespace shardtensor::detail
