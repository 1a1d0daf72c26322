#include "shardtensor/dispatch/rule.h"

#include <atomic>
#include <set>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "../layout/support.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/registry.h"

namespace shardtensor {
namespace {

using testing::mesh_of;

/// Rank 0 of two holds `local` of a tensor cut along `dim` into `sizes`.
at::Tensor rank_zero(
    const at::Tensor& local,
    int64_t dim,
    std::vector<int64_t> sizes) {
  auto global = local.sizes().vec();
  const Partition partition(sizes);
  global[dim] = partition.extent();
  ShardSpec::Partitions partitions(local.dim());
  partitions[dim] = partition;
  return from_local(
      local,
      make_spec(mesh_of({2}), global, {Placement::shard(dim)}, partitions));
}

at::Tensor laid_out(const at::Tensor& local, Placement placement) {
  return from_local(
      local, make_spec(mesh_of({2}), local.sizes().vec(), {placement}));
}

// ---- an operator of another library, with each kind of rule ----------------

at::Tensor twice_kernel(const at::Tensor& x) {
  return x * 2;
}
at::Tensor shifted_kernel(const at::Tensor& x) {
  return x + 1;
}
at::Tensor shifted_function(const at::Tensor& x) {
  return from_local(to_local(x) + 100, spec(x));
}

void scale_kernel(at::Tensor& x, double factor) {
  x.mul_(factor);
}
void add_kernel(at::Tensor& x, const at::Tensor& y) {
  x.add_(y);
}

TORCH_LIBRARY(rule_test, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.def("shifted(Tensor x) -> Tensor");
  m.def("lonely(Tensor x) -> Tensor");
  m.def("by_dtype(Tensor x) -> Tensor");
  m.def("scale_(Tensor(a!) x, float factor) -> ()");
  m.def("add_(Tensor(a!) x, Tensor y) -> ()");
}
TORCH_LIBRARY_IMPL(rule_test, CPU, m) {
  m.impl("twice", twice_kernel);
  m.impl("shifted", shifted_kernel);
  m.impl("lonely", twice_kernel);
  m.impl("by_dtype", twice_kernel);
  m.impl("scale_", scale_kernel);
  m.impl("add_", add_kernel);
}
TORCH_LIBRARY_IMPL(rule_test, Meta, m) {
  m.impl("twice", twice_kernel);
}
TORCH_LIBRARY_IMPL(rule_test, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("shifted", shifted_function);
}

at::Tensor call(const char* op, const at::Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(op, "")
      .typed<at::Tensor(const at::Tensor&)>()
      .call(x);
}

TEST(Rule, AForeignOperatorJoinsAFamily) {
  register_rule("rule_test::twice", pointwise_rule);
  const auto local = at::rand({3, 2});
  const auto result = call("rule_test::twice", rank_zero(local, 0, {3, 1}));
  EXPECT_EQ(result.sizes(), at::IntArrayRef({4, 2}));
  EXPECT_TRUE(to_local(result).equal(local * 2));
}

TEST(Rule, AnOperatorThatReturnsNothingJoinsAFamily) {
  register_rule("rule_test::scale_", pointwise_rule);
  register_rule("rule_test::add_", pointwise_rule);
  const auto find = [](const char* op) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
  };
  const auto local = at::rand({3, 2});
  auto x = rank_zero(local.clone(), 0, {3, 1});
  const auto layout = spec(x);
  find("rule_test::scale_").typed<void(at::Tensor&, double)>().call(x, 3.0);
  EXPECT_TRUE(to_local(x).equal(local * 3));
  const auto row = laid_out(at::rand({1, 2}), Placement::replicate());
  find("rule_test::add_")
      .typed<void(at::Tensor&, const at::Tensor&)>()
      .call(x, row);
  EXPECT_TRUE(to_local(x).equal(local * 3 + to_local(row)));
  EXPECT_EQ(spec(x), layout);
}

// ---- operators that come late
// ------------------------------------------------

std::atomic<int> calls_with_shards{0};

at::Tensor late_kernel(const at::Tensor& x) {
  calls_with_shards += is_shard_tensor(x) ? 1 : 0;
  return x * 2;
}

TEST(Rule, ACallWaitsUntilLateOperatorsAreKnown) {
  constexpr int kOperators = 300;
  const auto x = laid_out(at::ones({4}), Placement::replicate());
  call("rule_test::twice", x); // what came before is known
  torch::Library library(
      torch::Library::DEF, "rule_test_late", std::nullopt, __FILE__, __LINE__);
  for (int i = 0; i < kOperators; ++i) {
    const auto name = "late" + std::to_string(i);
    library.def((name + "(Tensor x) -> Tensor").c_str());
    library.impl(
        name.c_str(),
        torch::dispatch(
            c10::DispatchKey::CompositeExplicitAutograd, late_kernel));
  }
  const auto last = "rule_test_late::late" + std::to_string(kOperators - 1);
  std::atomic<int> waiting{2};
  const auto run = [&] {
    for (--waiting; waiting > 0;) {
    }
    for (int i = 0; i < 20; ++i) {
      call(last.c_str(), x);
    }
  };
  std::thread other(run);
  run();
  other.join();
  EXPECT_EQ(calls_with_shards, 0);
}

TEST(Rule, AForeignOperatorHasAFunctionLevelRule) {
  const auto local = at::rand({3, 2});
  const auto result = call("rule_test::shifted", rank_zero(local, 0, {3, 1}));
  EXPECT_TRUE(to_local(result).equal(local + 100));
}

TEST(Rule, UnknownOperatorsCannotHaveRules) {
  EXPECT_THROW(
      register_rule("rule_test::missing", pointwise_rule), c10::ValueError);
}

/// Truth values are wanted cut, numbers as they are.
Decision by_dtype_rule(Call& call) {
  const auto& x = call.operand(0);
  const auto wanted = x.tensor.scalar_type() == at::kBool
      ? with_placements(x.spec, {Placement::shard(0)})
      : x.spec;
  return {{wanted}, {wanted}, {}};
}

TEST(Rule, TablesLeaveOutWhatThisPyTorchHasNot) {
  EXPECT_NO_THROW(RegisterRules(pointwise_rule, {"aten::rule_test_gone"}));
  auto absent = detail::absent_operators();
  absent.erase("aten::cholesky"); // went with 2.15
  // Any other is misspelt.
  EXPECT_EQ(absent, std::set<std::string>({"aten::rule_test_gone"}));
  EXPECT_THROW(
      RegisterRules(pointwise_rule, {"rule_test::gone"}), c10::ValueError);
}

TEST(Rule, TablesWaitForWhatTheCompilerDefines) {
  const RegisterRules late(pointwise_rule, {"prims::rule_test"});
  torch::Library library(
      torch::Library::FRAGMENT, "prims", std::nullopt, __FILE__, __LINE__);
  library.def("rule_test(Tensor x) -> Tensor");
  library.impl(
      "rule_test",
      torch::dispatch(
          c10::DispatchKey::CompositeExplicitAutograd, twice_kernel));
  const auto local = at::rand({3, 2});
  const auto result = call("prims::rule_test", rank_zero(local, 0, {3, 1}));
  EXPECT_EQ(result.sizes(), at::IntArrayRef({4, 2}));
  EXPECT_TRUE(to_local(result).equal(local * 2));
}

TEST(Rule, DecidesAnewForAnotherDtype) {
  register_rule("rule_test::by_dtype", by_dtype_rule);
  const auto numbers = laid_out(at::ones({4}), Placement::replicate());
  const auto truths =
      laid_out(at::ones({4}, at::kBool), Placement::replicate());
  EXPECT_EQ(spec(numbers), spec(truths));
  EXPECT_EQ(spec(call("rule_test::by_dtype", numbers)), spec(numbers));
  EXPECT_TRUE(spec(call("rule_test::by_dtype", truths))->is_sharded());
}

// ---- layouts of results -----------------------------------------------------

TEST(Pointwise, KeepsAnUnevenPartition) {
  const auto x = rank_zero(at::rand({3, 2}), 0, {3, 1});
  EXPECT_EQ(spec(x.relu()), spec(x));
  EXPECT_EQ(spec(x + x), spec(x));
  EXPECT_EQ(spec(x * 2.0), spec(x));
}

TEST(Pointwise, CutsAReplicatedOperandWithoutMessages) {
  const auto x = rank_zero(at::rand({3, 2}), 0, {3, 1});
  const auto y = laid_out(at::rand({4, 2}), Placement::replicate());
  const auto sum = y + x;
  EXPECT_EQ(spec(sum), spec(x));
  EXPECT_TRUE(
      to_local(sum).allclose(to_local(x) + to_local(y).narrow(0, 0, 3)));
}

TEST(Pointwise, BroadcastsAlongTheShardedDim) {
  const auto x = rank_zero(at::rand({3, 2}), 0, {3, 1});
  const auto row = laid_out(at::rand({1, 2}), Placement::replicate());
  const auto column = laid_out(at::rand({2}), Placement::replicate());
  EXPECT_EQ(spec(x * row), spec(x));
  EXPECT_EQ(spec(column - x), spec(x));
}

TEST(Pointwise, KeepsPartialWhereLinear) {
  const auto x = laid_out(at::rand({4}), Placement::partial());
  const auto y = laid_out(at::rand({4}), Placement::replicate());
  EXPECT_TRUE(spec(x + x)->has_partial());
  EXPECT_TRUE(spec(x * y)->has_partial());
  EXPECT_TRUE(spec(x / 3)->has_partial());
  EXPECT_TRUE(spec(x.neg())->has_partial());
  EXPECT_TRUE(spec(x.clone())->has_partial());
}

TEST(Pointwise, CastsTermsOnlyWhereNothingIsRounded) {
  const auto x = laid_out(at::rand({4}), Placement::partial());
  EXPECT_TRUE(spec(x.to(at::kDouble))->has_partial());
  EXPECT_ANY_THROW(x.to(at::kLong)); // would reduce: no group here
}

TEST(Pointwise, RaisesPyTorchsErrorWithGlobalSizes) {
  const auto x = rank_zero(at::rand({3, 2}), 0, {3, 1});
  const auto y = rank_zero(at::rand({3, 2}), 0, {3, 2});
  try {
    (void)(x + y);
    FAIL() << "expected an error";
  } catch (const c10::Error& error) {
    EXPECT_NE(
        error.msg().find(
            "size of tensor a (4) must match the size of tensor "
            "b (5)"),
        std::string::npos)
        << error.msg();
  }
}

TEST(Pointwise, WorksInPlaceOnTheSameWrapper) {
  auto x = rank_zero(at::ones({3, 2}), 0, {3, 1});
  auto& same = x.add_(1);
  EXPECT_TRUE(same.is_same(x));
  EXPECT_TRUE(to_local(x).eq(2).all().item<bool>());
}

TEST(Sum, OfAShardedDimIsPartial) {
  const auto x = rank_zero(at::ones({3, 2}), 0, {3, 1});
  EXPECT_TRUE(spec(x.sum())->has_partial());
  EXPECT_TRUE(spec(x.sum(0))->has_partial());
  EXPECT_EQ(spec(x.sum(1))->sharded_dims(), std::vector<int64_t>{0});
}

TEST(Mean, DividesByTheGlobalCount) {
  const auto x = rank_zero(at::ones({3, 2}), 0, {3, 1});
  EXPECT_DOUBLE_EQ(to_local(x.mean()).item<double>(), 6.0 / 8.0);
}

TEST(Matmul, ContractsAShardedDimToPartial) {
  const auto x = rank_zero(at::rand({2, 3}), 1, {3, 1});
  const auto w = rank_zero(at::rand({3, 5}), 0, {3, 1});
  const auto y = x.mm(w);
  EXPECT_TRUE(spec(y)->has_partial());
  EXPECT_TRUE(to_local(y).allclose(to_local(x).mm(to_local(w))));
}

TEST(Matmul, CountsABiasOnce) {
  const auto x = rank_zero(at::rand({2, 3}), 1, {3, 1});
  const auto w = rank_zero(at::rand({3, 5}), 0, {3, 1});
  const auto bias = laid_out(at::rand({5}), Placement::replicate());
  const auto y = at::addmm(bias, x, w);
  EXPECT_TRUE(spec(y)->has_partial());
  EXPECT_TRUE(
      to_local(y).allclose(to_local(x).mm(to_local(w)) + to_local(bias)));
}

// ---- modes ------------------------------------------------------------------

TEST(Fallback, RaisesInErrorMode) {
  const auto before = fallback_mode();
  set_fallback_mode(FallbackMode::Error);
  const auto x = rank_zero(at::rand({3, 2}), 0, {3, 1});
  EXPECT_THROW(call("rule_test::lonely", x), c10::NotImplementedError);
  set_fallback_mode(before);
}

TEST(Fallback, ParsesItsModes) {
  EXPECT_EQ(parse_fallback_mode("silent"), FallbackMode::Silent);
  EXPECT_THROW(parse_fallback_mode("loud"), c10::ValueError);
}

TEST(Promotion, ModesHaveNames) {
  for (const auto* name : {"disabled", "warn", "silent"}) {
    EXPECT_STREQ(to_string(parse_promotion_mode(name)), name);
  }
  EXPECT_THROW(parse_promotion_mode("loud"), c10::ValueError);
}

TEST(Promotion, CanBeDisabled) {
  const auto x = rank_zero(at::rand({3, 2}), 0, {3, 1});
  set_promotion_mode(TensorPromotionMode::Disabled);
  EXPECT_THROW((void)(x + at::rand({4, 2})), c10::ValueError);
  EXPECT_NO_THROW((void)(x + 1));
  set_promotion_mode(TensorPromotionMode::Silent);
}

TEST(Promotion, WritesTheWholeValueIntoAPlainTensor) {
  const auto value = at::rand({4, 2});
  const auto x = from_local(value, make_replicated(mesh_of({3}), {4, 2}));
  auto plain = at::ones({4, 2});
  plain.add_(x);
  EXPECT_FALSE(is_shard_tensor(plain));
  EXPECT_TRUE(plain.equal(value + 1));
}

TEST(Meshes, DoNotMix) {
  const auto x = rank_zero(at::rand({3, 2}), 0, {3, 1});
  const auto other =
      from_local(at::rand({4, 2}), make_replicated(mesh_of({3}), {4, 2}));
  EXPECT_THROW((void)(x + other), c10::ValueError);
}

} // namespace
} // namespace shardtensor
