#include "shardtensor/layout/plans/view_plan.h"

#include <algorithm>
#include <numeric>

#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include "../parts.h"

namespace shardtensor::detail {
namespace {

using namespace testing;

using Sizes = std::vector<int64_t>;
using Plan = std::function<ViewPlan(const SpecPtr& spec)>;
/// What a view does to a plain tensor; `plan` for arguments that differ between
/// ranks, null where they are the global ones.
using View = std::function<at::Tensor(const at::Tensor& x, const ViewPlan*)>;

/// The view of every rank's piece, in the layout that is wanted, is the piece
/// that the output's layout promises of the whole view.
void check_plan(
    const SpecPtr& spec,
    const Plan& plan,
    const View& global_view,
    const View& local_view) {
  const auto global = numbered(spec->sizes());
  const auto expected = global_view(global, nullptr);
  for (int64_t position = 0; position < spec->mesh()->ranks(); ++position) {
    const auto own = plan(seen_from(spec, position));
    ASSERT_EQ(own.output->sizes(), expected.sizes().vec());
    const auto local = local_view(part_of(global, *own.wanted, position), &own);
    ASSERT_TRUE(local.equal(part_of(expected, *own.output, position)))
        << *spec << " -> " << *own.wanted << " -> " << *own.output;
  }
}

/// Random layouts of tensors of `sizes` on all meshes.
void for_each_layout(
    std::mt19937& random,
    const Sizes& sizes,
    const std::function<void(const SpecPtr& spec)>& visit) {
  for (const auto& shape : mesh_shapes()) {
    for (int trial = 0; trial < 8; ++trial) {
      const auto placements =
          random_placements(random, shape.size(), sizes.size());
      visit(random_spec(random, mesh_of(shape), sizes, placements, true));
    }
  }
}

// ---- dims -------------------------------------------------------------------

TEST(ViewPlan, DimsMoveAppearAndDisappear) {
  std::mt19937 random(1);
  for_each_layout(random, {4, 1, 6}, [&](const SpecPtr& spec) {
    for (const auto& dims :
         {Sizes{2, 1, 0},
          Sizes{0, 2},
          Sizes{2, -1, 0},
          Sizes{-1, 1, 2, 0, -1}}) {
      const auto view = [&](const at::Tensor& x, const ViewPlan*) {
        Sizes sizes;
        Sizes order;
        for (const int64_t dim : dims) {
          sizes.push_back(dim < 0 ? 1 : x.size(dim));
          if (dim >= 0) {
            order.push_back(dim);
          }
        }
        for (int64_t dim = 0; dim < x.dim(); ++dim) {
          if (std::count(order.begin(), order.end(), dim) == 0) {
            order.push_back(dim);
          }
        }
        return x.permute(order).reshape(sizes);
      };
      check_plan(
          spec,
          [&](const SpecPtr& own) { return plan_dims(own, dims); },
          view,
          view);
    }
  });
}

TEST(ViewPlan, DimsOfSizeOneExpand) {
  std::mt19937 random(2);
  for_each_layout(random, {4, 1, 6}, [&](const SpecPtr& spec) {
    for (const auto& sizes :
         {Sizes{4, 3, 6}, Sizes{2, 4, 1, 6}, Sizes{5, 4, 2, 6}}) {
      const auto plan = [&](const SpecPtr& own) {
        return plan_expand(own, sizes);
      };
      check_plan(
          spec,
          plan,
          [&](const at::Tensor& x, const ViewPlan*) { return x.expand(sizes); },
          [&](const at::Tensor& x, const ViewPlan* own) {
            const auto& mesh = *own->output->mesh();
            return x.expand(own->output->local_sizes(mesh.position()));
          });
    }
  });
}

// ---- slices -----------------------------------------------------------------

struct Slice {
  int64_t start;
  int64_t end;
  int64_t step;
};

const std::vector<Slice>& slices() {
  static const std::vector<Slice> all{
      {0, 12, 1},
      {0, 6, 1},
      {3, 9, 1},
      {4, 8, 1},
      {1, 12, 3},
      {5, 6, 2},
      {7, 7, 1},
      {0, 12, 5}};
  return all;
}

TEST(ViewPlan, SlicesKeepTheRowsOfEveryRank) {
  std::mt19937 random(3);
  for_each_layout(random, {2, 12}, [&](const SpecPtr& spec) {
    for (const auto& [start, end, step] : slices()) {
      check_plan(
          spec,
          [&, s = start, e = end, t = step](const SpecPtr& own) {
            return plan_slice(own, 1, s, e, t);
          },
          [&, s = start, e = end, t = step](
              const at::Tensor& x, const ViewPlan*) {
            return x.slice(1, s, e, t);
          },
          [&, t = step](const at::Tensor& x, const ViewPlan* own) {
            return x.slice(1, own->arguments[0], own->arguments[1], t);
          });
    }
  });
}

TEST(ViewPlan, TheGradientOfASliceStaysWhereItIs) {
  std::mt19937 random(4);
  for (const auto& [start, end, step] : slices()) {
    const int64_t rows = (end - start + step - 1) / step;
    for_each_layout(
        random, {2, rows}, [&, s = start, e = end, t = step](const auto& spec) {
          const auto written = [&](const at::Tensor& grad,
                                   at::Tensor zeros,
                                   int64_t from,
                                   int64_t to) {
            zeros.slice(1, from, to, t).copy_(grad);
            return zeros;
          };
          check_plan(
              spec,
              [&](const SpecPtr& own) {
                return plan_slice_backward(own, 12, 1, s, e, t);
              },
              [&](const at::Tensor& grad, const ViewPlan*) {
                return written(grad, at::zeros_like(numbered({2, 12})), s, e);
              },
              [&](const at::Tensor& grad, const ViewPlan* own) {
                const auto& mesh = *own->output->mesh();
                const auto sizes = own->output->local_sizes(mesh.position());
                return written(
                    grad,
                    at::zeros_like(numbered(sizes)),
                    own->arguments[0],
                    own->arguments[1]);
              });
        });
  }
}

TEST(ViewPlan, NothingMovesForASliceOfACutDimOrItsGradient) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 50; ++trial) {
    const auto spec =
        random_spec(random, mesh_of({3}), {12}, {Placement::shard(0)});
    EXPECT_EQ(plan_slice(spec, 0, 2, 9, 2).wanted, spec);
    EXPECT_EQ(plan_slice_backward(spec, 40, 0, 3, 15, 1).wanted, spec);
  }
}

