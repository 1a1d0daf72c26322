#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <c10/util/TypeCast.h>

#include "shardtensor/rules/random/counter_numbers.h"
#include "shardtensor/rules/random/counter_runs.h"
#include "shardtensor/rules/random/philox.h"
#include "shardtensor/threads/parallel_for.h"

// The loops of Note [Counter numbers], compiled for two sets of instructions.
// No fused multiply-add in either: the same bits from both.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define SHARDTENSOR_SIMD __attribute__((target_clones("avx2", "default")))
#else
#define SHARDTENSOR_SIMD
#endif
#define SHARDTENSOR_INLINE [[gnu::always_inline]] inline

namespace shardtensor::detail {
namespace {

constexpr int64_t kLanes = Philox::kLanes;
constexpr int64_t kGrain = 16384; // numbers per task

using Blocks = std::array<uint64_t, kLanes>;
/// Value v of lane l is values[v][l]; how many a block gives depends on T.
template <class T>
using Values =
    std::array<std::array<T, kLanes>, std::is_same_v<T, float> ? 4 : 2>;

/// Bits of a uniform number of this dtype.
int digits_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return std::numeric_limits<c10::Half>::digits;
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::digits;
    default:
      return std::numeric_limits<float>::digits;
  }
}

// ---- arithmetic that compilers can put side by side -------------------------

SHARDTENSOR_INLINE Philox::Words bits_of(
    const Philox& philox,
    const Blocks& blocks) {
  Philox::Words words;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    words[0][lane] = static_cast<uint32_t>(blocks[lane]);
    words[1][lane] = static_cast<uint32_t>(blocks[lane] >> 32);
    words[2][lane] = 0;
    words[3][lane] = 0;
  }
  philox(words);
  return words;
}

/// In (0, 1], finer towards 0.
SHARDTENSOR_INLINE float unit_float(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 1)) * 0x1p-31F +
      0x1p-32F;
}

/// The logarithm of a normal positive number (Cephes' logf).
SHARDTENSOR_INLINE float log_of(float x) {
  constexpr int32_t kSqrtHalf = 0x3F3504F3;
  const auto bits = std::bit_cast<int32_t>(x);
  const int32_t exponent = (bits - kSqrtHalf) >> 23;
  const float m = std::bit_cast<float>(bits - (exponent << 23)) - 1.0F;
  const float e = static_cast<float>(exponent);
  const float square = m * m;
  float y = 7.0376836292e-2F;
  y = y * m - 1.1514610310e-1F;
  y = y * m + 1.1676998740e-1F;
  y = y * m - 1.2420140846e-1F;
  y = y * m + 1.4249322787e-1F;
  y = y * m - 1.6668057665e-1F;
  y = y * m + 2.0000714765e-1F;
  y = y * m - 2.4999993993e-1F;
  y = y * m + 3.3333331174e-1F;
  y = y * m * square - e * 2.12194440e-4F - 0.5F * square;
  return m + y + e * 0.693359375F;
}

/// Sine and cosine of 2 pi word / 2^32 (Cephes' sinf and cosf).
SHARDTENSOR_INLINE void turn(uint32_t word, float& sine, float& cosine) {
  const uint32_t quarter = (word + 0x20000000U) >> 30;
  const auto rest = static_cast<int32_t>(word - (quarter << 30));
  const float x = static_cast<float>(rest) * 1.4629180792671596e-9F;
  const float z = x * x;
  const float s =
      ((-1.9515295891e-4F * z + 8.3321608736e-3F) * z - 1.6666654611e-1F) * z *
          x +
      x;
  const float c = ((2.443315711809948e-5F * z - 1.388731625493765e-3F) * z +
                   4.166664568298827e-2F) *
          z * z -
      0.5F * z + 1.0F;
  const float a = (quarter & 1) != 0 ? c : s;
  const float b = (quarter & 1) != 0 ? s : c;
  sine = (quarter & 2) != 0 ? -a : a;
  cosine = ((quarter + 1) & 2) != 0 ? -b : b;
}

// ---- distributions: the values of kLanes blocks -----------------------------

struct Drawn {
  Philox philox;
  Distribution distribution;
  int digits;
};

template <class T>
using Make = void (*)(const Drawn&, const Blocks&, Values<T>&);

SHARDTENSOR_SIMD void uniform_floats(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<float>& values) {
  const auto words = bits_of(drawn.philox, blocks);
  const auto from = static_cast<float>(drawn.distribution.a);
  const auto to = static_cast<float>(drawn.distribution.b);
  const auto scale = std::ldexp(1.0F, -drawn.digits);
  const int shift = 32 - drawn.digits;
  for (int64_t w = 0; w < 4; ++w) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const auto bits = static_cast<int32_t>(words[w][lane] >> shift);
      const auto value = static_cast<float>(bits) * scale * (to - from) + from;
      values[w][lane] = value < to ? value : from; // where it was rounded up
    }
  }
}

