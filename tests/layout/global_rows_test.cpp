#include "shardtensor/layout/global_rows.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor::detail {
namespace {

using namespace testing;

/// The tensor's row-major indices that `position` holds, in local order.
std::vector<int64_t> held_indices(const ShardSpec& spec, int64_t position) {
  const auto rows = rows_of(spec, position);
  std::vector<int64_t> held;
  for_each_index(
      spec.local_sizes(position), [&](const std::vector<int64_t>& local) {
        std::vector<int64_t> global;
        for (size_t dim = 0; dim < local.size(); ++dim) {
          global.push_back(rows[dim][local[dim]]);
        }
        held.push_back(flat(spec.sizes(), global));
      });
  return held;
}

std::vector<int64_t> numbers(const at::Tensor& tensor) {
  const auto flat = tensor.contiguous();
  const auto* data = flat.const_data_ptr<int64_t>();
  return {data, data + flat.numel()};
}

TEST(GlobalRows, AreThoseThatThePieceHolds) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    const Partition partition =
        random_partition(random, trial % 11, 1 + trial % 4)
            .repeated(1 + trial % 3);
    const auto spec = make_spec(
        mesh_of({partition.pieces()}),
        {partition.extent()},
        {Placement::shard(0)},
        {partition});
    for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
      const auto extent = partition.local_extent(piece);
      const auto rows =
          numbers(global_rows(at::arange(extent), partition, piece));
      ASSERT_EQ(rows, held_indices(*spec, piece));
      for (int64_t local = 0; local < extent; ++local) {
        ASSERT_EQ(partition.global_row(piece, local), rows[local]);
      }
      EXPECT_THROW(partition.global_row(piece, extent), c10::IndexError);
      EXPECT_THROW(partition.global_row(piece, -1), c10::IndexError);
    }
  }
}

TEST(GlobalRows, FlatIndicesOfEveryPieceAreItsElements) {
  std::mt19937 random(6);
  const auto mesh = mesh_of({2, 3});
  const auto choices = combinations(
      2,
      {Placement::replicate(),
       Placement::shard(0),
       Placement::shard(1),
       Placement::shard(2)});
  for (int trial = 0; trial < 10; ++trial) {
    for (const auto& placements : choices) {
      const auto spec = random_spec(random, mesh, {4, 6, 3}, placements, true);
      for (int64_t position = 0; position < mesh->ranks(); ++position) {
        const auto held = held_indices(*spec, position);
        const auto local = at::arange(static_cast<int64_t>(held.size()));
        if (!held.empty()) {
          ASSERT_EQ(numbers(flat_indices(local, *spec, position)), held);
        }
      }
    }
  }
}

} // namespace
} // namespace shardtensor::detail
