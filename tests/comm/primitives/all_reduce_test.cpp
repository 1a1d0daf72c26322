#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "../gradient.h"
#include "../thread_ranks.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/comm/primitives/sum_in_place.h"

namespace shardtensor {
namespace {

using testing::collectives_run;
using testing::gradient;
using testing::run_on_mesh;

class AllReduce : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    AllReduce,
    testing::each_backend(),
    testing::backend_name);

/// {r + 1, 2 * (r + 1), ...} on rank r.
at::Tensor own(const MeshPtr& mesh, at::ScalarType dtype = at::kDouble) {
  return (at::arange(1, 5, at::kDouble) *
          at::full({}, mesh->position() + 1, at::kDouble))
      .to(dtype);
}

at::Tensor times(double factor, at::ScalarType dtype = at::kDouble) {
  return (at::arange(1, 5, at::kDouble) * at::full({}, factor, at::kDouble))
      .to(dtype);
}

TEST_P(AllReduce, ReducesEveryKindOnEveryRank) {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    run_on_mesh({ranks}, [&](const MeshPtr& mesh) {
      const auto reduced = [&](Reduce reduce) {
        return all_reduce(own(mesh), reduce, mesh->group());
      };
      const double sum = ranks * (ranks + 1) / 2.0;
      EXPECT_TRUE(at::equal(reduced(Reduce::Sum), times(sum)));
      EXPECT_TRUE(at::equal(reduced(Reduce::Avg), times(sum / ranks)));
      EXPECT_TRUE(at::equal(reduced(Reduce::Max), times(ranks)));
      EXPECT_TRUE(at::equal(reduced(Reduce::Min), times(1)));
      const auto product =
          times(1).pow(ranks) * at::full({}, std::tgamma(ranks + 1));
      EXPECT_TRUE(reduced(Reduce::Prod).allclose(product));
    });
  }
}

TEST_P(AllReduce, KeepsWhatWasBegun) {
  run_on_mesh({2}, [&](const MeshPtr& mesh) {
    const detail::Group group(mesh->group());
    for (int call = 0; call < 4; ++call) { // one of three may end at once
      auto x = own(mesh);
      auto started = group.start_all_reduce(x, Reduce::Sum, "a sum");
      x.reset();
      EXPECT_NO_THROW(started.wait());
    }
  });
}

TEST_P(AllReduce, SumsEveryDtype) {
  for (const auto dtype :
       {at::kByte,
        at::kChar,
        at::kShort,
        at::kInt,
        at::kLong,
        at::kHalf,
        at::kBFloat16,
        at::kFloat,
        at::kComplexFloat,
        at::kComplexDouble}) {
    run_on_mesh({3}, [&](const MeshPtr& mesh) {
      const auto y = all_reduce(own(mesh, dtype), Reduce::Sum, mesh->group());
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_TRUE(at::equal(y, times(6, dtype))) << dtype;
    });
  }
}

TEST_P(AllReduce, BooleansKnowAnyAndAll) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    // (false, false), (false, true), (true, true)
    const auto x =
        mesh->position() == 0 ? at::arange(3).gt(1) : at::arange(3).gt(0);
    const auto reduced = [&](Reduce reduce) {
      return all_reduce(x, reduce, mesh->group());
    };
    for (const auto any : {Reduce::Sum, Reduce::Max}) {
      EXPECT_TRUE(at::equal(reduced(any), at::arange(3).gt(0)));
    }
    for (const auto all : {Reduce::Prod, Reduce::Min}) {
      EXPECT_TRUE(at::equal(reduced(all), at::arange(3).gt(1)));
    }
  });
}

TEST_P(AllReduce, KeepsNaNInMaxAndMin) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (int64_t with_nan = 0; with_nan < 3; ++with_nan) {
      run_on_mesh({3}, [&](const MeshPtr& mesh) {
        auto x = at::tensor({1.0, -2.0, inf, -inf}, at::kDouble)
                     .mul(double(mesh->position() + 1));
        if (mesh->position() == with_nan) {
          x = x.clone();
          x[0] = nan;
          x[2] = -nan;
        }
        for (const auto reduce : {Reduce::Max, Reduce::Min}) {
          const auto y = all_reduce(x.to(dtype), reduce, mesh->group());
          const double second = reduce == Reduce::Max ? -2.0 : -6.0;
          EXPECT_EQ(y.scalar_type(), dtype);
          EXPECT_TRUE(std::isnan(y[0].item<double>()));
          EXPECT_EQ(y[1].item<double>(), second);
          EXPECT_TRUE(std::isnan(y[2].item<double>()));
          EXPECT_EQ(y[3].item<double>(), -inf);
        }
      });
    }
  }
}

TEST_P(AllReduce, KeepsTheBitsOfExtrema) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const float tiny = std::numeric_limits<float>::denorm_min();
    const float large = std::numeric_limits<float>::max();
    const auto x = mesh->position() == 0
        ? at::tensor({-0.0f, tiny, -large, -tiny})
        : at::tensor({-1.0f, -tiny, large, 0.0f});
    EXPECT_TRUE(
        at::equal(
            all_reduce(x, Reduce::Max, mesh->group()),
            at::tensor({-0.0f, tiny, large, 0.0f})));
    EXPECT_TRUE(
        at::equal(
            all_reduce(x, Reduce::Min, mesh->group()),
            at::tensor({-1.0f, -tiny, -large, -tiny})));
  });
}

