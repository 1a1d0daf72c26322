#include "shardtensor/halo/stencil.h"

#include <algorithm>
#include <limits>

#include <c10/util/Exception.h>

#include "shardtensor/layout/enum_words.h"

namespace shardtensor {

namespace {

constexpr detail::EnumWords<Boundary, 5> kBoundaries{
    "boundary",
    {{
        {Boundary::None, "none"},
        {Boundary::Zeros, "zeros"},
        {Boundary::Periodic, "periodic"},
        {Boundary::Reflect, "reflect"},
        {Boundary::Replicate, "replicate"},
    }}};

// Rounded towards minus infinity; b > 0.
int64_t floor_div(int64_t a, int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

int64_t ceil_div(int64_t a, int64_t b) {
  return -floor_div(-a, b);
}

/// The first output that is not before, where none before one that is not is.
template <class IsBefore>
int64_t bisect(const Interval& outputs, const IsBefore& is_before) {
  int64_t low = outputs.begin;
  int64_t high = outputs.end;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (is_before(middle)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The number of outputs with anchor < row: anchors grow.
int64_t outputs_before(const Stencil& stencil, int64_t row) {
  return bisect({0, stencil.output()}, [&](int64_t o) {
    return stencil.anchor(o) < row;
  });
}

Window checked_window(const Window& window) {
  TORCH_CHECK_VALUE(
      window.stride > 0 && window.dilation > 0,
      "Stencil: stride ",
      window.stride,
      " and dilation ",
      window.dilation,
      ", expected 1 or more");
  return window;
}

} // namespace

Stencil::Stencil(Kind kind, int64_t input, int64_t output)
    : kind_(kind), input_(input), output_(output) {}

Stencil Stencil::conv(Window window, int64_t input, int64_t output) {
  Stencil stencil(Kind::Conv, input, output);
  stencil.window_ = checked_window(window);
  return stencil;
}

Stencil Stencil::pool(Window window, int64_t input, int64_t output) {
  Stencil stencil(Kind::Pool, input, output);
  stencil.window_ = checked_window(window);
  return stencil;
}

Stencil Stencil::conv_transpose(Window window, int64_t input, int64_t output) {
  Stencil stencil(Kind::ConvTranspose, input, output);
  stencil.window_ = checked_window(window);
  return stencil;
}

Stencil Stencil::adaptive(int64_t input, int64_t output) {
  return Stencil(Kind::Adaptive, input, output);
}

Stencil Stencil::resample(Resample how, int64_t input, int64_t output) {
  Stencil stencil(Kind::Resample, input, output);
  stencil.how_ = how;
  return stencil;
}

Interval Stencil::reads(int64_t o) const {
  const auto& w = window_;
  switch (kind_) {
    case Kind::Conv:
    case Kind::Pool: {
      const int64_t first = o * w.stride - w.padding;
      return {first, first + w.span()};
    }
    case Kind::ConvTranspose: {
      const int64_t first = ceil_div(o + w.padding - (w.span() - 1), w.stride);
      // Empty where the stride leaves a gap between two kernels.
      return {first, std::max(first, floor_div(o + w.padding, w.stride) + 1)};
    }
    case Kind::Adaptive:
      return {o * input_ / output_, ceil_div((o + 1) * input_, output_)};
    case Kind::Resample: {
      const Taps t = taps(o);
      const auto [low, high] = std::ranges::minmax(t.rows);
      return {low, high + 1};
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

Interval Stencil::reads(const Interval& outputs) const {
  return {reads(outputs.begin).begin, reads(outputs.end - 1).end};
}

Interval Stencil::readers(const Interval& rows, const Interval& outputs) const {
  const auto begin =
      bisect(outputs, [&](int64_t o) { return reads(o).end <= rows.begin; });
  const auto end = bisect({begin, outputs.end}, [&](int64_t o) {
    return reads(o).begin < rows.end;
  });
  return {begin, end};
}

int64_t Stencil::anchor(int64_t o) const {
  const auto& w = window_;
  switch (kind_) {
    case Kind::Conv:
    case Kind::Pool:
      return o * w.stride - w.padding + (w.span() - 1) / 2;
    case Kind::ConvTranspose: {
      // Input i owns `stride` outputs in the middle of the span it writes.
      const int64_t overlap = std::max<int64_t>(0, w.span() - w.stride);
      return floor_div(o + w.padding - (overlap + 1) / 2, w.stride);
    }
    case Kind::Adaptive:
    case Kind::Resample:
      return (2 * o + 1) * input_ / (2 * output_);
  }
  TORCH_INTERNAL_ASSERT(false);
}

bool Stencil::is_rowwise() const {
  const bool convolves = kind_ == Kind::Conv || kind_ == Kind::ConvTranspose;
  return convolves && window_ == Window{} && input_ == output_;
}

int64_t Stencil::smallest_input() const {
  const bool windows = kind_ == Kind::Conv || kind_ == Kind::Pool;
  return windows ? window_.span() : 1;
}

StencilPiece Stencil::piece(const Interval& outputs) const {
  if (outputs.empty()) {
    return {{-smallest_input(), 0}, 0, 0, 0};
  }
  switch (kind_) {
    case Kind::Conv:
      return conv_piece(outputs);
    case Kind::Pool:
      return pool_piece(outputs);
    case Kind::ConvTranspose:
      return conv_transpose_piece(outputs);
    case Kind::Adaptive:
      return {reads(outputs), 0, 0, outputs.extent()};
    case Kind::Resample:
      return is_shift_invariant()
          ? shifted_piece(outputs)
          : StencilPiece{reads(outputs), 0, 0, outputs.extent()};
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Padding is gathered as rows of zeros, at no cost: gathering copies anyway.
StencilPiece Stencil::conv_piece(const Interval& outputs) const {
  return {reads(outputs), 0, 0, outputs.extent()};
}

std::optional<OverlapPiece> Stencil::overlap(
    const Interval& outputs,
    const Interval& owned) const {
  if (kind_ != Kind::Conv || outputs.empty() || owned.empty()) {
    return std::nullopt;
  }
  const auto& w = window_;
  const auto first_row = [&](int64_t o) { return o * w.stride - w.padding; };
  OverlapPiece piece;
  piece.padding = owned.begin - first_row(outputs.begin);
  const int64_t slack = owned.extent() + 2 * piece.padding - w.span();
  if (piece.padding < 0 || slack < 0 ||
      slack / w.stride + 1 != outputs.extent()) {
    return std::nullopt;
  }
  if (owned.begin > 0) {
    const int64_t end = ceil_div(owned.begin + w.padding, w.stride);
    piece.before.outputs = {outputs.begin, std::min(outputs.end, end)};
  }
  if (owned.end < input_) {
    const int64_t begin =
        floor_div(owned.end + w.padding - w.span(), w.stride) + 1;
    piece.after.outputs = {std::max(outputs.begin, begin), outputs.end};
  }
  for (auto* edge : {&piece.before, &piece.after}) {
    if (!edge->outputs.empty()) {
      edge->rows = reads(edge->outputs);
    }
  }
  const bool beyond_both =
      (!piece.before.rows.empty() && piece.before.rows.end > owned.end) ||
      (!piece.after.rows.empty() && piece.after.rows.begin < owned.begin);
  return beyond_both ? std::nullopt : std::optional(piece);
}

// Padding is never data in a pooling (it is not a candidate for a maximum, it
// counts or not in an average), so the local operator pads as the global one
// does. Local windows then start at L - padding for a multiple L of the stride;
// those that see padding where the domain goes on are dropped.
StencilPiece Stencil::pool_piece(const Interval& outputs) const {
  const auto& w = window_;
  int64_t skipped = std::min(outputs.begin, ceil_div(w.padding, w.stride));
  const auto first_row = [&] { return (outputs.begin - skipped) * w.stride; };
  // Some operators want as many rows as the window spans, padding not counted.
  const int64_t end = std::min(
      input_, std::max(reads(outputs.end - 1).end, first_row() + w.span()));
  const int64_t missing = w.span() - (end - first_row());
  if (missing > 0) {
    skipped = std::min(outputs.begin, skipped + ceil_div(missing, w.stride));
  }
  return {{first_row(), end}, w.padding, skipped, outputs.extent()};
}

// Inputs [f, l) write the outputs from f * stride - padding on, without gaps
// when called with no padding. Where the kernel is shorter than the stride the
// interval is widened so that all outputs are among them. Rows outside the
// input come as zeros where outputs need them: each then gets its bias, also
// those that output_padding adds. Elsewhere they stay away, for weight's
// gradient would be NaN by them where an output's gradient is not finite.
StencilPiece Stencil::conv_transpose_piece(const Interval& outputs) const {
  const auto& w = window_;
  const int64_t reach = w.span() - 1;
  const int64_t a = outputs.begin + w.padding;
  const int64_t b = outputs.end - 1 + w.padding;
  const int64_t first = std::min(
      std::max<int64_t>(ceil_div(a - reach, w.stride), 0),
      floor_div(a, w.stride));
  const int64_t last = std::max(
      std::max(
          std::min(floor_div(b, w.stride), input_ - 1),
          ceil_div(b - reach, w.stride)),
      first);
  return {{first, last + 1}, 0, a - first * w.stride, outputs.extent()};
}

Partition own_outputs(const Stencil& stencil, const Partition& input) {
  std::vector<int64_t> sizes;
  int64_t before = 0;
  for (int64_t piece = 0; piece < input.pieces(); ++piece) {
    const int64_t end = input.interval(piece).end;
    const int64_t upto = end == 0 ? 0
        : end == input.extent()   ? stencil.output()
                                  : outputs_before(stencil, end);
    sizes.push_back(upto - before);
    before = upto;
  }
  // Without a single input row no piece has a claim: the last one takes all.
  sizes.back() += stencil.output() - before;
  return Partition(sizes);
}

namespace {

StencilPlan keep_rows(const Partition& input) {
  StencilPlan plan{input, {}, true};
  for (int64_t p = 0; p < input.pieces(); ++p) {
    const int64_t rows = input.local_extent(p);
    plan.pieces.push_back({{0, rows}, 0, 0, rows});
  }
  return plan;
}

} // namespace

StencilPlan plan_stencil(const Stencil& stencil, const Partition& input) {
  if (!input.is_contiguous()) {
    TORCH_INTERNAL_ASSERT(stencil.is_rowwise());
    return keep_rows(input);
  }
  StencilPlan plan{own_outputs(stencil, input), {}, true};
  for (int64_t p = 0; p < input.pieces(); ++p) {
    plan.pieces.push_back(stencil.piece(plan.outputs.interval(p)));
    plan.is_local &= plan.pieces.back().rows == input.interval(p);
  }
  return plan;
}

const char* to_string(Boundary boundary) {
  return kBoundaries.word(boundary);
}

Boundary parse_boundary(const std::string& name) {
  return kBoundaries.parse(name);
}

int64_t boundary_row(int64_t row, int64_t extent, Boundary boundary) {
  if (row >= 0 && row < extent) {
    return row;
  }
  switch (boundary) {
    case Boundary::None:
    case Boundary::Zeros:
      return -1;
    case Boundary::Periodic:
      return extent == 0 ? -1 : row - floor_div(row, extent) * extent;
    case Boundary::Reflect: {
      if (extent <= 1) {
        return extent - 1;
      }
      const int64_t period = 2 * (extent - 1);
      const int64_t at = row - floor_div(row, period) * period;
      return std::min(at, period - at);
    }
    case Boundary::Replicate:
      return std::min(std::max<int64_t>(row, 0), extent - 1);
  }
  TORCH_INTERNAL_ASSERT(false);
}

namespace {

/// How many rows from `row` on, which stands for `at`, follow each other in the
/// input, or are all zero.
int64_t rows_in_order(
    int64_t row,
    int64_t at,
    int64_t extent,
    Boundary boundary) {
  if (at < 0) {
    return row < 0 ? -row : std::numeric_limits<int64_t>::max();
  }
  const bool follow = at == row || boundary == Boundary::Periodic;
  return follow ? extent - at : 1;
}

} // namespace

RowSource boundary_rows(
    const Interval& rows,
    int64_t extent,
    Boundary boundary) {
  RowSource source;
  for (int64_t row = rows.begin, count = 0; row < rows.end; row += count) {
    const int64_t at = boundary_row(row, extent, boundary);
    count = std::min(rows.end - row, rows_in_order(row, at, extent, boundary));
    if (at < 0) {
      source.append_zeros(count);
    } else {
      source.append(Interval{at, at + count});
    }
  }
  return source;
}

} // namespace shardtensor
