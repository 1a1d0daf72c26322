#include <chrono>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "../gradient.h"
#include "../late_backend.h"
#include "../pieces.h"
#include "../thread_ranks.h"
#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/comm/primitives/exchange_schedule.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/comm/wait.h"

namespace shardtensor::detail {
namespace {

using testing::collectives_run;
using testing::gradient;
using testing::index_filled;
using testing::piece;
using testing::run_on_mesh;

class Exchange : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    Exchange,
    testing::each_backend(),
    testing::backend_name);

// ---- layouts ----------------------------------------------------------------

struct Layouts {
  std::vector<int64_t> mesh;
  std::vector<int64_t> sizes;
  std::vector<Placement> from;
  std::vector<Placement> to;
  ShardSpec::Partitions from_cut = {};
  ShardSpec::Partitions to_cut = {};
};

const auto R = Placement::replicate();
const std::optional<Partition> none;
Placement S(int64_t dim) {
  return Placement::shard(dim);
}

Partition cut(std::vector<int64_t> sizes) {
  return Partition(sizes);
}

/// Even, uneven, empty; gathers, slices, transposes; two mesh axes.
std::vector<Layouts> layouts() {
  return {
      {{1}, {5, 4}, {S(0)}, {R}},
      {{2}, {5, 4}, {S(0)}, {S(1)}},
      {{2}, {5, 4}, {S(0)}, {R}},
      {{2}, {5, 4}, {R}, {S(1)}},
      {{3}, {7, 4}, {S(0)}, {R}, {cut({7, 0, 0}), none}},
      {{3},
       {7, 4},
       {S(0)},
       {S(0)},
       {cut({0, 6, 1}), none},
       {cut({3, 0, 4}), none}},
      {{3},
       {7, 4},
       {S(0)},
       {S(1)},
       {cut({0, 7, 0}), none},
       {none, cut({0, 0, 4})}},
      {{4}, {3, 9}, {S(1)}, {S(0)}},
      {{4}, {0, 9}, {S(1)}, {S(0)}},
      {{2, 2}, {6, 5}, {S(0), S(1)}, {S(1), S(0)}},
      {{2, 2}, {6, 5}, {S(0), S(0)}, {R, S(1)}},
      {{2, 2}, {6, 5}, {S(0), R}, {S(0), S(1)}},
      {{2, 2}, {6, 5}, {R, S(0)}, {R, R}},
      {{2, 3}, {6, 5}, {S(0), S(1)}, {R, R}},
  };
}

struct Moved {
  SpecPtr from;
  SpecPtr to;
  ExchangePlan plan;

  Moved(const Layouts& l, const MeshPtr& mesh)
      : from(make_spec(mesh, l.sizes, l.from, l.from_cut)),
        to(make_spec(mesh, l.sizes, l.to, l.to_cut)),
        plan(plan_redistribute(from, to, mesh->position())) {}
};

/// The sum of a number over the ranks of a mesh.
double total(const at::Tensor& local, const Mesh& mesh) {
  return all_reduce(local.sum(), Reduce::Sum, mesh.group()).item<double>();
}

// ---- values -----------------------------------------------------------------

TEST_P(Exchange, MovesEveryElementToItsPlace) {
  for (const auto& l : layouts()) {
    run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
      const Moved m(l, mesh);
      const auto whole = index_filled(l.sizes, at::kFloat);
      const auto y = exchange(piece(whole, *m.from), m.plan, *mesh);
      EXPECT_TRUE(at::equal(y, piece(whole, *m.to))) << *m.from << *m.to;
    });
  }
}

TEST_P(Exchange, MovesEveryDtype) {
  const Layouts l{{3}, {7, 4}, {S(0)}, {S(1)}, {cut({0, 6, 1}), none}};
  for (const auto dtype :
       {at::kBool,
        at::kByte,
        at::kShort,
        at::kLong,
        at::kHalf,
        at::kBFloat16,
        at::kDouble,
        at::kComplexFloat,
        at::kComplexDouble,
        at::kFloat8_e4m3fn}) {
    run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
      const Moved m(l, mesh);
      const auto whole = (index_filled(l.sizes, at::kFloat) - 9).to(dtype);
      const auto y = exchange(piece(whole, *m.from), m.plan, *mesh);
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_TRUE(
          at::equal(
              y.to(at::kComplexDouble),
              piece(whole, *m.to).to(at::kComplexDouble)))
          << dtype;
    });
  }
}