TEST_P(AllReduce, LeavesItsInputAlone) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto x = own(mesh);
    all_reduce(x, Reduce::Sum, mesh->group());
    EXPECT_TRUE(at::equal(x, own(mesh)));
    // Columns of a matrix, and one value seen many times.
    const auto columns = own(mesh).view({2, 2}).t();
    EXPECT_TRUE(
        at::equal(
            all_reduce(columns, Reduce::Sum, mesh->group()),
            times(3).view({2, 2}).t()));
    const auto expanded = at::ones({1}).expand({5});
    EXPECT_TRUE(
        at::equal(
            all_reduce(expanded, Reduce::Sum, mesh->group()),
            at::full({5}, 2.0f)));
  });
}

TEST_P(AllReduce, OfNothingIsNothing) {
  const auto before = collectives_run();
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto y = all_reduce(at::zeros({0, 3}), Reduce::Sum, mesh->group());
    EXPECT_EQ(y.sizes(), at::IntArrayRef({0, 3}));
  });
  EXPECT_EQ(collectives_run(), before);
}

TEST_P(AllReduce, AGroupOfOneReturnsItsInput) {
  run_on_mesh({1}, [](const MeshPtr& mesh) {
    const auto x = own(mesh);
    EXPECT_TRUE(all_reduce(x, Reduce::Avg, mesh->group()).is_same(x));
  });
}

TEST_P(AllReduce, GoesOverTheAxesItIsGiven) {
  run_on_mesh({2, 3}, [](const MeshPtr& mesh) {
    const auto x = at::full({2}, mesh->position(), at::kDouble);
    const auto reduced = [&](std::vector<int64_t> axes) {
      const auto y = all_reduce(x, Reduce::Sum, *mesh, axes);
      return y[1].item<double>();
    };
    const double column = mesh->coordinate(1);
    EXPECT_EQ(reduced({}), mesh->position());
    EXPECT_EQ(reduced({0}), 2 * column + 3);
    EXPECT_EQ(reduced({1}), 9 * mesh->coordinate(0) + 3);
    EXPECT_EQ(reduced({0, 1}), 15);
  });
}

TEST_P(AllReduce, SumsInPlaceOverTheAxesItIsGiven) {
  run_on_mesh({2, 3}, [](const MeshPtr& mesh) {
    for (const auto& axes : {std::vector<int64_t>{1}, {0, 1}}) {
      const auto expected = all_reduce(own(mesh), Reduce::Sum, *mesh, axes);
      const auto x = own(mesh);
      const auto* memory = x.const_data_ptr();
      detail::sum_in_place(x, *mesh, axes);
      EXPECT_TRUE(at::equal(x, expected));
      EXPECT_EQ(x.const_data_ptr(), memory);
    }
  });
}

TEST_P(AllReduce, OverAllAxesIsOneCall) {
  const auto before = collectives_run();
  run_on_mesh({2, 2}, [](const MeshPtr& mesh) {
    all_reduce(at::ones({2}), Reduce::Sum, *mesh, {0, 1});
  });
  EXPECT_EQ(collectives_run() - before, 4); // one on each rank
}

// ---- gradients --------------------------------------------------------------

TEST_P(AllReduce, SumsAndAveragesAreTheirOwnAdjoint) {
  for (const auto reduce : {Reduce::Sum, Reduce::Avg}) {
    run_on_mesh({3}, [&](const MeshPtr& mesh) {
      const auto& group = mesh->group();
      const auto x = at::randn({4}, at::kDouble).set_requires_grad(true);
      const auto gy = at::randn({4}, at::kDouble).set_requires_grad(true);
      const auto gx = gradient(all_reduce(x, reduce, group), x, gy, true);
      EXPECT_TRUE(at::equal(gx, all_reduce(gy, reduce, group)));
      const auto v = at::randn({4}, at::kDouble);
      EXPECT_TRUE(at::equal(gradient(gx, gy, v), all_reduce(v, reduce, group)));
    });
  }
}

TEST_P(AllReduce, ExtremaAndProductsHaveNoGradient) {
  for (const auto reduce : {Reduce::Max, Reduce::Min, Reduce::Prod}) {
    run_on_mesh({2}, [&](const MeshPtr& mesh) {
      const auto x = own(mesh).set_requires_grad(true);
      const auto y = all_reduce(x, reduce, mesh->group());
      EXPECT_THROW(gradient(y, x, at::ones_like(y)), c10::NotImplementedError);
    });
  }
}

// ---- errors -----------------------------------------------------------------

TEST_P(AllReduce, RefusesWhatHasNoMeaning) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto& group = mesh->group();
    EXPECT_THROW(
        all_reduce(own(mesh, at::kLong), Reduce::Avg, group), c10::TypeError);
    EXPECT_THROW(
        all_reduce(own(mesh, at::kBool), Reduce::Avg, group), c10::TypeError);
    EXPECT_THROW(
        all_reduce(own(mesh, at::kComplexFloat), Reduce::Max, group),
        c10::TypeError);
    EXPECT_THROW(all_reduce(own(mesh), Reduce::Sum, "nobody"), c10::ValueError);
  });
}

} // namespace
} // namespace shardtensor
