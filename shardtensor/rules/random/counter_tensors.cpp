#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/rules/random/counter_kernels.h"
#include "shardtensor/rules/random/counter_numbers.h"
#include "shardtensor/rules/random/counter_runs.h"
#include "shardtensor/rules/random/philox.h"

// What counter_loops.cpp does, as ATen's operators on any device; on a GPU two
// kernels do most of it. Words of 32 bits stand in 64-bit integers, whose
// products wrap.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Kind = Distribution::Kind;

// Bound the temporaries: a dozen of 8 bytes a number, by kernels four.
constexpr int64_t kNumbersAtATime = int64_t{1} << 20;
constexpr int64_t kNumbersOfKernels = int64_t{1} << 22;
constexpr int64_t kLowBits = 0xFFFFFFFF;

Tensor low_half(const Tensor& bits) {
  return bits.bitwise_and(kLowBits);
}
Tensor high_half(const Tensor& bits) {
  return low_half(bits.__rshift__(32));
}

/// The numbers of elements [begin, end) of `index`.
Tensor global_numbers(
    const GlobalIndex& index,
    int64_t begin,
    int64_t end,
    const Tensor& key) {
  const auto& [sizes, strides, offset] = index;
  if (sizes.size() <= 1) {
    const auto stride = sizes.empty() ? int64_t{1} : strides[0];
    return at::arange(
        offset + begin * stride, offset + end * stride, stride, key.options());
  }
  const auto places = at::arange(begin, end, key.options());
  auto number = at::full_like(places, offset);
  int64_t inner = 1;
  for (auto dim = sizes.size(); dim-- > 0;) {
    const auto size = sizes[dim];
    const auto stride = strides[dim];
    if (have_cuda_kernels(places)) {
      number = run_cuda_kernel(
          kCounterNumber, {number, places}, {inner, size, stride});
    } else {
      number += places.div(inner, "floor").remainder_(size).mul_(stride);
    }
    inner *= size;
  }
  return number;
}

/// What Philox makes of the counters (block, 0): four words for each.
std::array<Tensor, 4> bits_of_blocks(const Tensor& blocks, const Tensor& key) {
  std::array<Tensor, 4> words{
      low_half(blocks),
      high_half(blocks),
      at::zeros_like(blocks),
      at::zeros_like(blocks)};
  Tensor key0 = low_half(key);
  Tensor key1 = high_half(key);
  for (int round = 0; round < Philox::kRounds; ++round) {
    const auto product0 = words[0] * int64_t{Philox::kFactor0};
    const auto product1 = words[2] * int64_t{Philox::kFactor1};
    words[0] = high_half(product1).bitwise_xor_(words[1]).bitwise_xor_(key0);
    words[2] = high_half(product0).bitwise_xor_(words[3]).bitwise_xor_(key1);
    words[1] = low_half(product1);
    words[3] = low_half(product0);
    key0 = low_half(key0 + int64_t{Philox::kStep0});
    key1 = low_half(key1 + int64_t{Philox::kStep1});
  }
  return words;
}

/// The words of each number's block, of which it has some.
class Words {
 public:
  /// A block has 2^shift numbers.
  Words(const Tensor& numbers, const Tensor& key, int64_t shift)
      : numbers_(numbers), key_(key), shift_(shift) {}

  /// Word `place`; two further on where the number has a bit of `later`, one
  /// further on where it has one of `next`.
  Tensor word(int64_t place, int64_t later = 0, int64_t next = 0) {
    if (have_cuda_kernels(numbers_)) {
      return run_cuda_kernel(
          kCounterWord, {numbers_, key_}, {shift_, place, later, next});
    }
    if (!bits_) {
      bits_ = bits_of_blocks(numbers_.__rshift__(shift_), key_);
    }
    const auto either =
        [&](int64_t bits, const Tensor& then, const Tensor& otherwise) {
          return at::where(numbers_.bitwise_and(bits).ne(0), then, otherwise);
        };
    if (next != 0) {
      return either(next, word(place + 1, later), word(place, later));
    }
    return later == 0 ? bits_->at(place)
                      : either(later, bits_->at(place + 2), bits_->at(place));
  }

 private:
  const Tensor& numbers_;
  const Tensor& key_;
  int64_t shift_;
  std::optional<std::array<Tensor, 4>> bits_;
};

// ---- numbers of one word: four to a block -----------------------------------