TEST_P(Exchange, TakesTensorsThatAreNotContiguous) {
  const Layouts l{{2}, {6, 4}, {S(0)}, {S(1)}};
  run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
    const Moved m(l, mesh);
    const auto whole = index_filled(l.sizes, at::kFloat);
    const auto x = piece(whole, *m.from).t().contiguous().t();
    EXPECT_TRUE(at::equal(exchange(x, m.plan, *mesh), piece(whole, *m.to)));
    const auto expanded = at::ones({1, 1}).expand(x.sizes());
    EXPECT_TRUE(
        at::equal(
            exchange(expanded, m.plan, *mesh), at::ones(m.plan.target_sizes)));
  });
}

TEST_P(Exchange, SumsWhatSeveralRanksSend) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const std::vector<int64_t> sizes{7, 2};
    const auto from = make_spec(mesh, sizes, {Placement::partial()});
    const auto to = make_spec(mesh, sizes, {S(0)}, {cut({4, 0, 3}), none});
    const auto plan = plan_redistribute(from, to, mesh->position());
    const auto term = index_filled(sizes, at::kFloat) * (mesh->position() + 1);
    const auto sum = index_filled(sizes, at::kFloat) * 6;
    EXPECT_TRUE(at::equal(exchange(term, plan, *mesh), piece(sum, *to)));
  });
}

/// Note that 1e8 + 1 - 1e8 depends on the order in floats.
TEST_P(Exchange, SumsInRankOrderOnEveryRank) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const std::vector<float> terms{1e8f, 1.0f, -1e8f};
    const auto from = make_spec(mesh, {2}, {Placement::partial()});
    const auto to = make_spec(mesh, {2}, {R});
    const auto plan = plan_redistribute(from, to, mesh->position());
    const auto x = at::full({2}, terms[mesh->position()]);
    const float expected = (terms[0] + terms[1]) + terms[2];
    EXPECT_TRUE(at::equal(exchange(x, plan, *mesh), at::full({2}, expected)));
  });
}

TEST_P(Exchange, LeavesZeroWhereNothingArrives) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto spec = make_spec(mesh, {4}, {S(0)});
    const auto rows = [&](int64_t, int64_t position) {
      return position == 0 ? RowSource{-1, 0, 1, 2} : RowSource{1, 2, 3, -1};
    };
    const auto plan = plan_gather_rows(spec, {0}, rows, mesh->position());
    const auto x = piece(index_filled({4}, at::kFloat), *spec);
    const auto y = exchange(x, plan, *mesh);
    const auto expected = mesh->position() == 0
        ? at::arange(0, 4, at::kFloat)
        : at::arange(2, 6, at::kFloat) * at::arange(2, 6, at::kFloat).lt(5);
    EXPECT_TRUE(at::equal(y, expected)) << y;
  });
}

TEST_P(Exchange, LargeTensorsTakeRoundsAndArriveTheSame) {
  const std::vector<Layouts> large{
      {{3}, {3072, 3072}, {S(0)}, {S(1)}},
      {{4}, {2048, 2048}, {S(0)}, {R}},
      {{3}, {2048, 2048}, {Placement::partial()}, {S(0)}}};
  for (const auto& l : large) {
    const auto before = collectives_run();
    run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
      const Moved m(l, mesh);
      const auto whole = index_filled(l.sizes, at::kFloat);
      const auto terms = m.from->has_partial() ? l.mesh[0] : 1;
      const auto x = m.from->has_partial() ? whole : piece(whole, *m.from);
      const auto y = exchange(x, m.plan, *mesh);
      EXPECT_TRUE(at::equal(y, piece(whole * at::full({}, terms), *m.to)));
    });
    const auto ranks = l.mesh[0];
    EXPECT_EQ(collectives_run() - before, ranks * (ranks - 1));
  }
}

// ---- gradients --------------------------------------------------------------

/// <A x, y> = <x, A* y>, summed over the ranks.
TEST_P(Exchange, TheGradientIsTheAdjoint) {
  for (const auto& l : layouts()) {
    run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
      const Moved m(l, mesh);
      const auto x =
          at::randn(m.plan.source_sizes, at::kDouble).set_requires_grad(true);
      const auto ax = exchange(x, m.plan, *mesh);
      const auto y = at::randn(m.plan.target_sizes, at::kDouble);
      const auto aty = gradient(ax, x, y);
      const double left = total(ax.detach() * y, *mesh);
      const double right = total(x.detach() * aty, *mesh);
      EXPECT_NEAR(left, right, 1e-10) << *m.from << *m.to;
    });
  }
}

