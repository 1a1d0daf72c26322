#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/partition.h"
#include "shardtensor/layout/plans/row_source.h"

namespace shardtensor {

// Halo from output ownership. Every operator that reads a neighbourhood says,
// for each output row along a dim, which input rows it reads (a Stencil). Each
// piece gets an interval of outputs; the input rows it needs follow in closed
// form, and with them how the ordinary local operator is to be called on these
// rows (a StencilPiece). Nothing here communicates or touches data.

/// The window of a convolution or pooling along one dim: output o reads the
/// rows o * stride - padding + j * dilation for 0 <= j < kernel.
struct Window {
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0; // before the first row
  int64_t dilation = 1;

  /// First to last row of one window.
  int64_t span() const {
    return dilation * (kernel - 1) + 1;
  }
  bool operator==(const Window&) const = default;
};

/// How an interpolation finds the rows that an output reads; the words are
/// those of torch.nn.functional.interpolate.
struct Resample {
  enum class Mode {
    Nearest,
    NearestExact,
    Linear,
    Cubic,
    LinearAntialias,
    CubicAntialias
  };

  Mode mode = Mode::Nearest;
  bool align_corners = false;
  std::optional<double> scale; // output over input; empty: from the extents
  bool double_precision = false; // of the index arithmetic
  bool is_cuda = false; // whose kernels copy and add otherwise

  bool operator==(const Resample&) const = default;
};

bool is_antialiased(const Resample& how);

/// Whether PyTorch's kernels make different outputs of these extents: nearest
/// rows that depend on the precision of the index arithmetic, and rows that
/// some copy or double, for the extents say so, and others don't, for the scale
/// does.
bool is_ambiguous(const Resample& how, int64_t input, int64_t output);

/// One output of an interpolation: the weighted sum of these rows.
struct Taps {
  std::vector<int64_t> rows;
  std::vector<double> weights;
};

/// How one piece computes its outputs along a dim: gather the input rows
/// `rows` (zero where they lie outside the input), call the local operator
/// with `padding`, drop the first `crop` local outputs, keep `outputs`.
///
/// A piece without outputs computes one window of zeros and keeps nothing, so
/// that it still takes part in every exchange, forward and backward.
struct StencilPiece {
  Interval rows;
  int64_t padding = 0;
  int64_t crop = 0;
  int64_t outputs = 0;

  bool operator==(const StencilPiece&) const = default;
};

/// How one piece of a convolution computes without a copy that joins its rows
/// with its neighbours': the local operator on the rows it owns, with
/// `padding`, gives all outputs; those whose windows reach beyond these rows
/// are then computed again.
struct OverlapPiece {
  /// The windows that reach beyond one end.
  struct Edge {
    Interval rows; // that they span
    Interval outputs;
    bool operator==(const Edge&) const = default;
  };
  int64_t padding = 0;
  Edge before;
  Edge after;

  bool operator==(const OverlapPiece&) const = default;
};

class Stencil {
 public:
  enum class Kind { Conv, Pool, ConvTranspose, Adaptive, Resample };

  /// Raises for a stride or a dilation below 1, as the next two do.
  static Stencil conv(Window window, int64_t input, int64_t output);
  /// As conv, but rows outside the input are not there instead of zero.
  static Stencil pool(Window window, int64_t input, int64_t output);
  /// The transpose of conv: input i adds to the outputs i * stride - padding
  /// + j * dilation.
  static Stencil conv_transpose(Window window, int64_t input, int64_t output);
  /// Output o reads [floor(o * input / output), ceil((o + 1) * input /
  /// output)).
  static Stencil adaptive(int64_t input, int64_t output);
  static Stencil resample(Resample how, int64_t input, int64_t output);

  int64_t input() const {
    return input_;
  }
  int64_t output() const {
    return output_;
  }

  /// The first to last input row that output o reads. Rows outside
  /// [0, input()) are padding. Both ends grow with o.
  Interval reads(int64_t o) const;
  /// The rows that a non-empty interval of outputs reads.
  Interval reads(const Interval& outputs) const;
  /// The outputs among `outputs` that read one of `rows`.
  Interval readers(const Interval& rows, const Interval& outputs) const;

  /// The input row that output o belongs to: whoever owns the row owns the
  /// output. Grows with o; may lie outside the input.
  ///
  /// Note [Output ownership]
  /// The anchor is the middle of the window, so that a convolution that keeps
  /// the extent keeps the partition, one with stride s divides cut points by s
  /// and a transposed one or an up-sampling multiplies them: the paths down
  /// and up a UNet meet in the same partition when its cuts are divisible.
  int64_t anchor(int64_t o) const;

  /// The call of the local operator that gives `outputs`.
  StencilPiece piece(const Interval& outputs) const;

  /// For a convolution: output o reads row o alone, so any partition will do.
  bool is_rowwise() const;

  /// For Conv: the same without joined rows, if the owned rows give `outputs`
  /// and no more, and no window reaches beyond both ends.
  std::optional<OverlapPiece> overlap(
      const Interval& outputs,
      const Interval& owned) const;

  /// For Resample: whether at::upsample on a piece's rows, with the scale
  /// `local_scale`, gives its outputs: positions repeat, and are exact.
  /// Otherwise use taps.
  bool is_shift_invariant() const;
  /// Output over input extent, to call the local operator with, ...
  double local_scale() const;
  /// ... and its output extent: at least piece.crop + piece.outputs.
  int64_t local_outputs(const StencilPiece& piece) const;
  Taps taps(int64_t o) const;
  /// The same into memory that earlier taps had.
  void find_taps(int64_t o, Taps& taps) const;

 private:
  Stencil(Kind kind, int64_t input, int64_t output);

  StencilPiece conv_piece(const Interval& outputs) const;
  StencilPiece pool_piece(const Interval& outputs) const;
  StencilPiece conv_transpose_piece(const Interval& outputs) const;
  StencilPiece shifted_piece(const Interval& outputs) const;
  int64_t smallest_input() const;

  Kind kind_;
  int64_t input_;
  int64_t output_;
  Window window_;
  Resample how_;
};

/// The outputs of a stencil, cut so that each piece owns those anchored in its
/// input rows; see Note [Output ownership]. Outputs anchored before the first
/// row or after the last belong to the pieces that own these rows.
///
/// Example: a 2-wide pooling with stride 2 of Partition({6, 4}) gives {3, 2}.
Partition own_outputs(const Stencil& stencil, const Partition& input);

/// A stencil along one dim for all pieces. A repeated partition needs a stencil
/// that is_rowwise(), and rows in every piece.
struct StencilPlan {
  Partition outputs;
  std::vector<StencilPiece> pieces;
  bool is_local = true; // every piece reads exactly the rows it owns
};
StencilPlan plan_stencil(const Stencil& stencil, const Partition& input);

/// What lies beyond the first and the last row.
enum class Boundary { None, Zeros, Periodic, Reflect, Replicate };
/// "none", "zeros", "periodic", "reflect", "replicate".
const char* to_string(Boundary boundary);
/// Raises on another name.
Boundary parse_boundary(const std::string& name);

/// The row that stands at `row` of an input of `extent` rows continued beyond
/// its ends, or -1 for zero.
/// Example: row -1 of 5 rows is row 4 (Periodic), 1 (Reflect), 0 (Replicate).
int64_t boundary_row(int64_t row, int64_t extent, Boundary boundary);
RowSource boundary_rows(
    const Interval& rows,
    int64_t extent,
    Boundary boundary = Boundary::Zeros);

} // namespace shardtensor
