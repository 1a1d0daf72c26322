#include "shardtensor/rules/points/sampling.h"

#include <algorithm>
#include <limits>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/rules/points/neighbour_call.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/threads/parallel_for.h"

namespace shardtensor {

using namespace detail;

namespace {

using at::Tensor;

constexpr auto kSamplingOp = "farthest_point_sampling";
constexpr auto kBallOp = "ball_query";
constexpr int64_t kSampledPoints = 16384; // of a task

/// One rank's proposal for each batch entry, (B, 2 + D) of double: squared
/// distance, row of the whole cloud, coordinates.
class FarthestPoints {
 public:
  explicit FarthestPoints(const LocalCall& call)
      : cloud_(call.cloud),
        points_(call.points.detach().contiguous()),
        squares_(
            at::full(
                {points_.size(0), points_.size(1)},
                std::numeric_limits<double>::infinity(),
                points_.options())) {}

  /// (B, count).
  Tensor sample(int64_t count, int64_t start) {
    const auto rows =
        at::empty({points_.size(0), count}, points_.options().dtype(at::kLong));
    auto chosen = agreed(proposal_of_row(start));
    for (int64_t i = 0; i < count; ++i) {
      rows.select(1, i).copy_(chosen.select(1, 1));
      if (i + 1 < count) {
        chosen = agreed(farthest_from(chosen));
      }
    }
    return rows;
  }

 private:
  Tensor no_proposal() const {
    return at::full(
        {points_.size(0), 2 + points_.size(2)},
        -1,
        points_.options().dtype(at::kDouble));
  }

  Tensor proposal_of_row(int64_t row) const {
    auto proposal = no_proposal();
    const auto& own = cloud_.own();
    if (row >= own.begin && row < own.end) {
      propose(proposal, row - own.begin);
    }
    return proposal;
  }

  void propose(const Tensor& proposal, int64_t place) const {
    proposal.select(1, 0).fill_(0);
    proposal.select(1, 1).fill_(place + cloud_.own().begin);
    proposal.slice(1, 2).copy_(points_.select(1, place));
  }

  /// After each point's distance to the chosen one is taken into account.
  Tensor farthest_from(const Tensor& chosen) {
    if (!points_.is_cpu()) {
      return farthest_on_device(chosen);
    }
    auto proposal = no_proposal();
    AT_DISPATCH_FLOATING_TYPES(points_.scalar_type(), kSamplingOp, [&] {
      for (int64_t entry = 0; entry < points_.size(0); ++entry) {
        propose_farthest<scalar_t>(
            entry, chosen.select(0, entry), proposal.select(0, entry));
      }
    });
    return proposal;
  }

  /// By operators, in the order of the loops below: the same rows, but where a
  /// compiler fuses these loops' products and sums.
  Tensor farthest_on_device(const Tensor& chosen) {
    if (points_.size(1) == 0) {
      return no_proposal();
    }
    Tensor sum;
    for (int64_t dim = 0; dim < points_.size(2); ++dim) {
      const auto from = chosen.narrow(1, 2 + dim, 1).to(points_.scalar_type());
      const auto away = points_.select(2, dim).sub(from);
      const auto square = away.mul(away);
      sum = dim == 0 ? square : sum.add_(square);
    }
    squares_ = at::minimum(squares_, sum);
    const auto best =
        squares_.argmax(1, /*keepdim=*/true); // of equal ones the first
    const auto points =
        points_.gather(1, best.unsqueeze(2).expand({-1, -1, points_.size(2)}));
    return at::cat(
        {squares_.gather(1, best).to(at::kDouble),
         best.add(cloud_.own().begin).to(at::kDouble),
         points.squeeze(1).to(at::kDouble)},
        1);
  }

  template <typename scalar_t>
  void propose_farthest(
      int64_t entry,
      const Tensor& chosen,
      const Tensor& proposal) {
    const auto count = points_.size(1);
    const auto dims = points_.size(2);
    const auto* const point =
        points_.const_data_ptr<scalar_t>() + entry * count * dims;
    auto* const square = squares_.mutable_data_ptr<scalar_t>() + entry * count;
    const auto coordinates = chosen.slice(0, 2).to(points_.scalar_type());
    const auto* from = coordinates.const_data_ptr<scalar_t>();
    // The first of the farthest ones in each range.
    std::vector<int64_t> farthest(count / kSampledPoints + 1, -1);
    parallel_for(count, kSampledPoints, [&](int64_t begin, int64_t end) {
      int64_t best = begin;
      for (int64_t i = begin; i < end; ++i) {
        scalar_t sum = 0;
        for (int64_t dim = 0; dim < dims; ++dim) {
          const scalar_t away = point[i * dims + dim] - from[dim];
          sum += away * away;
        }
        square[i] = std::min(square[i], sum);
        best = square[i] > square[best] ? i : best;
      }
      farthest[begin / kSampledPoints] = best;
    });
    int64_t best = -1;
    for (const auto place : farthest) {
      if (place >= 0 && (best < 0 || square[place] > square[best])) {
        best = place;
      }
    }
    if (best >= 0) {
      auto* out = proposal.mutable_data_ptr<double>();
      out[0] = square[best];
      out[1] = static_cast<double>(best + cloud_.own().begin);
      std::copy_n(point + best * dims, dims, out + 2);
    }
  }