TEST_P(Exchange, TheGradientOfTheGradientIsTheExchange) {
  const Layouts l{{3}, {7, 4}, {S(0)}, {R}, {cut({0, 6, 1}), none}};
  run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
    const Moved m(l, mesh);
    const auto x =
        at::randn(m.plan.source_sizes, at::kDouble).set_requires_grad(true);
    const auto gy =
        at::randn(m.plan.target_sizes, at::kDouble).set_requires_grad(true);
    const auto gx = gradient(exchange(x, m.plan, *mesh), x, gy, true);
    const auto v = at::randn(m.plan.source_sizes, at::kDouble);
    const auto ggy = gradient(gx, gy, v);
    EXPECT_TRUE(at::equal(ggy, exchange(v, m.plan, *mesh)));
  });
}

TEST_P(Exchange, AnUndefinedGradientCostsNoMessage) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const Moved m({{2}, {4}, {S(0)}, {R}}, mesh);
    const auto x = at::ones({2}).set_requires_grad(true);
    const auto y = exchange(x, m.plan, *mesh);
    // One rank alone runs its backward: it would wait for ever.
    if (mesh->position() == 0) {
      const auto result = y.grad_fn()->operator()({at::Tensor()});
      EXPECT_FALSE(result[0].defined());
    }
  });
}

// ---- what travels over a queue (NCCL) ---------------------------------------

/// On ranks that a late backend joins; what it counted.
testing::LateCounts counts_of(
    const std::vector<int64_t>& shape,
    const std::function<void(const MeshPtr& mesh)>& body) {
  testing::use_backend(testing::RankBackend::Late);
  testing::reset_late_counts();
  run_on_mesh(shape, body);
  testing::use_backend(testing::RankBackend::Threads);
  return testing::late_counts();
}

/// One row of each neighbour.
void exchange_neighbours(const MeshPtr& mesh) {
  const auto ranks = mesh->ranks();
  const auto spec = make_spec(mesh, {ranks}, {S(0)});
  const auto rows = [&](int64_t, int64_t position) {
    return RowSource{
        position > 0 ? position - 1 : -1,
        position,
        position + 1 < ranks ? position + 1 : -1};
  };
  const auto plan = plan_gather_rows(spec, {0}, rows, mesh->position());
  const auto own = at::full({1}, mesh->position() + 1, at::kFloat);
  const auto y = exchange(own, plan, *mesh);
  const auto p = static_cast<float>(mesh->position());
  EXPECT_EQ(y[0].item<float>(), p);
  EXPECT_EQ(y[2].item<float>(), p + 1 < ranks ? p + 2 : 0);
}

TEST(QueuedExchange, WritesToNeighboursAlone) {
  for (const int64_t ranks : {4, 9}) {
    const auto counts = counts_of({ranks}, [](const MeshPtr& mesh) {
      exchange_neighbours(mesh);
      exchange_neighbours(mesh);
    });
    EXPECT_EQ(counts.sends, 2 * 2 * (ranks - 1)); // twice, to and fro
    EXPECT_EQ(counts.empty_sends, 0);
  }
}

TEST(QueuedExchange, IsNotWaitedForByTheHost) {
  set_communication_timeout(5);
  const auto counts = counts_of({3}, [](const MeshPtr& mesh) {
    exchange_neighbours(mesh);
    exchange_neighbours(mesh);
    total(at::ones({2}), *mesh);
  });
  set_communication_timeout(0);
  EXPECT_GT(counts.works, 0);
  EXPECT_EQ(counts.bounded_waits, 0);
}

TEST(QueuedExchange, AReductionAloneHasNoWork) {
  const auto counts =
      counts_of({2}, [](const MeshPtr& mesh) { total(at::ones({2}), *mesh); });
  EXPECT_EQ(counts.works, 0);
}

TEST(ExchangeSchedule, TakesOneRoundOnADevice) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const Moved m({{3}, {3072, 3072}, {S(0)}, {S(1)}}, mesh);
    const auto code = encode(m.plan, *mesh).code;
    const auto rounds = [&](at::Device device) {
      return ExchangeSchedule(code, 4, false, device).rounds.size();
    };
    EXPECT_EQ(rounds(at::kCPU), 2);
    EXPECT_EQ(rounds(at::kCUDA), 1);
  });
}

