// The C++ examples of docs/adding_an_op.md, which quotes this file.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "../comm/thread_ranks.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/halo/halo_exchange.h"

namespace {

// ---- somebody's library -----------------------------------------------------

at::Tensor damped(const at::Tensor& x) {
  return x / (1 + x * x);
}
at::Tensor mirrored(const at::Tensor& x) {
  return x.flip(-1);
}
at::Tensor scaled(const at::Tensor& x) {
  return x / x.abs().max();
}
at::Tensor& scaled_(at::Tensor& x) {
  return x.copy_(scaled(x));
}
at::Tensor centred(const at::Tensor& x) {
  return x - x.mean();
}

at::Tensor smoothed(const at::Tensor& x) { // rows, around the ends
  return (x.roll(1, 0) + x + x.roll(-1, 0)) / 3;
}

TORCH_LIBRARY(my_library, m) {
  m.def("damped(Tensor x) -> Tensor");
  m.def("mirrored(Tensor x) -> Tensor");
  m.def("scaled(Tensor x) -> Tensor");
  m.def("scaled_(Tensor(a!) x) -> Tensor(a!)");
  m.def("centred(Tensor x) -> Tensor");
  m.def("smoothed(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(my_library, CompositeExplicitAutograd, m) {
  m.impl("damped", damped);
  m.impl("mirrored", mirrored);
  m.impl("scaled", scaled);
  m.impl("scaled_", scaled_);
}
TORCH_LIBRARY_IMPL(my_library, CompositeImplicitAutograd, m) {
  m.impl("centred", centred);
  m.impl("smoothed", smoothed);
}

// ---- its rules --------------------------------------------------------------

// The last dim is needed whole, all others as they are.
shardtensor::Decision mirrored_rule(shardtensor::Call& call) {
  const auto& given = call.operand(0).spec;
  const auto needed = shardtensor::without_partial(
      shardtensor::without_shard(given, given->dim() - 1));
  return {/*inputs=*/{needed}, /*outputs=*/{needed}, /*arguments=*/{}};
}

void register_rules() {
  shardtensor::register_rule("my_library::damped", shardtensor::pointwise_rule);
  shardtensor::register_rule("my_library::mirrored", mirrored_rule);
}

at::Tensor scaled_kernel(const at::Tensor& given) {
  shardtensor::CommScope scope("my_library::scaled");
  const auto x = shardtensor::local_of(given);
  const auto own = x.tensor.numel() > 0 ? x.tensor.abs().max()
                                        : at::zeros({}, x.tensor.options());
  const auto largest = shardtensor::all_reduce(
      own, shardtensor::Reduce::Max, *x.spec->mesh(), x.spec->sharded_axes());
  return shardtensor::wrap(x.tensor / largest, x.spec);
}

at::Tensor& scaled_in_place_kernel(at::Tensor& x) {
  const auto result = shardtensor::local_of(scaled_kernel(x));
  shardtensor::write_local(x, result.tensor, result.spec);
  return x;
}

TORCH_LIBRARY_IMPL(my_library, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("scaled", scaled_kernel);
  m.impl("scaled_", scaled_in_place_kernel);
}

at::Tensor centred_function(const at::Tensor& given) {
  shardtensor::CommScope scope("my_library::centred");
  const auto layout = shardtensor::without_partial(shardtensor::spec(given));
  const auto x =
      shardtensor::to_local(shardtensor::redistribute(given, layout));
  const auto sum = shardtensor::all_reduce(
      x.sum(),
      shardtensor::Reduce::Sum,
      *layout->mesh(),
      layout->sharded_axes());
  return shardtensor::from_local(x - sum / layout->numel(), layout);
}

TORCH_LIBRARY_IMPL(my_library, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("centred", centred_function);
}

at::Tensor smoothed_function(const at::Tensor& x) {
  const auto rows = shardtensor::halo_exchange(
      x,
      {{/*dim=*/0, /*before=*/1, /*after=*/1}},
      shardtensor::Boundary::Periodic);
  const auto mine =
      rows.slice(0, 0, -2) + rows.slice(0, 1, -1) + rows.slice(0, 2);
  return shardtensor::from_local(mine / 3, shardtensor::spec(x));
}

TORCH_LIBRARY_IMPL(my_library, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("smoothed", smoothed_function);
}

// ---- which work -------------------------------------------------------------

using shardtensor::MeshPtr;
using shardtensor::Placement;
using shardtensor::SpecPtr;

at::Tensor call(const char* op, const at::Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(op, "")
      .typed<at::Tensor(const at::Tensor&)>()
      .call(x);
}

/// What this rank owns of a whole tensor.
at::Tensor piece(const at::Tensor& whole, const SpecPtr& spec) {
  auto result = whole;
  for (const int64_t dim : spec->sharded_dims()) {
    const auto rows = spec->interval(dim);
    result = result.narrow(dim, rows.begin, rows.extent());
  }
  return result.contiguous();
}

void expect_piece(const at::Tensor& actual, const at::Tensor& whole) {
  const auto expected = piece(whole, shardtensor::spec(actual));
  EXPECT_TRUE(shardtensor::to_local(actual).allclose(expected)) << expected;
}

SpecPtr uneven_rows(const MeshPtr& mesh) {
  return shardtensor::make_spec(
      mesh,
      {5, 4},
      {Placement::shard(0)},
      {shardtensor::Partition({4, 1}), std::nullopt});
}

class OwnOperator : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    register_rules();
  }
  const at::Tensor whole = at::arange(20, at::kDouble).reshape({5, 4}) - 7;
};