SHARDTENSOR_SIMD void bernoulli_floats(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<float>& values) {
  const auto words = bits_of(drawn.philox, blocks);
  const auto bound =
      static_cast<uint64_t>(std::ceil(drawn.distribution.a * 0x1p32));
  const auto last = static_cast<uint32_t>(bound - 1);
  for (int64_t w = 0; w < 4; ++w) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      values[w][lane] = words[w][lane] <= last ? 1.0F : 0.0F;
    }
  }
  if (bound == 0) {
    values = {};
  }
}

SHARDTENSOR_SIMD void normal_floats(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<float>& values) {
  const auto words = bits_of(drawn.philox, blocks);
  const auto mean = static_cast<float>(drawn.distribution.a);
  const auto deviation = static_cast<float>(drawn.distribution.b);
  for (int64_t w = 0; w < 4; w += 2) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float radius =
          __builtin_sqrtf(-2.0F * log_of(unit_float(words[w][lane])));
      float sine;
      float cosine;
      turn(words[w + 1][lane], sine, cosine);
      values[w][lane] = radius * cosine * deviation + mean;
      values[w + 1][lane] = radius * sine * deviation + mean;
    }
  }
}

SHARDTENSOR_SIMD void exponential_floats(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<float>& values) {
  const auto words = bits_of(drawn.philox, blocks);
  const auto mean = static_cast<float>(1 / drawn.distribution.a);
  for (int64_t w = 0; w < 4; ++w) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = -log_of(unit_float(words[w][lane]));
      values[w][lane] = (value > 0x1p-25F ? value : 0x1p-25F) * mean;
    }
  }
}

/// Two numbers per block, one after the other: `make` has two words for each.
template <class T, class MakeOne>
SHARDTENSOR_INLINE void one_by_one(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<T>& values,
    const MakeOne& make) {
  const auto words = bits_of(drawn.philox, blocks);
  for (int64_t v = 0; v < 2; ++v) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      values[v][lane] = make(words[2 * v][lane], words[2 * v + 1][lane]);
    }
  }
}

SHARDTENSOR_SIMD void uniform_doubles(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<double>& values) {
  const double from = drawn.distribution.a;
  const double to = drawn.distribution.b;
  one_by_one(drawn, blocks, values, [=](uint32_t high, uint32_t low) {
    const auto bits = (uint64_t{high} << 32 | low) >> 11;
    const double value = static_cast<double>(static_cast<int64_t>(bits)) *
            0x1p-53 * (to - from) +
        from;
    return value < to ? value : from;
  });
}

template <bool is_logarithm>
void normal_doubles(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<double>& values) {
  const auto words = bits_of(drawn.philox, blocks);
  const auto moved = [&](double standard) {
    const auto value = standard * drawn.distribution.b + drawn.distribution.a;
    return is_logarithm ? std::exp(value) : value;
  };
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const double radius =
        std::sqrt(-2 * std::log(unit_double(words[0][lane], words[1][lane])));
    const double angle = 2 * M_PI * unit_double(words[2][lane], words[3][lane]);
    values[0][lane] = moved(radius * std::cos(angle));
    values[1][lane] = moved(radius * std::sin(angle));
  }
}

void exponential_doubles(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<double>& values) {
  const double rate = drawn.distribution.a;
  one_by_one(drawn, blocks, values, [=](uint32_t high, uint32_t low) {
    return std::max(-std::log(unit_double(high, low)), 0x1p-54) / rate;
  });
}

void cauchy_doubles(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<double>& values) {
  const double median = drawn.distribution.a;
  const double width = drawn.distribution.b;
  one_by_one(drawn, blocks, values, [=](uint32_t high, uint32_t low) {
    return median + width * std::tan(M_PI * (unit_double(high, low) - 0.5));
  });
}

void geometric_doubles(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<double>& values) {
  const double failure = std::log1p(-drawn.distribution.a);
  one_by_one(drawn, blocks, values, [=](uint32_t high, uint32_t low) {
    const auto trials = std::ceil(std::log(unit_double(high, low)) / failure);
    return std::max(trials, 1.0);
  });
}

void integers(
    const Drawn& drawn,
    const Blocks& blocks,
    Values<int64_t>& values) {
  const auto from = static_cast<uint64_t>(drawn.distribution.from);
  const auto range = drawn.distribution.range;
  one_by_one(drawn, blocks, values, [=](uint32_t high, uint32_t low) {
    const auto bits = uint64_t{high} << 32 | low;
    return static_cast<int64_t>(from + (range == 0 ? bits : bits % range));
  });
}