struct Pairs {
  Tensor first;
  Tensor second;
  Tensor is_second; // whether the element is the second of its pair
};

Pairs word_pairs(const Tensor& numbers, const Tensor& key) {
  Words words(numbers, key, 2);
  return {words.word(0, 2), words.word(1, 2), numbers.bitwise_and(1).ne(0)};
}

Tensor one_word(const Tensor& numbers, const Tensor& key) {
  return Words(numbers, key, 2).word(0, 2, 1);
}

/// In (0, 1], finer towards 0.
Tensor floats_above_zero(const Tensor& words) {
  return words.__rshift__(1).to(at::kFloat).mul_(0x1p-31).add_(0x1p-32);
}

Tensor normal_floats(const Tensor& numbers, const Tensor& key) {
  const auto pairs = word_pairs(numbers, key);
  const auto radius = floats_above_zero(pairs.first).log_().mul_(-2).sqrt_();
  // -pi to pi: a float has no bits left for more.
  const auto signed_word = at::where(
      pairs.second.ge(int64_t{1} << 31),
      pairs.second - (int64_t{1} << 32),
      pairs.second);
  const auto angle = signed_word.to(at::kFloat).mul_(M_PI * 0x1p-31);
  return radius.mul_(at::where(pairs.is_second, angle.sin(), angle.cos()));
}

Tensor uniform_floats(
    const Tensor& numbers,
    const Tensor& key,
    at::ScalarType dtype) {
  const int digits = dtype == at::kHalf ? std::numeric_limits<c10::Half>::digits
      : dtype == at::kBFloat16 ? std::numeric_limits<c10::BFloat16>::digits
                               : std::numeric_limits<float>::digits;
  return one_word(numbers, key)
      .__rshift__(32 - digits)
      .to(at::kFloat)
      .mul_(std::ldexp(1.0, -digits));
}

// ---- numbers of two words: two to a block -----------------------------------

struct TwoWords {
  Tensor high;
  Tensor low;
};

TwoWords two_words(const Tensor& numbers, const Tensor& key) {
  Words words(numbers, key, 1);
  return {words.word(0, 1), words.word(1, 1)};
}

Tensor doubles(const TwoWords& words, double above) {
  return words.high.__lshift__(21)
      .bitwise_or_(words.low.__rshift__(11))
      .to(at::kDouble)
      .add_(above)
      .mul_(0x1p-53);
}

Tensor doubles_above_zero(const Tensor& numbers, const Tensor& key) {
  return doubles(two_words(numbers, key), 0.5);
}

Tensor normal_doubles(const Tensor& numbers, const Tensor& key) {
  Words words(numbers, key, 1);
  const auto radius =
      doubles({words.word(0), words.word(1)}, 0.5).log_().mul_(-2).sqrt_();
  const auto angle =
      doubles({words.word(2), words.word(3)}, 0.5).mul_(2 * M_PI);
  return radius.mul_(
      at::where(numbers.bitwise_and(1).ne(0), angle.sin(), angle.cos()));
}

/// 64 bits modulo range, which leaves room for products of 63 bits.
Tensor small_integers(const TwoWords& words, int64_t range) {
  const auto of_high = (int64_t{1} << 32) % range;
  return words.high.remainder(range).mul_(of_high).add_(words.low).remainder_(
      range);
}

Tensor integers(
    const Tensor& numbers,
    const Tensor& key,
    const Distribution& distribution) {
  const auto words = two_words(numbers, key);
  const auto range = distribution.range;
  const auto bits = words.high.__lshift__(32).bitwise_or_(words.low);
  if (range == 0) {
    return bits + distribution.from;
  }
  if (range <= uint64_t{1} << 31) {
    return small_integers(words, static_cast<int64_t>(range)) +
        distribution.from;
  }
  // Unsigned: the remainder of half of the bits, twice, and of the last one.
  const auto half =
      bits.__rshift__(1).bitwise_and_(std::numeric_limits<int64_t>::max());
  if (range > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    const auto excess = at::where(
        bits.lt(0).logical_and(bits.ge(static_cast<int64_t>(range))),
        static_cast<int64_t>(range),
        int64_t{0});
    return bits - excess + distribution.from;
  }
  const auto divisor = static_cast<int64_t>(range);
  auto rest = half.remainder(divisor);
  for (const auto& added : {rest, bits.bitwise_and(1)}) {
    // rest + added, below 2 divisor, without a sum beyond 63 bits
    const auto room = divisor - added;
    rest = at::where(rest.ge(room), rest - room, rest + added);
  }
  return rest + distribution.from;
}