/// Two of eight ranks, for one between them.
TEST(ExchangeSchedule, HasNoMoreRoundsThanPeers) {
  run_on_mesh({8}, [](const MeshPtr& mesh) {
    const auto spec = make_spec(mesh, {8, 16 << 20}, {S(0)});
    const auto rows = [](int64_t, int64_t p) {
      const auto before = std::max<int64_t>(p - 1, 0);
      return RowSource{before, p, std::min<int64_t>(p + 1, 7)};
    };
    const auto plan = plan_gather_rows(spec, {0}, rows, mesh->position());
    const ExchangeSchedule schedule(encode(plan, *mesh).code, 4, false);
    EXPECT_EQ(schedule.rounds.size(), 2);
    if (mesh->position() == 3) {
      for (const auto& round : schedule.rounds) {
        EXPECT_EQ(round.sends.pieces.size(), 1);
        EXPECT_EQ(round.receives.pieces.size(), 1);
      }
    }
  });
}

// ---- what a plan costs ------------------------------------------------------

TEST(CommStats, CountWhatThisRankSends) {
  reset_comm_stats();
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const Moved m({{3}, {6}, {S(0)}, {R}, {cut({4, 2, 0})}}, mesh);
    const auto x = at::ones(m.plan.source_sizes, at::kFloat);
    exchange(x, m.plan, *mesh);
  });
  // Of all three ranks together, for they share one process.
  const CommStats stats = comm_stats();
  EXPECT_EQ(stats.exchanges, 2); // rank 2 sends nothing
  EXPECT_EQ(stats.messages, 4);
  EXPECT_EQ(stats.bytes, (2 * 4 + 2 * 2) * 4);
  EXPECT_EQ(stats.all_reduces, 0);
  EXPECT_GT(stats.seconds, 0.0);
}

TEST_P(Exchange, ALocalPlanNeedsNoGroup) {
  ExchangePlan plan;
  plan.source_sizes = {3};
  plan.target_sizes = {2};
  plan.sends = plan.receives = {{0, 0, {{1, 3}}, {{0, 2}}}};
  plan.covers = true;
  const EncodedExchange encoded{encode(plan, 0, {0}), ""};
  EXPECT_TRUE(
      at::equal(
          exchange(at::arange(3, at::kFloat), encoded),
          at::arange(1, 3, at::kFloat)));
}

TEST_P(Exchange, AOneElementTensorMayHaveNoDims) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    ExchangePlan plan;
    const int64_t other = 1 - mesh->position();
    plan.sends = {{mesh->position(), other, {}, {}}};
    plan.receives = {{other, mesh->position(), {}, {}}};
    plan.largest_message = 1;
    const auto x = at::full({}, mesh->position(), at::kFloat);
    EXPECT_EQ(exchange(x, plan, *mesh).item<int64_t>(), other);
  });
}

// ---- errors -----------------------------------------------------------------

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST_P(Exchange, RefusesOtherSizesThanThePlan) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const Moved m({{2}, {4, 2}, {S(0)}, {R}}, mesh);
    const auto text =
        message_of([&] { exchange(at::ones({3, 2}), m.plan, *mesh); });
    EXPECT_NE(
        text.find("the local tensor has sizes [3, 2], the plan expects [2, 2]"),
        std::string::npos)
        << text;
  });
}

TEST_P(Exchange, RefusesACodeThatIsNone) {
  const auto x = at::ones({2});
  EXPECT_THROW(exchange(x, EncodedExchange{{}, ""}), c10::ValueError);
  EXPECT_THROW(exchange(x, EncodedExchange{{0, 0, 3, 9}, ""}), c10::ValueError);
  ExchangePlan plan;
  plan.source_sizes = plan.target_sizes = {2};
  plan.sends = {{0, 0, {{0, 2}}, {{0, 2}}}}; // which nobody receives
  EXPECT_THROW(
      exchange(x, EncodedExchange{encode(plan, 0, {0}), ""}), c10::ValueError);
  plan.sends = plan.receives = {{0, 0, {{1, 3}}, {{0, 2}}}}; // out of bounds
  EXPECT_THROW(
      exchange(x, EncodedExchange{encode(plan, 0, {0}), ""}), c10::ValueError);
}

TEST_P(Exchange, SaysWhichGroupIsMissing) {
  ExchangePlan plan;
  plan.source_sizes = plan.target_sizes = {2};
  plan.largest_message = 2;
  const EncodedExchange encoded{encode(plan, 0, {0, 1}), "nobody"};
  const auto text = message_of([&] { exchange(at::ones({2}), encoded); });
  EXPECT_NE(
      text.find("there is no process group named 'nobody' on this rank"),
      std::string::npos)
      << text;
}

