#include "shardtensor/tensor/constant.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "../layout/support.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::testing {
namespace {

at::Tensor local(const at::Tensor& tensor) {
  return impl_of(tensor)->local();
}

/// Rows cut as [3, 1], seen from position 0.
at::Tensor ones_on(const MeshPtr& mesh, int64_t columns) {
  const auto layout = make_spec(
      mesh, {4, columns}, {Placement::shard(0)}, {Partition({3, 1}), {}});
  return from_local(at::ones({3, columns}), layout);
}

TEST(Constant, HoldsOneNumberAndReadsAsReplicate) {
  const auto mesh = mesh_of({2});
  const auto out = constant(at::full({}, 2.0), mesh, {4, 6});
  EXPECT_EQ(local(out).storage().nbytes(), sizeof(float));
  EXPECT_EQ(spec(out), make_replicated(mesh, {4, 6}));
  EXPECT_TRUE(local(out + 1).equal(at::full({4, 6}, 3.0)));
  EXPECT_EQ(local(out.slice(1, 2)).storage().nbytes(), sizeof(float));
}

TEST(Constant, TakesTheLayoutOfTheFirstValue) {
  const auto mesh = mesh_of({2});
  const auto out = constant(at::zeros({}), mesh, {4, 6});
  const auto part = out.slice(1, 0, 2);
  const auto turned = out.t();
  const auto alias = out.detach();
  part.copy_(ones_on(mesh, 2));

  const auto expected = at::cat({at::ones({3, 2}), at::zeros({3, 4})}, 1);
  EXPECT_EQ(spec(out)->partition(0), Partition({3, 1}));
  EXPECT_TRUE(local(out).equal(expected));
  EXPECT_TRUE(local(part).equal(at::ones({3, 2})));
  EXPECT_TRUE(local(turned).equal(expected.t()));
  EXPECT_EQ(spec(turned)->partition(1), Partition({3, 1}));
  alias.add_(1);
  EXPECT_TRUE(local(out).equal(expected + 1));
}

TEST(Constant, IsReplicateWhenANumberIsWrittenFirst) {
  const auto mesh = mesh_of({2});
  const auto out = constant(at::zeros({}), mesh, {4, 6});
  const auto row = out.select(0, 1);
  row.fill_(5);
  EXPECT_EQ(spec(out), make_replicated(mesh, {4, 6}));
  EXPECT_TRUE(local(out).select(0, 1).equal(at::full({6}, 5.0)));
  EXPECT_TRUE(local(out).select(0, 0).equal(at::zeros({6})));
}

TEST(Constant, IsWhatNewZerosOfOtherSizesGives) {
  const auto mesh = mesh_of({2});
  const auto x = ones_on(mesh, 2);
  EXPECT_EQ(constant_view_of(x.new_zeros({4, 2})), nullptr);
  const auto out = x.new_zeros({4, 5});
  EXPECT_NE(constant_view_of(out), nullptr);
  out.slice(1, 3).add_(x);
  EXPECT_EQ(constant_view_of(out), nullptr);
  EXPECT_EQ(spec(out)->partition(0), Partition({3, 1}));
}

TEST(Constant, IsMadeOfAPlainNumber) {
  expect_error<c10::TypeError>(
      [] { constant(at::zeros({2}), mesh_of({2}), {4}); },
      "constant: expected a plain 0-d tensor, got sizes [2]");
}

} // namespace
} // namespace shardtensor::testing