TEST_F(OwnOperator, JoinsAFamily) {
  shardtensor::testing::run_on_mesh({2}, [&](const MeshPtr& mesh) {
    const auto spec = uneven_rows(mesh);
    const auto x = shardtensor::from_local(piece(whole, spec), spec);
    const auto result = call("my_library::damped", x);
    EXPECT_EQ(shardtensor::spec(result), spec);
    expect_piece(result, damped(whole));
  });
}

TEST_F(OwnOperator, SaysWhichLayoutItNeeds) {
  shardtensor::testing::run_on_mesh({2}, [&](const MeshPtr& mesh) {
    const auto rows = uneven_rows(mesh);
    const auto kept = call(
        "my_library::mirrored",
        shardtensor::from_local(piece(whole, rows), rows));
    EXPECT_EQ(shardtensor::spec(kept), rows);
    expect_piece(kept, mirrored(whole));
    const auto columns =
        shardtensor::make_spec(mesh, {5, 4}, {Placement::shard(1)});
    const auto moved = call(
        "my_library::mirrored",
        shardtensor::from_local(piece(whole, columns), columns));
    EXPECT_TRUE(shardtensor::spec(moved)->is_replicated());
    expect_piece(moved, mirrored(whole));
  });
}

TEST_F(OwnOperator, CommunicatesBelowAutograd) {
  shardtensor::testing::run_on_mesh({2}, [&](const MeshPtr& mesh) {
    const auto spec = uneven_rows(mesh);
    auto x = shardtensor::from_local(piece(whole, spec).clone(), spec);
    const auto result = call("my_library::scaled", x);
    EXPECT_EQ(shardtensor::spec(result), spec);
    expect_piece(result, scaled(whole));
    c10::Dispatcher::singleton()
        .findSchemaOrThrow("my_library::scaled_", "")
        .typed<at::Tensor&(at::Tensor&)>()
        .call(x);
    expect_piece(x, scaled(whole));
  });
}

TEST_F(OwnOperator, CommunicatesAndHasTheRightGradient) {
  const auto reference = whole.clone().requires_grad_();
  const auto weights = at::arange(20, at::kDouble).reshape({5, 4}).square();
  (centred(reference) * weights).sum().backward();
  shardtensor::testing::run_on_mesh({2}, [&](const MeshPtr& mesh) {
    const auto spec = uneven_rows(mesh);
    const auto x =
        shardtensor::from_local(piece(whole, spec), spec).requires_grad_();
    const auto result = call("my_library::centred", x);
    expect_piece(result.detach(), centred(whole));
    const auto weight = shardtensor::from_local(piece(weights, spec), spec);
    (result * weight).sum().backward();
    expect_piece(x.grad(), reference.grad());
  });
}

TEST_F(OwnOperator, SeesItsNeighbours) {
  const auto reference = whole.clone().requires_grad_();
  const auto weights = at::arange(20, at::kDouble).reshape({5, 4}).square();
  (smoothed(reference) * weights).sum().backward();
  shardtensor::testing::run_on_mesh({2}, [&](const MeshPtr& mesh) {
    const auto spec = uneven_rows(mesh);
    const auto x =
        shardtensor::from_local(piece(whole, spec), spec).requires_grad_();
    const auto result = call("my_library::smoothed", x);
    EXPECT_EQ(shardtensor::spec(result), spec);
    expect_piece(result.detach(), smoothed(whole));
    const auto weight = shardtensor::from_local(piece(weights, spec), spec);
    (result * weight).sum().backward();
    expect_piece(x.grad(), reference.grad());
  });
}

} // namespace
