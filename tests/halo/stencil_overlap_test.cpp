#include <functional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/conv1d.h>
#include <gtest/gtest.h>

#include "tests/halo/windows.h"

namespace shardtensor {
namespace {

using at::Tensor;

// The outputs of one piece, from the rows that it owns and its edges' rows.
Tensor compute_overlapped(
    const Tensor& x,
    const OverlapPiece& piece,
    const Interval& owned,
    const Interval& outputs,
    const std::function<Tensor(const Tensor&, int64_t padding)>& conv) {
  const Tensor y =
      conv(x.narrow(2, owned.begin, owned.extent()), piece.padding).clone();
  for (const auto& edge : {piece.before, piece.after}) {
    if (!edge.outputs.empty()) {
      const auto rows = boundary_rows(edge.rows, x.size(2));
      y.narrow(2, edge.outputs.begin - outputs.begin, edge.outputs.extent())
          .copy_(conv(gather(x, rows), 0));
    }
  }
  return y;
}

TEST(Stencil, OverlappedConvolutionIsTheWholeConvolution) {
  int64_t overlapped = 0;
  for_each_window(3, 3, [&](int64_t extent, const Window& w) {
    if (extent + 2 * w.padding < w.span()) {
      return;
    }
    const Tensor x = signal(extent);
    const Tensor weight = at::arange(1, w.kernel + 1, kDouble).view({1, 1, -1});
    const auto conv = [&](const Tensor& rows, int64_t padding) {
      return at::conv1d(rows, weight, {}, w.stride, padding, w.dilation);
    };
    const Tensor y = conv(x, w.padding);
    const auto stencil = Stencil::conv(w, extent, y.size(2));
    for (const auto& partition : partitions(extent)) {
      const Partition cut = own_outputs(stencil, partition);
      for (int64_t p = 0; p < partition.pieces(); ++p) {
        const Interval owned = partition.interval(p);
        const Interval outputs = cut.interval(p);
        if (const auto piece = stencil.overlap(outputs, owned)) {
          ++overlapped;
          const Tensor got =
              compute_overlapped(x, *piece, owned, outputs, conv);
          ASSERT_EQ(got.size(2), outputs.extent());
          ASSERT_TRUE(
              at::allclose(
                  got,
                  y.narrow(2, outputs.begin, outputs.extent()),
                  1e-12,
                  1e-12))
              << "extent " << extent << ' ' << partition << " piece " << p;
        }
      }
    }
  });
  EXPECT_GT(overlapped, 1000);
}

TEST(Stencil, UsualConvolutionsOverlap) {
  const auto same = Stencil::conv({3, 1, 1, 1}, 16, 16);
  EXPECT_EQ(
      same.overlap({8, 12}, {8, 12}),
      (OverlapPiece{1, {{7, 10}, {8, 9}}, {{10, 13}, {11, 12}}}));
  const auto halving = Stencil::conv({3, 2, 1, 1}, 16, 8);
  EXPECT_EQ(
      halving.overlap({4, 8}, {8, 16}),
      (OverlapPiece{1, {{7, 10}, {4, 5}}, {}}));
  EXPECT_FALSE(same.overlap({8, 9}, {8, 9}))
      << "its window sees both neighbours";
  EXPECT_FALSE(same.overlap({8, 8}, {8, 8}));
}

} // namespace
} // namespace shardtensor
