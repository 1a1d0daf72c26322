#include "shardtensor/rules/points/rows_of_cloud.h"

#include <ATen/ops/_unique2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;

/// The same for all levels of a transform.
Tensor constant(const Numbers& numbers, const at::TensorOptions& options) {
  const OutsideTransforms of_all_levels;
  return at::tensor(numbers, options);
}

/// Rows of (B, n, ...) by entry * n + row, zeros where that is -1.
Tensor rows_at(const Tensor& piece, const Tensor& places) {
  auto sizes = piece.sizes().vec();
  sizes.erase(sizes.begin());
  sizes[0] = 1;
  const auto none = at::zeros(sizes, piece.options());
  const auto table = at::cat({piece.flatten(0, 1), none});
  const int64_t last = table.size(0) - 1;
  return table.index_select(0, places.masked_fill(places.lt(0), last));
}

/// Where the ranks' pieces, B entries each, begin if they stand one behind the
/// other.
Numbers begins_of(const CloudPieces& cloud, int64_t batch) {
  Numbers begins;
  for (const auto& rows : cloud.rows) {
    begins.push_back(batch * rows.begin);
  }
  begins.push_back(batch * cloud.points());
  return begins;
}

/// Places of rows among the ranks' pieces one behind the other; -1 for none.
Tensor places_of(
    const Tensor& entries,
    const Tensor& rows,
    int64_t batch,
    const CloudPieces& cloud) {
  Numbers firsts;
  Numbers extents;
  for (const auto& piece : cloud.rows) {
    firsts.push_back(piece.begin);
    extents.push_back(piece.extent());
  }
  const auto first = constant(firsts, rows.options());
  // Of several pieces that begin at a row, the last has it.
  const auto owner =
      at::searchsorted(first, rows, false, /*right=*/true).sub(1).clamp_min(0);
  const auto begin = first.index_select(0, owner);
  const auto extent = constant(extents, rows.options()).index_select(0, owner);
  const auto places =
      begin.mul(batch).add(entries.mul(extent)).add(rows).sub(begin);
  return places.masked_fill(rows.lt(0), -1);
}

/// The rows at these places, ascending and each once, of the ranks that have
/// them.
Tensor fetch(
    const Tensor& piece,
    const Tensor& places,
    const Numbers& begins,
    const CloudPieces& cloud) {
  const auto bounds = constant(begins, places.options());
  const auto cuts = host_numbers(at::searchsorted(places, bounds));
  Numbers wanted;
  for (size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
    wanted.push_back(cuts[rank + 1] - cuts[rank]);
  }
  const Numbers one(wanted.size(), 1);
  const auto asked = host_numbers(all_to_all_rows(
      constant(wanted, places.options()), 0, one, one, cloud.group));
  const auto asked_places =
      all_to_all_rows(places, 0, wanted, asked, cloud.group);
  const auto given =
      piece.flatten(0, 1).index_select(0, asked_places.sub(begins[cloud.rank]));
  return all_to_all_rows(given, 0, asked, wanted, cloud.group);
}

/// Which rows ranks ask each other for is nothing that a compiler knows, nor
/// one thing for all samples of a vmap: they get them all.
Tensor rows_of_whole(
    const Tensor& piece,
    const Tensor& entries,
    const Tensor& rows,
    const CloudPieces& cloud) {
  Numbers sizes;
  for (const auto& own : cloud.rows) {
    sizes.push_back(own.extent());
  }
  const auto whole = all_gather_rows(piece, 1, sizes, cloud.group);
  const auto places = entries.mul(cloud.points()).add(rows);
  return rows_at(whole, places.masked_fill(rows.lt(0), -1));
}

} // namespace

Tensor rows_of_cloud(
    const Tensor& piece,
    const Tensor& entries,
    const Tensor& rows,
    const CloudPieces& cloud) {
  const bool has_numbers =
      !is_traced(piece) && values_inside(rows).is_same(without_levels(rows));
  if (!has_numbers && !cloud.group.empty()) {
    return rows_of_whole(piece, entries, rows, cloud);
  }
  const int64_t batch = piece.size(0);
  const auto places = places_of(entries, rows, batch, cloud);
  if (cloud.group.empty()) {
    return rows_at(piece, places);
  }
  const auto begins = begins_of(cloud, batch);
  const int64_t begin = begins[cloud.rank];
  const int64_t end = begins[cloud.rank + 1];
  const auto is_own = places.ge(begin).logical_and(places.lt(end));
  const auto is_other = is_own.logical_or(places.lt(0)).logical_not();
  const auto [others, inverse, counts] =
      at::_unique2(places.masked_select(is_other), true, true);
  // Own rows, then the others' behind them.
  auto found = places.sub(begin).masked_fill(places.lt(0), -1);
  found.masked_scatter_(is_other, inverse.add(end - begin));
  const auto fetched = fetch(piece, others, begins, cloud);
  const auto table = at::cat({piece.flatten(0, 1), fetched});
  return rows_at(table.unsqueeze(0), found);
}

} // namespace shardtensor::detail
