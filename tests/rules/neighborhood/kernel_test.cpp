#include "shardtensor/rules/neighborhood/kernel.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardtensor/rules/neighborhood/by_windows.h"
#include "shardtensor/rules/neighborhood/neighborhood.h"

namespace shardtensor::detail {
namespace {

using Dims = std::vector<NeighborhoodDim>;

struct Piece {
  Dims dims;
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

/// Random tensors of the piece's queries and keys.
Piece piece_of(const Dims& dims, int64_t heads = 2) {
  std::vector<int64_t> queries{2};
  std::vector<int64_t> keys{2};
  for (const auto& dim : dims) {
    queries.push_back(dim.queries.extent());
    keys.push_back(static_cast<int64_t>(key_rows(dim).size()));
  }
  const auto made = [&](std::vector<int64_t> sizes, int64_t features) {
    sizes.insert(sizes.end(), {heads, features});
    return at::randn(sizes, at::kDouble);
  };
  return {dims, made(queries, 11), made(keys, 11), made(keys, 9)};
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(at::allclose(actual, expected, 1e-9, 1e-9));
}

class PiecesOfADomain : public ::testing::TestWithParam<Dims> {};

// Loops and PyTorch's operators, each with its own arithmetic.
TEST_P(PiecesOfADomain, AreTheSameBothWays) {
  at::manual_seed(3);
  const auto [dims, q, k, v] = piece_of(GetParam());
  const auto loops = attend_neighborhood(q, k, v, dims, 0.4);
  for (const bool in_parts : {false, true}) {
    const auto windows = attend_windows(q, k, v, dims, 0.4, in_parts);
    expect_equal(loops.output, windows.output);
    expect_equal(loops.log_sum, windows.log_sum);
    const auto grad = at::randn_like(loops.output);
    const auto a =
        attend_neighborhood_backward(grad, q, k, v, loops, dims, 0.4);
    const auto b = attend_windows_backward(grad, q, k, v, dims, 0.4, in_parts);
    expect_equal(std::get<0>(a), std::get<0>(b));
    expect_equal(std::get<1>(a), std::get<1>(b));
    expect_equal(std::get<2>(a), std::get<2>(b));
  }
}
INSTANTIATE_TEST_SUITE_P(
    Neighborhood,
    PiecesOfADomain,
    ::testing::Values(
        Dims{{9, 3, 1, 1, false, {2, 5}}},
        Dims{{9, 3, 2, 2, true, {0, 4}}},
        Dims{{9, 3, 1, 1, false, {4, 4}}},
        Dims{{5, 2, 1, 1, true, {1, 4}}, {6, 3, 2, 1, false, {3, 6}}},
        Dims{
            {4, 2, 1, 1, false, {0, 4}},
            {3, 3, 1, 2, false, {2, 3}},
            {5, 2, 2, 1, true, {1, 5}}}));

TEST(Neighborhood, IsAFunctionForPrograms) {
  at::manual_seed(3);
  const Dims dims{{9, 3, 2, 1, true, {0, 9}}, {6, 2, 2, 1, false, {0, 6}}};
  const auto [_, q, k, v] = piece_of(dims);
  expect_equal(
      neighborhood_attention(q, k, v, {3, 2}, 2, 1, {true, false}, 0.4),
      attend_windows(q, k, v, dims, 0.4, /*in_parts=*/false).output);
}

TEST(Neighborhood, OfManyQueriesIsComputedInParts) {
  at::manual_seed(3);
  const Dims dims{{4096, 127, 1, 1, false, {1000, 1400}}};
  auto piece = piece_of(dims, /*heads=*/8);
  const auto& [_, q, k, v] = piece;
  const auto windows = attend_windows(q, k, v, dims, 1, /*in_parts=*/true);
  expect_equal(windows.output, attend_neighborhood(q, k, v, dims, 1).output);
}

TEST(Neighborhood, KeepsNumbersThatAreTooLargeToExponentiate) {
  const Dims dims{{8, 3, 1, 1, false, {0, 8}}};
  const auto q = at::full({1, 8, 1, 2}, 500.0f);
  const auto k = at::arange(8.0f).view({1, 8, 1, 1}).expand({1, 8, 1, 2});
  const auto v = k.contiguous();
  const auto out = attend_neighborhood(q, k, v, dims, 1).output;
  EXPECT_EQ(out.view({8, 2}).select(1, 0)[3].item<float>(), 4);
  const auto nan = at::full({1, 8, 1, 2}, NAN);
  EXPECT_TRUE(
      at::isnan(attend_neighborhood(q, nan, v, dims, 1).output)
          .all()
          .item<bool>());
}

} // namespace
} // namespace shardtensor::detail