Tensor scaled(const Tensor& standard, double factor, double addend) {
  return standard.mul(factor).add_(addend);
}

Tensor below(const Tensor& values, const Distribution& distribution) {
  const auto from = at::full_like(values, distribution.a);
  const auto moved =
      scaled(values, distribution.b - distribution.a, distribution.a);
  return at::where(moved.lt(distribution.b), moved, from);
}

/// Words below it are those of a 1.
int64_t bernoulli_bound(double probability) {
  return static_cast<int64_t>(std::ceil(probability * 0x1p32));
}

Tensor numbers_of(
    const Tensor& numbers,
    const Tensor& key,
    const Distribution& d,
    at::ScalarType dtype) {
  const bool is_double = dtype == at::kDouble;
  switch (d.kind) {
    case Kind::Uniform:
      return below(
          is_double ? doubles(two_words(numbers, key), 0)
                    : uniform_floats(numbers, key, dtype),
          d);
    case Kind::Normal:
      return scaled(
          is_double ? normal_doubles(numbers, key)
                    : normal_floats(numbers, key),
          d.b,
          d.a);
    case Kind::LogNormal:
      return scaled(normal_doubles(numbers, key), d.b, d.a).exp_();
    case Kind::Cauchy:
      return scaled(
          doubles_above_zero(numbers, key).sub_(0.5).mul_(M_PI).tan_(),
          d.b,
          d.a);
    case Kind::Exponential:
      return is_double
          ? doubles_above_zero(numbers, key).log_().neg_().clamp_min_(0x1p-54) /
              d.a
          : floats_above_zero(one_word(numbers, key))
                .log_()
                .neg_()
                .clamp_min_(0x1p-25)
                .mul_(1 / d.a);
    case Kind::Geometric:
      return doubles_above_zero(numbers, key)
          .log_()
          .div_(std::log1p(-d.a))
          .ceil_()
          .clamp_min_(1);
    case Kind::Bernoulli:
      return one_word(numbers, key).lt(bernoulli_bound(d.a));
    case Kind::Integer:
      return integers(numbers, key, d);
  }
  return {};
}

/// Truth values (runs, length): one kernel, a byte written for each number.
Tensor bernoulli_by_kernel(const Tensor& key, double a, const RunsOf& runs) {
  const auto firsts =
      global_numbers(runs.firsts, 0, runs.firsts.numel(), key).unsqueeze(1);
  const auto places = at::arange(0, runs.length, 8, key.options());
  return run_cuda_kernel(
             kCounterBelow, {firsts, places, key}, {bernoulli_bound(a)})
      .view(at::kBool)
      .narrow(1, 0, runs.length);
}

} // namespace

Tensor numbers_by_tensors(
    at::ScalarType dtype,
    const Tensor& key,
    const Distribution& distribution,
    const GlobalIndex& index) {
  const auto runs = runs_of(index);
  const auto [count, length] = std::pair(runs.firsts.numel(), runs.length);
  const bool by_kernels = have_cuda_kernels(key);
  if (count * length == 0) {
    return at::empty({0}, key.options().dtype(dtype));
  }
  if (by_kernels && distribution.kind == Kind::Bernoulli) {
    return bernoulli_by_kernel(key, distribution.a, runs).to(dtype).flatten();
  }
  const auto result = at::empty({count, length}, key.options().dtype(dtype));
  const auto most = by_kernels ? kNumbersOfKernels : kNumbersAtATime;
  const auto columns = std::min(length, most);
  const auto rows = most / columns;
  for (int64_t row = 0; row < count; row += rows) {
    const auto row_end = std::min(row + rows, count);
    const auto firsts = global_numbers(runs.firsts, row, row_end, key);
    for (int64_t column = 0; column < length; column += columns) {
      const auto column_end = std::min(column + columns, length);
      const auto inside = at::arange(column, column_end, key.options());
      result.slice(0, row, row_end)
          .slice(1, column, column_end)
          .copy_(numbers_of(
              firsts.unsqueeze(1) + inside, key, distribution, dtype));
    }
  }
  return result.flatten();
}

} // namespace shardtensor::detail