// ---- over a piece -----------------------------------------------------------

/// Writes numbers in the order of elements, kLanes blocks at a time.
template <class T, class Result>
class Writer {
 public:
  static constexpr int64_t kValues = std::tuple_size_v<Values<T>>;

  Writer(const Drawn& drawn, Make<T> make, Result* result)
      : drawn_(drawn), make_(make), result_(result) {}

  /// `count` neighbours from global number `first` on become the elements from
  /// `to` on.
  void write(int64_t to, int64_t first, int64_t count) {
    while (count > 0) {
      if (used_ == 0 && first % kValues == 0 && count >= kValues * kLanes) {
        write_whole_blocks(to, first / kValues);
        to += kValues * kLanes;
        first += kValues * kLanes;
        count -= kValues * kLanes;
        continue;
      }
      const auto skipped = first % kValues;
      const auto own = std::min(kValues - skipped, count);
      blocks_[used_] = static_cast<uint64_t>(first / kValues);
      parts_[used_] = {to, skipped, own};
      if (++used_ == kLanes) {
        finish();
      }
      to += own;
      first += own;
      count -= own;
    }
  }

  void finish() {
    if (used_ == 0) {
      return;
    }
    make_(drawn_, blocks_, values_);
    for (int64_t lane = 0; lane < used_; ++lane) {
      const auto& part = parts_[lane];
      for (int64_t v = 0; v < part.count; ++v) {
        result_[part.to + v] =
            c10::convert<Result>(values_[part.skipped + v][lane]);
      }
    }
    used_ = 0;
  }

 private:
  struct Part {
    int64_t to;
    int64_t skipped;
    int64_t count;
  };

  void write_whole_blocks(int64_t to, int64_t block) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      blocks_[lane] = static_cast<uint64_t>(block + lane);
    }
    make_(drawn_, blocks_, values_);
    auto* next = result_ + to;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      for (int64_t v = 0; v < kValues; ++v) {
        *next++ = c10::convert<Result>(values_[v][lane]);
      }
    }
  }

  const Drawn& drawn_;
  Make<T> make_;
  Result* result_;
  Blocks blocks_{};
  std::array<Part, kLanes> parts_{};
  Values<T> values_{};
  int64_t used_ = 0;
};

template <class T, class Result>
void write_all(
    const at::Tensor& result,
    const Drawn& drawn,
    Make<T> make,
    const Runs& runs) {
  auto* data = result.mutable_data_ptr<Result>();
  parallel_for(result.numel(), kGrain, [&](int64_t begin, int64_t end) {
    Writer<T, Result> writer(drawn, make, data);
    runs.visit(begin, end, [&](int64_t to, int64_t first, int64_t count) {
      writer.write(to, first, count);
    });
    writer.finish();
  });
}

template <class T>
void write_as_dtype(
    const at::Tensor& result,
    const Drawn& drawn,
    Make<T> make,
    const Runs& runs) {
  AT_DISPATCH_V2(
      result.scalar_type(),
      "random numbers",
      AT_WRAP([&] { write_all<T, scalar_t>(result, drawn, make, runs); }),
      at::kHalf,
      at::kBFloat16,
      at::kBool,
      AT_EXPAND(AT_ALL_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES));
}

} // namespace

void fill_by_loops(
    const at::Tensor& result,
    uint64_t key,
    const Distribution& distribution,
    const GlobalIndex& index) {
  using Kind = Distribution::Kind;
  const auto dtype = result.scalar_type();
  const bool is_double = dtype == at::kDouble;
  const Drawn drawn{Philox(key), distribution, digits_of(dtype)};
  const Runs runs(index);
  const auto by_float = [&](Make<float> make) {
    write_as_dtype(result, drawn, make, runs);
  };
  const auto by_double = [&](Make<double> make) {
    write_as_dtype(result, drawn, make, runs);
  };
  switch (distribution.kind) {
    case Kind::Uniform:
      return is_double ? by_double(uniform_doubles) : by_float(uniform_floats);
    case Kind::Normal:
      return is_double ? by_double(normal_doubles<false>)
                       : by_float(normal_floats);
    case Kind::LogNormal:
      return by_double(normal_doubles<true>);
    case Kind::Cauchy:
      return by_double(cauchy_doubles);
    case Kind::Exponential:
      return is_double ? by_double(exponential_doubles)
                       : by_float(exponential_floats);
    case Kind::Geometric:
      return by_double(geometric_doubles);
    case Kind::Bernoulli:
      return by_float(bernoulli_floats);
    case Kind::Integer:
      return write_as_dtype<int64_t>(result, drawn, integers, runs);
  }
}

} // namespace shardtensor::detail