TEST_P(Exchange, AFailureNamesOperatorScopeRankAndGroup) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const Moved m({{2}, {4}, {S(0)}, {R}}, mesh);
    const CommScope scope("aten::conv2d");
    // Rank 1 sends something of another dtype: rank 0 cannot take the bytes.
    const auto x =
        at::ones({2}, mesh->position() == 0 ? at::kFloat : at::kDouble);
    const auto text = message_of([&] { exchange(x, m.plan, *mesh); });
    const auto prefix = c10::str(
        "shardtensor::exchange of a ",
        x.scalar_type(),
        " tensor [2] (elements sent: rank ",
        1 - mesh->position(),
        ": 2; received: rank ",
        1 - mesh->position(),
        ": 2) in aten::conv2d failed on rank ",
        mesh->position(),
        " of 2 in group '",
        mesh->group(m.plan.axis),
        "': ");
    EXPECT_EQ(text.substr(0, prefix.size()), prefix) << text;
  });
}

// ---- the code ---------------------------------------------------------------

TEST(ExchangeCode, KeepsThePlan) {
  ExchangePlan plan;
  plan.source_sizes = {4, 3};
  plan.target_sizes = {5, 3};
  plan.largest_message = 7;
  plan.sends = {
      {1, 1, {{0, 4}, {0, 3}}, {{1, 5}, {0, 3}}},
      {1, 0, {{0, 1}, {0, 3}}, {{4, 5}, {0, 3}}}};
  plan.receives = {
      {1, 1, {{0, 4}, {0, 3}}, {{1, 5}, {0, 3}}},
      {2, 1, {{3, 4}, {0, 3}}, {{0, 1}, {0, 3}}}};
  const auto code = encode(plan, 1, {0, 1, 2});
  const ExchangeCode decoded = decode(code);
  EXPECT_EQ(decoded.rank, 1);
  EXPECT_EQ(decoded.ranks, 3);
  EXPECT_EQ(decoded.largest_message, 7);
  EXPECT_EQ(decoded.source.sizes, c10::IntArrayRef({4, 3}));
  EXPECT_EQ(decoded.target.sizes, c10::IntArrayRef({5, 3}));
  EXPECT_FALSE(decoded.target.starts_at_zero); // the pieces cover it
  EXPECT_FALSE(decoded.source.starts_at_zero);
  ASSERT_EQ(decoded.source.of(0).size(), 1);
  ASSERT_EQ(decoded.source.of(1).size(), 1);
  ASSERT_EQ(decoded.source.of(2).size(), 0);
  ASSERT_EQ(decoded.target.of(2).size(), 1);
  EXPECT_TRUE(decoded.source.of(0)[0].adds); // the rank keeps that row, too
  EXPECT_FALSE(decoded.target.of(2)[0].adds);
  EXPECT_EQ(decoded.target.of(1)[0].begin, c10::IntArrayRef({1, 0}));
  EXPECT_EQ(decoded.target.of(1)[0].extent, c10::IntArrayRef({4, 3}));
  EXPECT_EQ(decoded.target.of(1)[0].numel, 12);
}

TEST(ExchangeCode, RefusesToTurnTooFewIntegers) {
  try {
    adjoint(std::vector<int64_t>{0, 1, 2, 0});
    FAIL() << "expected an error";
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(
        error.what_without_backtrace(),
        "shardtensor::exchange: the code is too short");
  }
}

/// A batch of sequences of which a rank holds every other row: many boxes,
/// all apart.
TEST(ExchangeCode, EncodesThousandsOfBoxesQuickly) {
  ExchangePlan plan;
  plan.source_sizes = plan.target_sizes = {100'000, 2};
  for (int64_t row = 0; row < 100'000; row += 2) {
    const Box box{{row, row + 1}, {0, 2}};
    plan.sends.push_back({0, 0, box, box});
    plan.receives.push_back({0, 0, box, box});
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto code = encode(plan, 0, {0});
  const std::chrono::duration<double> spent =
      std::chrono::steady_clock::now() - begin;
  EXPECT_LT(spent.count(), 5.0); // comparing all pairs takes minutes
  EXPECT_TRUE(decode(code).target.starts_at_zero);
  EXPECT_FALSE(decode(code).target.pieces[1].adds);
}

TEST(ExchangeCode, TheAdjointOfTheAdjointIsTheCode) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const Moved m({{3}, {7, 2}, {S(0)}, {R}}, mesh);
    const auto code = encode(m.plan, *mesh).code;
    EXPECT_NE(adjoint(code), code);
    EXPECT_EQ(adjoint(adjoint(code)), code);
    const auto turned = adjoint(code);
    EXPECT_EQ(decode(turned).source.sizes, decode(code).target.sizes);
  });
}

} // namespace
} // namespace shardtensor::detail
