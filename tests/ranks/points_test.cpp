// Clouds of points between real processes: what one device gives, of plain
// tensors, cut ones and both.
#include <functional>

#include <ATen/core/dispatch/Dispatcher.h>

#include "support.h"

namespace shardtensor::testing {

namespace {

constexpr int64_t kPoints = 23;

using Tensors = std::vector<at::Tensor>;
/// Of a cloud (N, 3), values beside it (N, 2) and queries (M, 3).
using Call = std::function<
    Tensors(const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

Tensors list(const std::tuple<at::Tensor, at::Tensor>& x) {
  return {std::get<0>(x), std::get<1>(x)};
}

/// Two triangles of the cloud's first points.
at::Tensor faces() {
  return at::tensor({0, 2, 1, 0, 1, 3}, at::kLong);
}

const std::vector<double> kLow{-1, -1, -1};
const std::vector<double> kHigh{1, 1, 1};
const std::vector<int64_t> kShape{3, 2, 2};

std::vector<Call> calls() {
  return {
      [](const auto& p, const auto&, const auto& q) {
        return list(knn(p, q, 7));
      },
      [](const auto& p, const auto&, const auto& q) {
        return radius_search(
            p, q, 0.9, 4, true, true, at::kInt, /*return_counts=*/true);
      },
      [](const auto& p, const auto&, const auto& q) {
        return radius_search(p, q, 0.9, std::nullopt, true, true);
      },
      [](const auto& p, const auto&, const auto& q) {
        return list(ball_query(p, q, 0.9, 4));
      },
      [](const auto& p, const auto&, const auto&) {
        return Tensors{farthest_point_sampling(p, 6, 2)};
      },
      [](const auto& p, const auto& v, const auto& q) {
        return Tensors{interpolate_neighbors(p, v, q)};
      },
      [](const auto& p, const auto& v, const auto&) {
        const auto [means, of_values, counts, cubes, entries] =
            grid_subsample(p, 0.7, v);
        return Tensors{means, of_values, counts, cubes, entries};
      },
      [](const auto& p, const auto& v, const auto& q) {
        const auto voxels = voxelize(p, v, kLow, kHigh, kShape);
        return Tensors{voxels, devoxelize(voxels, q, kLow, kHigh)};
      },
      [](const auto& p, const auto&, const auto& q) {
        const auto [distances, nearest, of_faces] =
            signed_distance_field(p, faces(), q);
        return Tensors{distances, nearest, of_faces};
      }};
}

at::Tensor cut(const at::Tensor& whole, const Partition& pieces) {
  ShardSpec::Partitions partitions(whole.dim());
  partitions[0] = pieces;
  return shard(
      whole,
      make_spec(
          line(), whole.sizes().vec(), {Placement::shard(0)}, partitions));
}

at::Tensor whole_of(const at::Tensor& x) {
  return is_shard_tensor(x) ? full_tensor(x) : x;
}

TEST(RanksPoints, FindWhatOneDeviceFinds) {
  const auto cloud = numbered({kPoints, 3});
  const auto values = numbered({kPoints, 2});
  const auto queries = numbered({9, 3}).mul(0.9);
  for (const auto& call : calls()) {
    const auto expected = call(cloud, values, queries);
    for (const auto& pieces : cuts(kPoints, line()->ranks())) {
      const auto points = cut(cloud, pieces);
      const auto beside = cut(values, pieces);
      for (const auto& near :
           {queries, cut(queries, cuts(9, line()->ranks())[2])}) {
        const auto found = call(points, beside, near);
        ASSERT_EQ(found.size(), expected.size());
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_EQ(found[i].scalar_type(), expected[i].scalar_type());
          expect_close(whole_of(found[i]), expected[i]);
        }
      }
    }
  }
}

TEST(RanksPoints, AreOrderedAlikeFromAnyPieces) {
  const auto cloud = numbered({kPoints, 3});
  for (const auto* const method : {"rcb", "hilbert"}) {
    at::Tensor expected;
    for (const auto& pieces : cuts(kPoints, line()->ranks())) {
      const auto [points, rows] = partition_points(cut(cloud, pieces), method);
      const auto order = full_tensor(rows);
      expect_close(full_tensor(points), cloud.index_select(0, order));
      expected = expected.defined() ? expected : order;
      EXPECT_TRUE(order.equal(expected));
    }
  }
}

/// Every function of points.h and beside it is an operator of its name, for
/// plain tensors, too.
TEST(RanksPoints, AreOperators) {
  for (const auto* const name :
       {"knn",
        "radius_search",
        "ball_query",
        "farthest_point_sampling",
        "interpolate_neighbors",
        "grid_subsample",
        "voxelize",
        "devoxelize",
        "signed_distance_field",
        "partition_points"}) {
    EXPECT_TRUE(
        c10::Dispatcher::singleton()
            .findSchema({std::string("shardtensor::") + name, ""})
            .has_value())
        << name;
  }
}

TEST(RanksPoints, RaiseForNanOnAllRanks) {
  auto cloud = numbered({kPoints, 3});
  cloud[kPoints - 1][0] = NAN;
  const auto points = cut(cloud, cuts(kPoints, line()->ranks())[0]);
  EXPECT_NE(
      error_of<c10::ValueError>([&] {
        knn(points, points, 2);
      }).find("knn: expected finite coordinates"),
      std::string::npos);
}

} // namespace

} // namespace shardtensor::testing
