#include "shardtensor/halo/stencil.h"

#include <functional>
#include <numeric>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_upsample_bicubic2d_aa_ops.h>
#include <ATen/ops/_upsample_bilinear2d_aa_ops.h>
#include <ATen/ops/_upsample_nearest_exact1d.h>
#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bicubic2d_ops.h>
#include <ATen/ops/upsample_linear1d.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tests/halo/windows.h"

namespace shardtensor {
namespace {

TEST(Stencil, WindowsMoveOn) {
  for (const Window& window : {Window{3, 0, 1, 1}, Window{3, 1, 1, 0}}) {
    for (const auto make :
         {Stencil::conv, Stencil::pool, Stencil::conv_transpose}) {
      EXPECT_THROW(make(window, 5, 5), c10::ValueError);
    }
  }
}

using at::Tensor;
using Local = std::function<Tensor(const Tensor&, const StencilPiece&)>;

// What all pieces compute together.
Tensor run_pieces(
    const Tensor& x,
    const Stencil& stencil,
    const Partition& partition,
    const Local& local) {
  const StencilPlan plan = plan_stencil(stencil, partition);
  std::vector<Tensor> outputs;
  for (const StencilPiece& piece : plan.pieces) {
    const Tensor rows = gather(x, boundary_rows(piece.rows, stencil.input()));
    const Tensor y = local(rows, piece);
    EXPECT_LE(piece.crop + piece.outputs, y.size(2));
    outputs.push_back(y.narrow(2, piece.crop, piece.outputs));
  }
  return at::cat(outputs, 2);
}

// `context` is printed when the pieces disagree with the whole.
template <typename... Context>
void expect_same(
    const Tensor& expected,
    const Stencil& stencil,
    const Tensor& x,
    const Local& local,
    double tolerance,
    const Context&... context) {
  for (const auto& partition : partitions(x.size(2))) {
    const Tensor got = run_pieces(x, stencil, partition, local);
    const bool same = got.sizes() == expected.sizes() &&
        at::allclose(got, expected, tolerance, tolerance);
    if (!same) {
      std::ostringstream text;
      ((text << context << ' '), ...);
      FAIL() << "extent " << x.size(2) << " " << partition << " parameters "
             << text.str() << "\n"
             << got << "\nexpected\n"
             << expected;
    }
  }
}

TEST(Stencil, ConvolutionOfPiecesIsTheWholeConvolution) {
  for_each_window(3, 3, [](int64_t extent, const Window& w) {
    if (extent + 2 * w.padding < w.span()) {
      return;
    }
    const Tensor x = signal(extent);
    const Tensor weight = at::arange(1, w.kernel + 1, kDouble).view({1, 1, -1});
    const Tensor bias = at::tensor({0.5}, kDouble);
    const Tensor y =
        at::conv1d(x, weight, bias, w.stride, w.padding, w.dilation);
    const auto local = [&](const Tensor& rows, const StencilPiece& piece) {
      return at::conv1d(
          rows, weight, bias, w.stride, piece.padding, w.dilation);
    };
    const auto stencil = Stencil::conv(w, extent, y.size(2));
    expect_same(
        y, stencil, x, local, 1e-12, w.kernel, w.stride, w.padding, w.dilation);
  });
}

TEST(Stencil, ConvolutionPadsDifferentlyBeforeAndAfter) {
  for (int64_t kernel = 1; kernel <= 6; ++kernel) {
    for (int64_t dilation = 1; dilation <= 3; ++dilation) {
      const int64_t before = dilation * (kernel - 1) / 2; // "same"
      const Tensor x = signal(9);
      const Tensor weight = at::arange(1, kernel + 1, kDouble).view({1, 1, -1});
      const Tensor y = at::conv1d(x, weight, {}, 1, "same", dilation);
      const auto local = [&](const Tensor& rows, const StencilPiece&) {
        return at::conv1d(rows, weight, {}, 1, "valid", dilation);
      };
      const auto stencil = Stencil::conv({kernel, 1, before, dilation}, 9, 9);
      expect_same(y, stencil, x, local, 1e-12, kernel, dilation);
    }
  }
}

TEST(Stencil, TransposedConvolutionOfPiecesIsTheWholeOne) {
  for_each_window(3, 3, [](int64_t extent, const Window& w) {
    const int64_t longest = std::max(w.stride, w.dilation);
    for (int64_t more = 0; more < longest; ++more) {
      const int64_t outputs =
          (extent - 1) * w.stride - 2 * w.padding + w.span() + more;
      if (outputs < 1) {
        continue;
      }
      const Tensor x = signal(extent);
      const Tensor weight =
          at::arange(1, w.kernel + 1, kDouble).view({1, 1, -1});
      const Tensor bias = at::tensor({0.5}, kDouble);
      const Tensor y = at::conv_transpose1d(
          x, weight, bias, w.stride, w.padding, more, 1, w.dilation);
      const auto local = [&](const Tensor& rows, const StencilPiece&) {
        return at::conv_transpose1d(
            rows, weight, bias, w.stride, 0, 0, 1, w.dilation);
      };
      const auto stencil = Stencil::conv_transpose(w, extent, outputs);
      expect_same(
          y,
          stencil,
          x,
          local,
          1e-12,
          w.kernel,
          w.stride,
          w.padding,
          w.dilation,
          more);
    }
  });
}

TEST(Stencil, MaxPoolingOfPiecesIsTheWholeOneWithItsIndices) {
  for_each_window(2, 3, [](int64_t extent, const Window& w) {
    for (const bool ceil_mode : {false, true}) {
      if (2 * w.padding > w.span() || 2 * w.padding > w.kernel ||
          extent + 2 * w.padding < w.span()) {
        continue;
      }
      const Tensor x = signal(extent).sin();
      const auto [y, indices] = at::max_pool1d_with_indices(
          x, w.kernel, w.stride, w.padding, w.dilation, ceil_mode);
      const auto stencil = Stencil::pool(w, extent, y.size(2));
      const auto pool = [&](const Tensor& rows) {
        return at::max_pool1d_with_indices(
            rows, w.kernel, w.stride, w.padding, w.dilation, ceil_mode);
      };
      expect_same(
          y,
          stencil,
          x,
          [&](const Tensor& rows, const StencilPiece&) {
            return std::get<0>(pool(rows));
          },
          0,
          w.kernel,
          w.stride,
          w.padding,
          w.dilation,
          ceil_mode);
      expect_same(
          indices.to(at::kDouble),
          stencil,
          x,
          [&](const Tensor& rows, const StencilPiece& piece) {
            return std::get<1>(pool(rows))
                .add(piece.rows.begin)
                .to(at::kDouble);
          },
          0,
          w.kernel,
          w.stride,
          w.padding,
          w.dilation,
          ceil_mode);
    }
  });
}

TEST(Stencil, AveragePoolingOfPiecesCountsPaddingAsTheWholeDoes) {
  for_each_window(2, 1, [](int64_t extent, const Window& w) {
    for (const int64_t mode : {0, 1, 2, 3}) {
      const bool ceil_mode = mode & 1;
      const bool count_padding = mode & 2;
      if (2 * w.padding > w.kernel || extent + 2 * w.padding < w.span()) {
        continue;
      }
      const Tensor x = signal(extent);
      const auto pool = [&](const Tensor& rows, const StencilPiece&) {
        return at::avg_pool1d(
            rows, w.kernel, w.stride, w.padding, ceil_mode, count_padding);
      };
      const Tensor y = pool(x, {});
      const auto stencil = Stencil::pool(w, extent, y.size(2));
      expect_same(y, stencil, x, pool, 0, w.kernel, w.stride, w.padding, mode);
    }
  });
}

TEST(Stencil, AdaptivePoolingReadsPyTorchsWindows) {
  for (int64_t extent = 1; extent <= 13; ++extent) {
    for (int64_t outputs = 1; outputs <= 15; ++outputs) {
      const Tensor x = signal(extent);
      const Tensor y = at::adaptive_avg_pool1d(x, outputs);
      const auto stencil = Stencil::adaptive(extent, outputs);
      for (const auto& partition : partitions(extent)) {
        const auto plan = plan_stencil(stencil, partition);
        for (int64_t p = 0; p < partition.pieces(); ++p) {
          const Interval own = plan.outputs.interval(p);
          const auto& piece = plan.pieces[p];
          const Tensor rows = gather(x, boundary_rows(piece.rows, extent));
          for (int64_t o = own.begin; o < own.end; ++o) {
            const Interval at = stencil.reads(o).shifted(-piece.rows.begin);
            const Tensor mean = rows.narrow(2, at.begin, at.extent()).mean();
            ASSERT_NEAR(mean.item<double>(), y[0][0][o].item<double>(), 1e-12);
          }
        }
      }
    }
  }
}

// ---- interpolation ----------------------------------------------------------

// The sum of weighted rows that taps name, on one piece's rows.
Tensor weighted_rows(
    const Stencil& stencil,
    const Tensor& rows,
    const Interval& read,
    const Interval& outputs) {
  std::vector<Tensor> columns;
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const Taps taps = stencil.taps(o);
    Tensor sum = at::zeros({1, 1, 1}, rows.options());
    for (int64_t j = 0; j < static_cast<int64_t>(taps.rows.size()); ++j) {
      const Tensor row = rows.narrow(2, taps.rows[j] - read.begin, 1);
      sum.add_(row, taps.weights[j]);
    }
    columns.push_back(sum);
  }
  return columns.empty() ? rows.narrow(2, 0, 0) : at::cat(columns, 2);
}

Tensor upsample(
    const Tensor& x,
    const Resample& how,
    int64_t outputs,
    std::optional<double> scale) {
  switch (how.mode) {
    case Resample::Mode::Nearest:
      return at::upsample_nearest1d(x, outputs, scale);
    case Resample::Mode::NearestExact:
      return at::_upsample_nearest_exact1d(x, outputs, scale);
    case Resample::Mode::Linear:
      return at::upsample_linear1d(x, outputs, how.align_corners, scale);
    default: {
      const std::vector<c10::SymInt> size{1, outputs};
      const auto call = [&](auto op) {
        const auto image = x.unsqueeze(2);
        return op(image, size, how.align_corners, std::nullopt, scale)
            .squeeze(2);
      };
      if (how.mode == Resample::Mode::Cubic) {
        return call(at::_ops::upsample_bicubic2d::call);
      }
      return how.mode == Resample::Mode::LinearAntialias
          ? call(at::_ops::_upsample_bilinear2d_aa::call)
          : call(at::_ops::_upsample_bicubic2d_aa::call);
    }
  }
  return x;
}

void expect_resampled(const Resample& how, int64_t extent, int64_t outputs) {
  const auto dtype = how.double_precision ? at::kDouble : at::kFloat;
  const double tolerance = how.double_precision ? 1e-12 : 4e-6;
  const Tensor x = signal(extent).to(dtype);
  const Tensor y = upsample(x, how, outputs, how.scale);
  const auto stencil = Stencil::resample(how, extent, outputs);
  for (const auto& partition : partitions(extent)) {
    const auto plan = plan_stencil(stencil, partition);
    std::vector<Tensor> pieces;
    for (int64_t p = 0; p < partition.pieces(); ++p) {
      const auto& piece = plan.pieces[p];
      const Tensor rows = gather(x, boundary_rows(piece.rows, extent));
      pieces.push_back(
          stencil.is_shift_invariant()
              ? upsample(
                    rows,
                    how,
                    stencil.local_outputs(piece),
                    stencil.local_scale())
                    .narrow(2, piece.crop, piece.outputs)
              : weighted_rows(
                    stencil, rows, piece.rows, plan.outputs.interval(p)));
    }
    const Tensor got = at::cat(pieces, 2);
    ASSERT_EQ(got.sizes(), y.sizes());
    ASSERT_TRUE(at::allclose(got, y, tolerance, tolerance))
        << partition << " to " << outputs << " mode "
        << static_cast<int>(how.mode) << " corners " << how.align_corners
        << " scale " << how.scale.value_or(0) << "\n"
        << got << "\nexpected\n"
        << y;
  }
}

TEST(Stencil, InterpolationOfPiecesIsTheWholeOne) {
  using Mode = Resample::Mode;
  for (const auto mode :
       {Mode::Nearest,
        Mode::NearestExact,
        Mode::Linear,
        Mode::Cubic,
        Mode::LinearAntialias,
        Mode::CubicAntialias}) {
    for (const bool wide : {false, true}) {
      const int64_t step = mode < Mode::LinearAntialias ? 1 : 3;
      for (int64_t extent = 1; extent <= 13; extent += step) {
        for (int64_t outputs = 1; outputs <= 28; ++outputs) {
          expect_resampled({mode, false, {}, wide}, extent, outputs);
          if (mode != Mode::Nearest && mode != Mode::NearestExact) {
            expect_resampled({mode, true, {}, wide}, extent, outputs);
          }
        }
        for (const double scale :
             {0.25, 0.3, 0.5, 0.75, 1.0, 1.05, 1.5, 2.0, 2.05, 2.5, 3.0, 4.0}) {
          const auto outputs = static_cast<int64_t>(extent * scale);
          if (outputs > 0) {
            expect_resampled({mode, false, scale, wide}, extent, outputs);
          }
        }
      }
    }
  }
}

TEST(Stencil, NearestReadsTheSameRowsAsPyTorchAtEveryExtent) {
  using Mode = Resample::Mode;
  for (const auto mode : {Mode::Nearest, Mode::NearestExact}) {
    for (const bool wide : {false, true}) {
      for (int64_t extent = 1; extent <= 100; extent += 3) {
        const Tensor x = at::arange(extent, kDouble).view({1, 1, -1});
        for (int64_t outputs = 1; outputs <= 300; outputs += 7) {
          const Resample how{mode, false, {}, wide};
          const Tensor y =
              upsample(x.to(wide ? at::kDouble : at::kFloat), how, outputs, {});
          const auto stencil = Stencil::resample(how, extent, outputs);
          std::vector<double> rows;
          for (int64_t o = 0; o < outputs; ++o) {
            rows.push_back(static_cast<double>(stencil.taps(o).rows[0]));
          }
          ASSERT_TRUE(at::equal(y.to(at::kDouble).flatten(), at::tensor(rows)))
              << extent << " to " << outputs;
        }
      }
    }
  }
}

TEST(Stencil, DoublingAndHalvingInterpolateLocally) {
  for (const double scale : {0.25, 0.5, 1.0, 2.0, 4.0, 8.0}) {
    const auto outputs = static_cast<int64_t>(8 * scale);
    const auto stencil = Stencil::resample(
        {Resample::Mode::Linear, false, {}, false}, 8, outputs);
    EXPECT_TRUE(stencil.is_shift_invariant()) << scale;
  }
  EXPECT_FALSE(Stencil::resample({}, 8, 24).is_shift_invariant());
  EXPECT_FALSE(
      Stencil::resample({Resample::Mode::Linear, true, {}, false}, 8, 16)
          .is_shift_invariant());
}

TEST(Stencil, PositionsOfDoublesAreRoundedAsFloats) {
  const auto is_exact = [](Resample::Mode mode, int64_t rows) {
    return Stencil::resample({mode, false, {}, true}, rows, 2 * rows)
        .is_shift_invariant();
  };
  EXPECT_TRUE(is_exact(Resample::Mode::Linear, 1 << 20));
  EXPECT_FALSE(is_exact(Resample::Mode::Linear, 1 << 24));
  EXPECT_TRUE(is_exact(Resample::Mode::LinearAntialias, 1 << 24));
}

// ---- ownership --------------------------------------------------------------

std::vector<int64_t> owned(const Stencil& stencil, const Partition& input) {
  return own_outputs(stencil, input).sizes();
}

using Sizes = std::vector<int64_t>;

TEST(OwnOutputs, KeepsThePartitionWhenTheExtentStays) {
  const Partition input({5, 0, 3, 1});
  for (int64_t kernel = 1; kernel <= 9; ++kernel) {
    for (int64_t dilation = 1; dilation <= 3; ++dilation) {
      const int64_t before = dilation * (kernel - 1) / 2;
      const auto same = Stencil::conv({kernel, 1, before, dilation}, 9, 9);
      EXPECT_EQ(own_outputs(same, input), input) << kernel << " " << dilation;
    }
  }
}

TEST(OwnOutputs, DividesAndMultipliesCutPoints) {
  const Partition fine({4, 8, 0, 4});
  const Partition coarse({2, 4, 0, 2});
  const Window pool{2, 2, 0, 1};
  for (const Window down :
       {pool,
        Window{3, 2, 1, 1},
        Window{1, 2, 0, 1},
        Window{5, 2, 2, 1},
        Window{4, 2, 1, 1},
        Window{7, 2, 3, 1}}) {
    EXPECT_EQ(own_outputs(Stencil::conv(down, 16, 8), fine), coarse)
        << down.kernel;
  }
  for (const Window up : {pool, Window{3, 2, 1, 1}, Window{4, 2, 1, 1}}) {
    EXPECT_EQ(own_outputs(Stencil::conv_transpose(up, 8, 16), coarse), fine)
        << up.kernel;
  }
  for (const bool corners : {false, true}) {
    const Resample how{Resample::Mode::Linear, corners, {}, false};
    EXPECT_EQ(own_outputs(Stencil::resample(how, 8, 16), coarse), fine);
    EXPECT_EQ(own_outputs(Stencil::resample(how, 16, 8), fine), coarse);
  }
  EXPECT_EQ(own_outputs(Stencil::adaptive(16, 8), fine), coarse);
}

TEST(OwnOutputs, PatchesOfAnyExtentComeBackToTheirCuts) {
  for (int64_t patch = 1; patch <= 7; ++patch) {
    const Partition coarse({2, 1, 0, 3});
    const Window w{patch, patch, 0, 1};
    const auto up = Stencil::conv_transpose(w, 6, 6 * patch);
    EXPECT_EQ(own_outputs(up, coarse), coarse.scaled(patch)) << patch;
    const auto down = Stencil::conv(w, 6 * patch, 6);
    EXPECT_EQ(own_outputs(down, coarse.scaled(patch)), coarse) << patch;
    EXPECT_TRUE(plan_stencil(up, Partition({2, 1, 3})).is_local);
    EXPECT_TRUE(
        plan_stencil(down, Partition({2, 1, 3}).scaled(patch)).is_local);
  }
}

TEST(OwnOutputs, GivesPaddingToTheOutermostRowsOwners) {
  const Window padding{1, 1, 2, 1}; // two rows before
  EXPECT_EQ(
      owned(Stencil::conv(padding, 5, 10), Partition({0, 2, 3, 0})),
      (Sizes{0, 4, 6, 0}));
  const Window cropping{1, 1, -3, 1};
  EXPECT_EQ(
      owned(Stencil::conv(cropping, 5, 2), Partition({2, 3})), (Sizes{0, 2}));
}

TEST(OwnOutputs, CoversTheOutputsOfAnEmptyInput) {
  const auto stencil = Stencil::conv({1, 1, 1, 1}, 0, 2);
  EXPECT_EQ(owned(stencil, Partition({0, 0})), (Sizes{0, 2}));
}

TEST(StencilPlan, SaysWhenNothingMoves) {
  const Window pool{2, 2, 0, 1};
  EXPECT_TRUE(
      plan_stencil(Stencil::pool(pool, 10, 5), Partition({6, 4})).is_local);
  EXPECT_FALSE(
      plan_stencil(Stencil::pool(pool, 10, 5), Partition({5, 5})).is_local);
  EXPECT_FALSE(
      plan_stencil(Stencil::conv({3, 1, 1, 1}, 10, 10), Partition({6, 4}))
          .is_local);
}

TEST(StencilPlan, LeavesRowsThatAKernelOfOneReadsWhereTheyAre) {
  const Partition merged({2, 1}, 3);
  for (const auto& stencil :
       {Stencil::conv({}, 9, 9), Stencil::conv_transpose({}, 9, 9)}) {
    ASSERT_TRUE(stencil.is_rowwise());
    const auto plan = plan_stencil(stencil, merged);
    EXPECT_TRUE(plan.is_local);
    EXPECT_EQ(plan.outputs, merged);
    EXPECT_EQ(plan.pieces[0], (StencilPiece{{0, 6}, 0, 0, 6}));
    EXPECT_EQ(plan.pieces[1], (StencilPiece{{0, 3}, 0, 0, 3}));
  }
  EXPECT_FALSE(Stencil::conv({3, 1, 1}, 9, 9).is_rowwise());
  EXPECT_FALSE(Stencil::pool({}, 9, 9).is_rowwise()); // has indices
}

TEST(StencilPlan, ReadsOneHaloRowOnEachSide) {
  const auto plan =
      plan_stencil(Stencil::conv({3, 1, 1, 1}, 10, 10), Partition({4, 3, 3}));
  EXPECT_EQ(plan.pieces[0].rows, (Interval{-1, 5}));
  EXPECT_EQ(plan.pieces[1].rows, (Interval{3, 8}));
  EXPECT_EQ(plan.pieces[2].rows, (Interval{6, 11}));
}

// ---- boundaries -------------------------------------------------------------

TEST(BoundaryRows, ContinueTheInputBeyondItsEnds) {
  const Interval wide{-3, 7};
  EXPECT_EQ(
      boundary_rows(wide, 4, Boundary::Zeros),
      (RowSource{-1, -1, -1, 0, 1, 2, 3, -1, -1, -1}));
  EXPECT_EQ(
      boundary_rows(wide, 4, Boundary::Periodic),
      (RowSource{1, 2, 3, 0, 1, 2, 3, 0, 1, 2}));
  EXPECT_EQ(
      boundary_rows(wide, 4, Boundary::Reflect),
      (RowSource{3, 2, 1, 0, 1, 2, 3, 2, 1, 0}));
  EXPECT_EQ(
      boundary_rows(wide, 4, Boundary::Replicate),
      (RowSource{0, 0, 0, 0, 1, 2, 3, 3, 3, 3}));
}

TEST(BoundaryRows, AreFewRunsOfAnyExtent) {
  const int64_t extent = int64_t{1} << 42;
  const Interval wide{-extent, 2 * extent};
  EXPECT_EQ(
      boundary_rows(wide, extent, Boundary::Zeros).runs(),
      (std::vector<RowSource::Run>{{-1, extent}, {0, extent}, {-1, extent}}));
  EXPECT_EQ(
      boundary_rows(wide, extent, Boundary::Periodic).runs(),
      (std::vector<RowSource::Run>{{0, extent}, {0, extent}, {0, extent}}));
  EXPECT_EQ(
      boundary_rows({-1, extent + 1}, extent, Boundary::Reflect).runs(),
      (std::vector<RowSource::Run>{{1, 1}, {0, extent}, {extent - 2, 1}}));
  EXPECT_EQ(
      boundary_rows({2, 5}, 0, Boundary::Periodic).runs(),
      (std::vector<RowSource::Run>{{-1, 3}}));
}

TEST(BoundaryRows, WrapMoreThanOnce) {
  EXPECT_EQ(boundary_row(-9, 4, Boundary::Periodic), 3);
  EXPECT_EQ(boundary_row(12, 4, Boundary::Periodic), 0);
  EXPECT_EQ(boundary_row(-7, 4, Boundary::Reflect), 1);
  EXPECT_EQ(boundary_row(5, 1, Boundary::Reflect), 0);
  EXPECT_EQ(boundary_row(2, 0, Boundary::Periodic), -1);
  EXPECT_EQ(boundary_row(2, 0, Boundary::Replicate), -1);
}

TEST(BoundaryRows, HaveNames) {
  EXPECT_STREQ(to_string(Boundary::None), "none");
  EXPECT_STREQ(to_string(Boundary::Zeros), "zeros");
  EXPECT_STREQ(to_string(Boundary::Periodic), "periodic");
  EXPECT_STREQ(to_string(Boundary::Reflect), "reflect");
  EXPECT_STREQ(to_string(Boundary::Replicate), "replicate");
  EXPECT_EQ(parse_boundary("periodic"), Boundary::Periodic);
  EXPECT_THROW(parse_boundary("circular"), c10::ValueError);
}

} // namespace
} // namespace shardtensor