TEST(ViewPlan, TheGradientOfASelectIsCutAlongTheNewDim) {
  std::mt19937 random(6);
  for_each_layout(random, {4, 6}, [&](const SpecPtr& spec) {
    for (const int64_t size : {1, 2, 9}) {
      const auto plan = plan_select_backward(spec, size, 1);
      EXPECT_EQ(plan.wanted, spec);
      EXPECT_EQ(plan.output->sizes(), (Sizes{4, size, 6}));
      int64_t whole = 1; // ranks that have the same part of the gradient
      int64_t cut = 1;
      for (int64_t axis = 0; axis < spec->mesh()->axes(); ++axis) {
        const auto ranks = spec->mesh()->ranks(axis);
        whole *= spec->placement(axis).is_replicate() ? ranks : 1;
        cut *= plan.output->placement(axis).is_shard(1) ? ranks : 1;
      }
      EXPECT_EQ(cut, size < whole ? 1 : whole);
      for (int64_t position = 0; position < spec->mesh()->ranks(); ++position) {
        EXPECT_EQ(
            rows_of(*plan.output, 0, position), rows_of(*spec, 0, position));
        EXPECT_EQ(
            rows_of(*plan.output, 2, position), rows_of(*spec, 1, position));
      }
    }
  });
}

// ---- dims that an operator needs whole, or cut once -------------------------

TEST(ViewPlan, WholeDimsAreCutNoMoreAndOthersTakeTheirAxes) {
  std::mt19937 random(7);
  for_each_layout(random, {4, 6, 3}, [&](const SpecPtr& spec) {
    for (const auto& dims : {Sizes{0}, Sizes{1, 2}, Sizes{0, 1, 2}}) {
      const auto wanted = whole_dims(spec, dims);
      bool was_cut = false;
      for (const int64_t dim : dims) {
        EXPECT_FALSE(wanted->is_sharded(dim));
        was_cut |= spec->is_sharded(dim);
      }
      EXPECT_EQ(wanted == spec, !was_cut);
      if (dims.size() == 1 && spec->sharded_dims() == dims) {
        EXPECT_EQ(wanted->sharded_axes(), spec->sharded_axes());
      }
    }
  });
}

TEST(ViewPlan, ContiguousDimsKeepTheSizesOfTheirPieces) {
  std::mt19937 random(8);
  for_each_layout(random, {4, 6, 3}, [&](const SpecPtr& spec) {
    const auto once = contiguous(spec);
    EXPECT_TRUE(once->is_contiguous());
    EXPECT_EQ(once->placements(), spec->placements());
    EXPECT_EQ(once == spec, spec->is_contiguous());
    for (int64_t position = 0; position < spec->mesh()->ranks(); ++position) {
      EXPECT_EQ(once->local_sizes(position), spec->local_sizes(position));
    }
  });
}

} // namespace
} // namespace shardtensor::detail
