#include <array>
#include <cmath>
#include <limits>

#include <ATen/Dispatch.h>
#include <ATen/native/Distributions.h>

#include "shardtensor/rules/random/counter_numbers.h"
#include "shardtensor/rules/random/counter_runs.h"
#include "shardtensor/rules/random/philox.h"
#include "shardtensor/threads/parallel_for.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kElementsPerTask = 1024;

/// Uniform numbers for one element, as many as it takes.
class Stream {
 public:
  Stream(const Philox& philox, int64_t element)
      : philox_(philox), element_(static_cast<uint64_t>(element)) {}

  double next() {
    if (left_ == 0) {
      words_ = philox_(
          {static_cast<uint32_t>(element_),
           static_cast<uint32_t>(element_ >> 32),
           block_++,
           1});
      left_ = 2;
    }
    --left_;
    return unit_double(words_[2 * left_], words_[2 * left_ + 1]);
  }

 private:
  const Philox& philox_;
  uint64_t element_;
  uint32_t block_ = 0;
  int left_ = 0;
  std::array<uint32_t, 4> words_{};
};

double small_poisson(double rate, Stream& stream) {
  const double bound = std::exp(-rate);
  double product = stream.next();
  double events = 0;
  while (product > bound) {
    product *= stream.next();
    ++events;
  }
  return events;
}

/// Transformed rejection (PTRS, Hoermann 1993), as PyTorch and NumPy have it.
double large_poisson(double rate, Stream& stream) {
  const double log_rate = std::log(rate);
  const double b = 0.931 + 2.53 * std::sqrt(rate);
  const double a = -0.059 + 0.02483 * b;
  const double inverse_alpha = 1.1239 + 1.1328 / (b - 3.4);
  const double accepted = 0.9277 - 3.6224 / (b - 2);
  while (true) {
    const double u = stream.next() - 0.5;
    const double v = stream.next();
    const double distance = 0.5 - std::fabs(u);
    const double events = std::floor((2 * a / distance + b) * u + rate + 0.43);
    if (distance >= 0.07 && v <= accepted) {
      return events;
    }
    if (events < 0 || (distance < 0.013 && v > distance)) {
      continue;
    }
    if (std::log(v) + std::log(inverse_alpha) -
            std::log(a / (distance * distance) + b) <=
        -rate + events * log_rate - std::lgamma(events + 1)) {
      return events;
    }
  }
}

double poisson(double rate, Stream& stream) {
  return rate < 10 ? small_poisson(rate, stream) : large_poisson(rate, stream);
}

double gamma(double shape, Stream& stream) {
  const auto uniform = [&] { return stream.next(); };
  const auto normal = [&] { // Box and Muller
    const double radius = std::sqrt(-2 * std::log(stream.next()));
    return radius * std::cos(2 * c10::pi<double> * stream.next());
  };
  BaseSampler<double, decltype(uniform)> uniforms(uniform);
  BaseSampler<double, decltype(normal)> normals(normal);
  return sample_gamma<double, double>(shape, uniforms, normals);
}

double binomial(double count, double probability, Stream& stream) {
  const auto uniform = [&] { return stream.next(); };
  BaseSampler<double, decltype(uniform)> uniforms(uniform);
  return sample_binomial<double, double>(count, probability, uniforms);
}

/// NaN where rejection would never end.
double draw(Sample sample, double a, double b, Stream stream) {
  if (!(a >= 0) || std::isinf(a) || std::isnan(b)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  switch (sample) {
    case Sample::Poisson:
      return poisson(a, stream);
    case Sample::Gamma:
      return gamma(a, stream);
    case Sample::Binomial:
      return binomial(a, b, stream);
  }
  return 0;
}

} // namespace

at::Tensor samples_by_loops(
    Sample sample,
    const at::Tensor& a,
    const at::Tensor& b,
    uint64_t key,
    const GlobalIndex& index) {
  const auto result = a.contiguous().clone();
  const auto second = b.contiguous();
  const Philox philox(key);
  const Runs runs(index);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, a.scalar_type(), "counter_samples", [&] {
        // As PyTorch has it, or ratios of gammas would be those of zeros.
        const double least = sample == Sample::Gamma
            ? static_cast<double>(std::numeric_limits<scalar_t>::min())
            : 0;
        auto* data = result.mutable_data_ptr<scalar_t>();
        const auto* others = second.const_data_ptr<scalar_t>();
        parallel_for(
            result.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
              runs.visit(
                  begin, end, [&](int64_t to, int64_t first, int64_t count) {
                    for (int64_t i = 0; i < count; ++i) {
                      const double drawn = draw(
                          sample,
                          static_cast<double>(data[to + i]),
                          static_cast<double>(others[to + i]),
                          Stream(philox, first + i));
                      data[to + i] =
                          static_cast<scalar_t>(std::max(drawn, least));
                    }
                  });
            });
      });
  return result;
}

} // namespace shardtensor::detail
