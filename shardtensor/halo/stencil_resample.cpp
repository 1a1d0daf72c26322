// The part of Stencil that follows PyTorch's interpolation index arithmetic.
// Its functions are used as they are, in the precision PyTorch uses, so that
// an output never reads another row than it does unsharded.

#include <algorithm>
#include <cmath>

#include <ATen/native/UpSample.h>

#include "shardtensor/halo/stencil.h"

namespace shardtensor {

namespace {

using Mode = Resample::Mode;

void set_single(Taps& taps, int64_t row) {
  taps.rows.assign(1, row);
  taps.weights.assign(1, 1);
}

// at::native::nearest_idx serves CUDA, backward and small images on the CPU,
// whose forward of large ones works in the data's precision, ignores the
// special cases and rounds once where the compiler fuses multiply and add.
template <typename Real>
int64_t nearest_row(
    const Resample& how,
    int64_t o,
    int64_t input,
    int64_t output) {
  const Real scale = at::native::area_pixel_compute_scale<Real>(
      input, output, /*align_corners=*/false, how.scale);
  const Real half = 0.5;
  const Real at = how.mode == Mode::Nearest
      ? scale * static_cast<Real>(o)
      : std::fma(scale, static_cast<Real>(o) + half, -half) + half;
  const auto row = static_cast<int64_t>(std::floor(static_cast<float>(at)));
  return std::min(row, input - 1);
}

template <typename Real>
void nearest_taps(
    const Resample& how,
    int64_t o,
    int64_t input,
    int64_t output,
    Taps& taps) {
  set_single(taps, nearest_row<Real>(how, o, input, output));
}

/// at::native::area_pixel_compute_source_index, rounded once: PyTorch's kernels
/// are compiled for processors that multiply and add in one step. Of millions
/// of rows that decides about more than the last digit.
template <typename Real>
Real source_position(const Resample& how, Real scale, int64_t o, bool cubic) {
  const auto at = static_cast<Real>(o);
  if (how.align_corners) {
    return scale * at;
  }
  const Real half = 0.5;
  const Real position = std::fma(scale, at + half, -half);
  return position < 0 && !cubic ? Real(0) : position;
}

template <typename Real>
void linear_taps(
    const Resample& how,
    int64_t o,
    int64_t input,
    int64_t output,
    Taps& taps) {
  const Real scale = at::native::area_pixel_compute_scale<Real>(
      input, output, how.align_corners, how.scale);
  int64_t first = o;
  Real high = 0;
  if (input != output) {
    const Real at = source_position(how, scale, o, /*cubic=*/false);
    at::native::guard_index_and_lambda(at, input, first, high);
  }
  const int64_t second =
      input != output && first < input - 1 ? first + 1 : first;
  const Real low = 1 - high;
  taps.rows.assign({first, second});
  taps.weights.assign({low, high});
}

template <typename Real>
void cubic_taps(
    const Resample& how,
    int64_t o,
    int64_t input,
    int64_t output,
    Taps& taps) {
  const Real scale = at::native::area_pixel_compute_scale<Real>(
      input, output, how.align_corners, how.scale);
  const Real at = source_position(how, scale, o, /*cubic=*/true);
  int64_t row = 0;
  Real t = 0;
  at::native::guard_index_and_lambda(at, input, row, t);
  Real weights[4];
  at::native::get_cubic_upsample_coefficients<Real>(weights, t);
  taps.rows.clear();
  for (int64_t j = 0; j < 4; ++j) {
    taps.rows.push_back(std::clamp<int64_t>(row - 1 + j, 0, input - 1));
  }
  taps.weights.assign(weights, weights + 4);
}

/// The filters of Pillow, which PyTorch follows: a tent, and a cubic with
/// a = -0.5; `reach` rows to either side of an output's centre.
template <typename Real>
struct Filter {
  int64_t reach;

