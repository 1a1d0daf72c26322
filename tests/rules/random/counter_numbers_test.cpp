#include "shardtensor/rules/random/counter_numbers.h"

#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "../../layout/parts.h"
#include "shardtensor/rules/random/counter_kernels.h"
#include "shardtensor/rules/random/philox.h"

namespace shardtensor::detail {
namespace {

using namespace testing;
using Kind = Distribution::Kind;

TEST(Philox, GivesPyTorchsWords) {
  const uint64_t key = 0x123456789ABCDEF;
  const Philox philox(key);
  Philox::Words words{};
  for (int64_t lane = 0; lane < Philox::kLanes; ++lane) {
    words[0][lane] = static_cast<uint32_t>(lane * 7);
  }
  philox(words);
  for (int64_t lane = 0; lane < Philox::kLanes; ++lane) {
    at::Philox4_32 expected(key, 0, lane * 7);
    const auto alone = philox({static_cast<uint32_t>(lane * 7), 0, 0, 0});
    for (int word = 0; word < 4; ++word) {
      const auto value = expected();
      EXPECT_EQ(words[word][lane], value);
      EXPECT_EQ(alone[word], value);
    }
  }
}

TEST(CounterKernels, GiveTheWordsOfPhilox) {
  const int64_t key = -0x123456789ABCDEF;
  const Philox philox(static_cast<uint64_t>(key));
  for (int64_t number : {int64_t{0}, int64_t{5}, (int64_t{7} << 33) + 2}) {
    for (int64_t shift : {1, 2}) {
      const auto block = static_cast<uint64_t>(number) >> shift;
      const auto words = philox(
          {static_cast<uint32_t>(block),
           static_cast<uint32_t>(block >> 32),
           0,
           0});
      const auto word = [&](int64_t place, int64_t later, int64_t next) {
        return counter_word<int64_t>(number, key, shift, place, later, next);
      };
      for (int64_t place = 0; place < 4; ++place) {
        EXPECT_EQ(word(place, 0, 0), words[place]);
      }
      EXPECT_EQ(word(0, 2, 1), words[number & 3]);
      EXPECT_EQ(word(1, 1, 0), words[1 + 2 * (number & 1)]);
    }
  }
}

TEST(CounterKernels, TellWhichOfEightNumbersAreBelow) {
  const int64_t key = 0x3243F6A8885A308D;
  const int64_t bound = int64_t{1} << 31;
  for (int64_t first : {int64_t{0}, int64_t{3}, (int64_t{7} << 33) + 2}) {
    for (int64_t place : {0, 8}) {
      uint64_t expected = 0;
      for (int64_t i = 0; i < 8; ++i) {
        const auto word =
            counter_word<int64_t>(first + place + i, key, 2, 0, 2, 1);
        expected |= static_cast<uint64_t>(word < bound) << 8 * i;
      }
      const auto below = counter_below<int64_t>(first, place, key, bound);
      EXPECT_EQ(static_cast<uint64_t>(below), expected);
    }
  }
  const int64_t all = 0x0101010101010101;
  EXPECT_EQ(counter_below<int64_t>(5, 0, key, int64_t{1} << 32), all);
  EXPECT_EQ(counter_below<int64_t>(5, 0, key, 0), 0);
}

TEST(CounterKernels, NumberTheElementsOfAPiece) {
  // Of a whole (4, 5, 6): rows [1, 3) of dim 1.
  for (int64_t place = 0; place < 4 * 2 * 6; ++place) {
    int64_t number = 6;
    number = counter_number<int64_t>(number, place, 1, 12, 1);
    number = counter_number<int64_t>(number, place, 12, 4, 30);
    const auto expected = place / 12 * 30 + (place / 6 % 2 + 1) * 6 + place % 6;
    EXPECT_EQ(number, expected);
  }
}

TEST(GlobalIndex, NumbersThePartsOfAnyLayout) {
  std::mt19937 random(1);
  const auto whole = at::arange(6 * 10 * 4).view({6, 10, 4});
  for (const auto& shape : mesh_shapes()) {
    for (int trial = 0; trial < 20; ++trial) {
      const auto spec = random_spec(
          random,
          mesh_of(shape),
          {6, 10, 4},
          random_placements(random, shape.size(), 3),
          true);
      for (int64_t position = 0; position < spec->mesh()->ranks(); ++position) {
        const auto index = global_index(*seen_from(spec, position));
        const auto part = part_of(whole, *spec, position);
        EXPECT_EQ(index.numel(), part.numel());
        if (part.numel() > 0) {
          const auto numbers =
              at::arange(6 * 10 * 4)
                  .as_strided(index.sizes, index.strides, index.offset);
          EXPECT_TRUE(numbers.reshape(part.sizes()).equal(part));
        }
      }
    }
  }
}

const Distribution kDistributions[] = {
    {Kind::Uniform, -1, 2},
    {Kind::Normal, 1, 3},
    {Kind::LogNormal, 0.5, 0.25},
    {Kind::Cauchy, 1, 2},
    {Kind::Exponential, 2},
    {Kind::Geometric, 0.3},
    {Kind::Bernoulli, 0.3},
    {Kind::Bernoulli, 0},
    {Kind::Bernoulli, 1},
    {Kind::Integer, 0, 1, -3, 10},
    {Kind::Integer, 0, 1, 0, uint64_t{1} << 31},
    {Kind::Integer, 0, 1, 5, (uint64_t{1} << 40) + 7},
    {Kind::Integer, 0, 1, 0, uint64_t{1} << 63},
    {Kind::Integer, 0, 1, -9, (uint64_t{1} << 63) + 12345},
    {Kind::Integer, 0, 1, std::numeric_limits<int64_t>::min(), 0},
};

/// Columns [3, 8) of rows [0, 4) of 11.
const GlobalIndex kIndex{{4, 5}, {11, 1}, 3};

/// Many numbers are made in parts: of runs, or of one that is long.
TEST(CounterNumbers, TensorsGiveThemForAnyRuns) {
  const int64_t most = int64_t{1} << 20;
  const GlobalIndex indices[] = {
      {{3, most / 2 + 1}, {most, 1}, 2},
      {{2, most + 3}, {2 * most, 1}, 1},
      {{2, 3, 4}, {100, 20, 2}, 7},
      {{2, 3, 4}, {100, 20, 1}, 0},
      {{}, {}, 5},
      {{2, 0}, {3, 1}, 0}};
  const auto key = at::tensor({int64_t{0x3243F6A8885A308D}});
  for (const auto& index : indices) {
    const auto loops = at::empty({index.numel()}, at::kBool);
    const Distribution half{Kind::Bernoulli, 0.5};
    fill_by_loops(loops, key.item<int64_t>(), half, index);
    EXPECT_TRUE(numbers_by_tensors(at::kBool, key, half, index).equal(loops));
  }
}

/// What other devices do, on the CPU.
TEST(CounterNumbers, TensorsGiveWhatLoopsGive) {
  const auto key = at::tensor({int64_t{0x3243F6A8885A308D}});
  for (const auto& distribution : kDistributions) {
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
      if ((distribution.kind == Kind::Integer) != (dtype == at::kLong)) {
        continue;
      }
      const auto loops = at::empty({20}, dtype);
      fill_by_loops(loops, key.item<int64_t>(), distribution, kIndex);
      const auto tensors = numbers_by_tensors(dtype, key, distribution, kIndex);
      if (dtype == at::kLong || distribution.kind == Kind::Bernoulli) {
        EXPECT_TRUE(tensors.equal(loops))
            << static_cast<int>(distribution.kind) << tensors << loops;
        continue;
      }
      const double rtol = dtype == at::kDouble ? 1e-12
          : dtype == at::kFloat                ? 1e-5
                                               : 1e-2;
      EXPECT_TRUE(tensors.allclose(loops, rtol, rtol))
          << static_cast<int>(distribution.kind) << tensors << loops;
    }
  }
}

TEST(CounterNumbers, SmallPiecesAreCutFromTheWhole) {
  const GlobalIndex whole{{1000}, {1}, 0};
  for (const auto& distribution : kDistributions) {
    const auto dtype =
        distribution.kind == Kind::Integer ? at::kLong : at::kFloat;
    const auto all = at::empty({1000}, dtype);
    fill_by_loops(all, 42, distribution, whole);
    for (const int64_t begin : {0, 1, 2, 3, 255, 257, 998}) {
      for (const int64_t count : {0, 1, 2, 5, 300}) {
        if (begin + count <= 1000) {
          const auto part = at::empty({count}, dtype);
          fill_by_loops(part, 42, distribution, {{count}, {1}, begin});
          EXPECT_TRUE(part.equal(all.narrow(0, begin, count)));
        }
      }
    }
  }
}

TEST(CounterNumbers, ManyComeInSeveralParts) {
  const GlobalIndex index{{3, 5, 300000}, {4000000, 300000, 1}, 7};
  const Distribution half{Kind::Bernoulli, 0.5, 0, 0, 0};
  const auto key = at::tensor({int64_t{11}});
  const auto loops = at::empty({index.numel()}, at::kBool);
  fill_by_loops(loops, 11, half, index);
  EXPECT_TRUE(numbers_by_tensors(at::kBool, key, half, index).equal(loops));
}

TEST(CounterNumbers, CountersReachBeyond32Bits) {
  const int64_t far = (int64_t{1} << 35) + 5;
  const auto key = at::tensor({int64_t{7}});
  for (const auto& distribution : kDistributions) {
    const auto dtype =
        distribution.kind == Kind::Integer ? at::kLong : at::kDouble;
    const GlobalIndex index{{9}, {1}, far};
    const auto loops = at::empty({9}, dtype);
    const auto near = at::empty({9}, dtype);
    fill_by_loops(loops, 7, distribution, index);
    fill_by_loops(near, 7, distribution, {{9}, {1}, 5});
    EXPECT_TRUE(numbers_by_tensors(dtype, key, distribution, index)
                    .allclose(loops, 1e-12));
    if (distribution.kind == Kind::Normal) {
      EXPECT_FALSE(loops.equal(near));
    }
  }
}

} // namespace
} // namespace shardtensor::detail