  /// The ranks' best proposals; pieces stand in the order of rows, so the first
  /// of equal ones, which argmax finds, is the first row.
  Tensor agreed(const Tensor& proposal) const {
    if (cloud_.group.empty()) {
      return proposal;
    }
    const auto ranks = static_cast<int64_t>(cloud_.rows.size());
    const auto all = all_gather_rows(
        proposal.unsqueeze(0), 0, std::vector<int64_t>(ranks, 1), cloud_.group);
    const auto best = all.narrow(2, 0, 1).argmax(0, /*keepdim=*/true);
    return all.gather(0, best.expand({1, -1, all.size(2)})).squeeze(0);
  }

  CloudPieces cloud_;
  Tensor points_; // (B, n, D)
  Tensor squares_; // of the distances to the nearest chosen point
};

/// Every rank's (B, count), cut as the rows of the cloud.
Tensor cut_as_rows(const NeighbourCall& call, const Tensor& found) {
  const auto whole = call.is_batched() ? found : found.squeeze(0);
  const auto& cloud = call.layout();
  if (!cloud) {
    return whole;
  }
  const int64_t rows = call.is_batched() ? 1 : 0;
  std::vector<int64_t> sizes(
      cloud->sizes().begin(), cloud->sizes().begin() + rows);
  sizes.push_back(found.size(1));
  std::vector<int64_t> from(rows, 0);
  from.push_back(-1);
  const auto layout = with_dims(cloud, std::move(sizes), from);
  auto placements = layout->placements();
  for (const auto axis : cloud->axes(rows)) {
    placements[axis] = Placement::shard(rows);
  }
  return redistribute(from_local(whole, layout), placements);
}

void check_samples(const Tensor& points, int64_t count, int64_t start) {
  TORCH_CHECK_VALUE(
      count >= 1 && count <= points.size(-2),
      kSamplingOp,
      ": count is ",
      count,
      ", expected 1 <= count <= ",
      points.size(-2),
      ", the number of points");
  TORCH_CHECK_VALUE(
      start >= 0 && start < points.size(-2),
      kSamplingOp,
      ": start is ",
      start,
      ", expected a row of ",
      points.size(-2),
      " points");
}

} // namespace

Tensor farthest_point_sampling(
    const Tensor& points,
    int64_t count,
    int64_t start) {
  const CommScope scope("shardtensor::farthest_point_sampling");
  const at::NoGradGuard no_grad;
  const OutsideTransforms of_all_levels;
  const auto cloud = value_inside(points);
  const NeighbourCall call(kSamplingOp, cloud, cloud);
  check_samples(points, count, start);
  check_same_number(call.local(), "count", static_cast<double>(count));
  check_same_number(call.local(), "start", static_cast<double>(start));
  check_finite(call.local());
  return cut_as_rows(call, FarthestPoints(call.local()).sample(count, start));
}

std::tuple<Tensor, Tensor> ball_query(
    const Tensor& points,
    const Tensor& queries,
    double radius,
    int64_t max_points) {
  const CommScope scope("shardtensor::ball_query");
  const at::NoGradGuard no_grad;
  const OutsideTransforms of_all_levels;
  const NeighbourCall call(
      kBallOp, value_inside(points), value_inside(queries));
  check_radius(kBallOp, radius);
  check_max_points(kBallOp, max_points);
  const auto rows = search(call.local(), {max_points, radius}).nearest.rows;
  const auto none = rows.eq(Nearest::kNoRow);
  const auto nearest = rows.narrow(2, 0, 1);
  const auto filler =
      nearest.masked_fill(nearest.eq(Nearest::kNoRow), 0).expand_as(rows);
  return {
      call.beside_queries(at::where(none, filler, rows)),
      call.beside_queries(none.logical_not().sum(-1))};
}

namespace {

void register_samplings(torch::Library& m) {
  m.impl("farthest_point_sampling", farthest_point_sampling);
  m.impl("ball_query", ball_query);
}
TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  register_samplings(m);
}
TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  register_samplings(m);
}

} // namespace

} // namespace shardtensor