  Real operator()(Real distance) const {
    const Real x = std::abs(distance);
    if (reach == 1) {
      return x < 1 ? 1 - x : 0;
    }
    if (x < 1) {
      return (Real(1.5) * x - Real(2.5)) * x * x + 1;
    }
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * Real(-0.5) : 0;
  }
};

/// Where there are more rows than outputs, the filter is as much wider: every
/// row counts.
template <typename Real>
void antialias_taps(
    const Resample& how,
    int64_t o,
    int64_t input,
    int64_t output,
    Taps& taps) {
  if (input == output && !how.is_cuda) {
    set_single(taps, o); // PyTorch copies, whatever the scale
    return;
  }
  const Real scale = at::native::area_pixel_compute_scale<Real>(
      input, output, how.align_corners, how.scale);
  const Filter<Real> filter{how.mode == Mode::LinearAntialias ? 1 : 2};
  const Real widen = std::max<Real>(scale, 1);
  const Real support = static_cast<Real>(filter.reach) * widen;
  const Real center = scale * (static_cast<Real>(o) + Real(0.5));
  const auto begin =
      std::max<int64_t>(static_cast<int64_t>(center - support + Real(0.5)), 0);
  const auto end = std::min(
      {static_cast<int64_t>(center + support + Real(0.5)),
       input,
       begin + 2 * static_cast<int64_t>(std::ceil(support)) + 1});
  if (end <= begin) { // a scale that leads beyond the input
    taps.rows.assign(1, std::min(begin, input - 1));
    taps.weights.assign(1, 0);
    return;
  }
  taps.rows.clear();
  taps.weights.clear();
  Real sum = 0;
  for (int64_t row = begin; row < end; ++row) {
    const Real weight =
        filter((static_cast<Real>(row) - center + Real(0.5)) * (1 / widen));
    taps.rows.push_back(row);
    taps.weights.push_back(weight);
    sum += weight;
  }
  for (auto& weight : taps.weights) {
    weight = sum == 0 ? weight : static_cast<Real>(weight) / sum;
  }
}

/// Whether CUDA's backward, which goes from rows to outputs, adds this output
/// to this row, however the compiler rounds.
bool cuda_adds(
    const Resample& how,
    int64_t input,
    int64_t output,
    int64_t o,
    int64_t row) {
  const float scale = how.scale.value_or(0) > 0
      ? static_cast<float>(*how.scale)
      : static_cast<float>(output) / static_cast<float>(input);
  const float half = how.mode == Mode::NearestExact ? 0.5 : 0;
  const auto once = [&](int64_t i) {
    return std::ceil(std::fma(static_cast<float>(i), scale, -half));
  };
  const auto twice = [&](int64_t i) {
    const volatile float product = static_cast<float>(i) * scale;
    return std::ceil(product - half);
  };
  const auto at = static_cast<float>(o);
  return once(row) <= at && at < once(row + 1) && twice(row) <= at &&
      at < twice(row + 1);
}

} // namespace

bool is_antialiased(const Resample& how) {
  return how.mode == Mode::LinearAntialias || how.mode == Mode::CubicAntialias;
}

bool is_ambiguous(const Resample& how, int64_t input, int64_t output) {
  const bool exact = how.mode == Mode::NearestExact;
  if (input == output && how.scale.value_or(1) != 1) {
    return true;
  }
  if (how.mode != Mode::Nearest && !exact) {
    return false;
  }
  const auto index =
      exact ? at::native::nearest_exact_idx : at::native::nearest_idx;
  for (int64_t o = 0; o < output; ++o) {
    const auto row = index(o, input, output, how.scale);
    if (row != nearest_row<float>(how, o, input, output) ||
        (how.double_precision &&
         row != nearest_row<double>(how, o, input, output)) ||
        (how.is_cuda && !cuda_adds(how, input, output, o, row))) {
      return true;
    }
  }
  return false;
}

namespace {

template <typename Real>
void find_taps_in(
    const Resample& how,
    int64_t o,
    int64_t input,
    int64_t output,
    Taps& taps) {
  switch (how.mode) {
    case Mode::Nearest:
    case Mode::NearestExact:
      return nearest_taps<Real>(how, o, input, output, taps);
    case Mode::Linear:
      return linear_taps<Real>(how, o, input, output, taps);
    case Mode::Cubic:
      return cubic_taps<Real>(how, o, input, output, taps);
    case Mode::LinearAntialias:
    case Mode::CubicAntialias:
      return antialias_taps<Real>(how, o, input, output, taps);
  }
  TORCH_INTERNAL_ASSERT(false);
}

} // namespace

void Stencil::find_taps(int64_t o, Taps& taps) const {
  return how_.double_precision
      ? find_taps_in<double>(how_, o, input_, output_, taps)
      : find_taps_in<float>(how_, o, input_, output_, taps);
}

Taps Stencil::taps(int64_t o) const {
  Taps taps;
  find_taps(o, taps);
  return taps;
}

double Stencil::local_scale() const {
  const bool nearest =
      how_.mode == Mode::Nearest || how_.mode == Mode::NearestExact;
  if (output_ == input_ && !nearest && how_.mode != Mode::Cubic) {
    return 1; // PyTorch copies, whatever the scale
  }
  return how_.scale.has_value() && *how_.scale > 0
      ? *how_.scale
      : static_cast<double>(output_) / static_cast<double>(input_);
}

// Note [Shift-invariant interpolation]
// With s rows per output, outputs shifted by a read rows shifted by a * s. If
// s is a small multiple of a small power of two (doubling, halving, ...) there
// is a small a for which a * s is whole, and positions are exact in floating
// point: the local operator then repeats the global one's arithmetic. Of some
// million rows float32 has no exact positions, and PyTorch's are others, those
// of doubles, too: but for antialiasing its kernels round positions to float32.
bool Stencil::is_shift_invariant() const {
  constexpr double kFinest = 16;
  const double rows_per_output = 1 / local_scale();
  const double steps = rows_per_output * kFinest;
  if (how_.align_corners || input_ <= 0 || steps != std::floor(steps) ||
      steps < 1 || rows_per_output > kFinest) {
    return false;
  }
  double finest = 2; // 1 / finest divides positions (o + 1/2) * rows_per_output
  while (finest * rows_per_output / 2 !=
         std::floor(finest * rows_per_output / 2)) {
    finest *= 2;
  }
  const auto largest = static_cast<double>(std::max(input_, output_));
  const bool doubles = how_.double_precision && is_antialiased(how_);
  return largest * finest <= (doubles ? 0x1p53 : 0x1p24);
}

StencilPiece Stencil::shifted_piece(const Interval& outputs) const {
  const double rows_per_output = 1 / local_scale();
  int64_t period = 1; // outputs after which positions repeat
  while (period * rows_per_output != std::floor(period * rows_per_output)) {
    period *= 2;
  }
  const auto step = static_cast<int64_t>(period * rows_per_output);
  const Interval needed = reads(outputs);
  // No output that is kept reads before `needed`: there is nothing to clamp at
  // either end that the global operator does not clamp there, too.
  const int64_t start = std::min(needed.begin / step, outputs.begin / period);
  return {
      {start * step, needed.end},
      0,
      outputs.begin - start * period,
      outputs.extent()};
}

int64_t Stencil::local_outputs(const StencilPiece& piece) const {
  const double scale = local_scale();
  const int64_t rows = piece.rows.extent();
  // Note [Images one column wide]
  // PyTorch's antialiasing on the CPU filters the rows of an image by wrong
  // weights where the result is one column wide (seen in 2.13).
  const int64_t fewest = is_antialiased(how_) ? 2 : 1;
  int64_t outputs = std::max(fewest, piece.crop + piece.outputs);
  // Copying and doubling are special cases that PyTorch recognizes by the
  // extents, whatever the scale: one more output, not kept, avoids them.
  while ((outputs == rows && scale != 1) ||
         (outputs == 2 * rows && scale != 2)) {
    ++outputs;
  }
  return outputs;
}

} // namespace shardtensor
