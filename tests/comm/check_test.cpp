#include <chrono>
#include <cmath>
#include <functional>
#include <string>

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "shardtensor/collectives/collectives_v.h"
#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "thread_ranks.h"

namespace shardtensor {
namespace {

using namespace detail;
using testing::run_on_mesh;

class CheckMode : public ::testing::Test {
 protected:
  void SetUp() override {
    set_check_mode(true);
  }
  void TearDown() override {
    set_check_mode(false);
  }
};

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(CheckMode, LetsEqualCallsPass) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto x = at::ones({mesh->position()});
    const auto y = all_gather_v(x, 0, {0, 1, 2}, mesh->group());
    EXPECT_TRUE(at::equal(y, at::ones({3})));
    EXPECT_TRUE(
        at::equal(
            all_reduce(y, Reduce::Sum, mesh->group()), at::full({3}, 3.0f)));
  });
}

TEST_F(CheckMode, ListsTheCallsOfAllRanksWhenShapesDiffer) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const CommScope scope("aten::sum");
    const auto text = message_of([&] {
      all_reduce(at::ones({2 + mesh->position()}), Reduce::Sum, mesh->group());
    });
    expect_contains(text, "do not make the same call");
    expect_contains(
        text,
        "rank 0: shardtensor::all_reduce (sum) of a Float tensor [2] in "
        "aten::sum");
    expect_contains(
        text,
        "rank 1: shardtensor::all_reduce (sum) of a Float tensor [3] in "
        "aten::sum");
  });
}

TEST_F(CheckMode, SeesDifferentDtypesReductionsAndScopes) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const bool first = mesh->position() == 0;
    const auto& group = mesh->group();
    const auto x = at::ones({2});
    expect_contains(
        message_of([&] {
          all_reduce(first ? x : x.to(at::kDouble), Reduce::Sum, group);
        }),
        "rank 1: shardtensor::all_reduce (sum) of a Double tensor");
    expect_contains(
        message_of(
            [&] { all_reduce(x, first ? Reduce::Sum : Reduce::Max, group); }),
        "rank 1: shardtensor::all_reduce (max)");
    expect_contains(
        message_of([&] {
          const CommScope scope(first ? "aten::sum" : "aten::mean");
          all_reduce(x, Reduce::Sum, group);
        }),
        "rank 1: shardtensor::all_reduce (sum) of a Float tensor [2] in "
        "aten::mean");
  });
}

TEST_F(CheckMode, SeesAnotherOperator) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto text = message_of([&] {
      const auto x = at::ones({2});
      if (mesh->position() == 0) {
        all_reduce(x, Reduce::Sum, mesh->group());
      } else {
        all_gather_rows(x, 0, {2, 2}, mesh->group());
      }
    });
    expect_contains(text, "rank 0: shardtensor::all_reduce");
    expect_contains(text, "rank 1: shardtensor::exchange");
  });
}

TEST_F(CheckMode, SeesThatAPeerExpectsAnotherNumberOfElements) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    // Both call all_to_all_rows alike, but rank 1 expects 3 rows, not 2.
    const auto text = message_of([&] {
      if (mesh->position() == 0) {
        all_to_all_rows(at::ones({2}), 0, {0, 2}, {0, 1}, mesh->group());
      } else {
        all_to_all_rows(at::ones({1}), 0, {1, 0}, {3, 0}, mesh->group());
      }
    });
    expect_contains(
        text,
        "rank 0: shardtensor::exchange of a Float tensor (elements sent: rank "
        "1: 2; received: rank 1: 1)");
    expect_contains(text, "(elements sent: rank 0: 1; received: rank 0: 3)");
  });
}

TEST_F(CheckMode, CoversBackward) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto leaf = [] { return at::ones({2}).set_requires_grad(true); };
    const auto a = leaf();
    const auto b = leaf();
    std::vector<at::Tensor> y;
    {
      const CommScope scope("first");
      y.push_back(all_reduce(a, Reduce::Sum, mesh->group()));
    }
    {
      const CommScope scope("second");
      y.push_back(all_reduce(b, Reduce::Sum, mesh->group()));
    }
    // Without the check, the two messages would be taken for each other.
    const auto text = message_of([&] {
      const bool is_first = mesh->position() == 0;
      torch::autograd::grad(
          {y[is_first ? 0 : 1]}, {is_first ? a : b}, {at::ones({2})});
    });
    expect_contains(text, "tensor [2] in the backward of first");
    expect_contains(text, "tensor [2] in the backward of second");
  });
}

TEST(CommScope, NamesTheInnermostAndRestoresTheOuter) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto failure = [&] {
      return message_of([&] {
        const auto x =
            at::ones({2}, mesh->position() == 0 ? at::kFloat : at::kDouble);
        all_gather_rows(x, 0, {2, 2}, mesh->group());
      });
    };
    const CommScope outer("outer");
    {
      const CommScope inner("inner");
      expect_contains(failure(), " in inner failed on ");
    }
    expect_contains(failure(), " in outer failed on ");
  });
}

TEST(CommunicationTimeout, RefusesWhatIsNoNumberOfSeconds) {
  for (const double wrong : {-1.0, 1e300, HUGE_VAL, std::nan("")}) {
    EXPECT_THROW(set_communication_timeout(wrong), c10::ValueError) << wrong;
  }
  set_communication_timeout(1e-6); // 0 would be no limit
  EXPECT_EQ(communication_timeout(), std::chrono::milliseconds(1));
  set_communication_timeout(0);
}

} // namespace
} // namespace shardtensor
