#include "shardtensor/tensor/shard_tensor.h"

#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>

#include "../layout/support.h"
#include "shardtensor/tensor/create.h"
#include "shardtensor/tensor/infer_spec.h"
#include "shardtensor/tensor/random.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/scatter.h"

namespace shardtensor {
namespace {

using testing::mesh_of;

/// Rank `position` of two; nothing here communicates.
at::Tensor shard_of(
    const at::Tensor& full,
    int64_t dim,
    Partition partition,
    int64_t position = 0) {
  ShardSpec::Partitions partitions(full.dim());
  const auto rows = partition.interval(position);
  const auto mesh = mesh_of({partition.pieces()}, position);
  partitions[dim] = std::move(partition);
  return from_local(
      full.narrow(dim, rows.begin, rows.extent()).contiguous(),
      make_spec(mesh, full.sizes().vec(), {Placement::shard(dim)}, partitions));
}

TEST(ShardTensor, ShowsGlobalSizesAndHoldsItsShard) {
  const auto full = at::arange(20).view({5, 4});
  const auto tensor = shard_of(full, 0, Partition({4, 1}), 1);
  EXPECT_EQ(tensor.sizes(), full.sizes());
  EXPECT_EQ(tensor.strides(), full.strides());
  EXPECT_TRUE(is_shard_tensor(tensor));
  EXPECT_TRUE(to_local(tensor).equal(full.narrow(0, 4, 1)));
}

TEST(ShardTensor, IsMadeOfNothing) {
  const auto spec = make_spec(
      mesh_of({3}, 1),
      {5, 4},
      {Placement::shard(0)},
      {Partition({4, 1, 0}), {}});
  const std::pair<at::Tensor, at::Tensor> made[] = {
      {zeros(spec, at::kLong), at::zeros({1, 4}, at::kLong)},
      {ones(spec), at::ones({1, 4})},
      {full(spec, 2), at::full({1, 4}, 2)},
      {full(spec, 0.5, at::kHalf), at::full({1, 4}, 0.5, at::kHalf)},
      {empty(spec, at::kBool).zero_(), at::zeros({1, 4}, at::kBool)}};
  for (const auto& [x, piece] : made) {
    EXPECT_EQ(x.sizes(), spec->sizes());
    EXPECT_EQ(x.scalar_type(), piece.scalar_type());
    EXPECT_TRUE(to_local(x).equal(piece));
  }
  const auto terms = make_spec(mesh_of({2}), {3}, {Placement::partial()});
  EXPECT_THROW(zeros(terms), c10::ValueError);
  EXPECT_THROW(empty(nullptr), c10::ValueError);
}

TEST(ShardTensor, HasStridesThatDoNotDependOnTheShard) {
  const auto spec =
      make_spec(mesh_of({2}), {2, 3, 8, 4}, {Placement::shard(2)});
  const auto local =
      at::rand({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto tensor = from_local(local, spec);
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_TRUE(to_local(tensor).is_contiguous(at::MemoryFormat::ChannelsLast));
  const auto last = tensor.contiguous(at::MemoryFormat::ChannelsLast).relu();
  EXPECT_TRUE(last.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_EQ(tensor.transpose(1, 2).stride(1), 4);
}

TEST(ShardTensor, HasNoMemoryToRead) {
  const auto tensor = shard_of(at::rand({4, 2}), 0, Partition({2, 2}));
  EXPECT_THROW(tensor.mutable_data_ptr(), c10::Error);
}

TEST(ShardTensor, SaysThatALayoutIsMissing) {
  const auto tensor = shard_of(at::rand({4, 2}), 0, Partition({2, 2}));
  expect_error<c10::ValueError>(
      [&] { from_local(at::rand({2, 2}), nullptr); },
      "from_local: no spec, expected one");
  expect_error<c10::ValueError>(
      [&] { redistribute(tensor, SpecPtr()); },
      "redistribute: no spec, expected one");
  expect_error<c10::ValueError>(
      [&] { scatter(at::rand({2, 2}), 0, nullptr); },
      "scatter: no spec, expected one");
  expect_error<c10::ValueError>(
      [&] { shardtensor::rand(nullptr); }, "rand: no spec, expected one");
  expect_error<c10::ValueError>(
      [&] { promote(at::rand({2}), nullptr); },
      "promote: no mesh, expected one");
  expect_error<c10::ValueError>(
      [&] { infer_spec(at::rand({2}), nullptr, {Placement::shard(0)}); },
      "infer_spec: no mesh, expected one");
}

TEST(ShardTensor, FromLocalNamesTheSizesItExpects) {
  const auto spec = make_spec(mesh_of({2}), {5, 4}, {Placement::shard(0)});
  try {
    from_local(at::rand({2, 4}), spec);
    FAIL() << "expected an error";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(error.msg().find("sizes [2, 4] but rank 0"), std::string::npos)
        << error.msg();
    EXPECT_NE(error.msg().find("holds [3, 4]"), std::string::npos);
  }
}

TEST(ShardTensor, FromLocalRefusesAShardTensor) {
  const auto tensor = shard_of(at::rand({4, 2}), 0, Partition({2, 2}));
  EXPECT_THROW(from_local(tensor, spec(tensor)), c10::TypeError);
}

TEST(ShardTensor, SpecOfAPlainTensorRaises) {
  EXPECT_THROW(spec(at::rand({2})), c10::TypeError);
}

TEST(ShardTensor, GradientsCrossTheBoundaryShardByShard) {
  const auto local = at::rand({3, 4}, at::kDouble).requires_grad_();
  const auto spec = make_spec(mesh_of({2}), {5, 4}, {Placement::shard(0)});
  const auto back = to_local(from_local(local, spec) * 3);
  const auto grads =
      torch::autograd::grad({back.square().sum()}, {local}, {}, {}, true);
  EXPECT_TRUE(grads[0].allclose(18 * local));
  const auto second = torch::autograd::grad({grads[0].sum()}, {local});
  EXPECT_TRUE(second[0].allclose(at::full_like(local, 18)));
}

TEST(ShardTensor, ToLocalSeesLaterChangesInPlace) {
  // Without a shared version counter this backward would use changed values.
  auto tensor = shard_of(at::rand({4, 2}), 0, Partition({2, 2}));
  const auto weight = at::rand({2, 2}).requires_grad_();
  const auto used = to_local(tensor).mm(weight);
  tensor.add_(1);
  EXPECT_THROW(
      torch::autograd::backward({used.sum()}, {at::ones({})}), c10::Error);
}

TEST(ShardTensor, DataOfAShardTensorCannotBecomePlain) {
  auto tensor = shard_of(at::rand({4, 2}), 0, Partition({2, 2}));
  EXPECT_THROW(tensor.set_data(at::rand({4, 2})), c10::Error);
}

TEST(Redistribute, TermsThatAreAddedCostWhatMoves) {
  const auto mesh = mesh_of({2, 2}, -1); // without groups
  const auto on = [&](Placement first, Placement second) {
    return make_spec(mesh, {8}, {first, second});
  };
  const auto terms = Placement::partial();
  const auto rows = Placement::shard(0);
  const auto whole = Placement();
  const auto cost = [](const SpecPtr& from, const SpecPtr& to) {
    return detail::redistribute_cost(from, to);
  };
  // Each of two pairs hands over half of 8 terms, in both directions.
  EXPECT_EQ(cost(on(terms, whole), on(rows, whole)), 16);
  EXPECT_EQ(cost(on(terms, whole), on(whole, whole)), 16);
  EXPECT_EQ(cost(on(whole, whole), on(rows, whole)), 0);
}

// See Note [Shared memory].
TEST(ShardTensor, DataOfAnotherTensorKeepsTwoOwners) {
  auto tensor = shard_of(at::rand({4, 2}), 0, Partition({2, 2}));
  auto other = shard_of(at::rand({6, 3}), 0, Partition({4, 2}));
  tensor.set_data(other);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({6, 3}));
  EXPECT_TRUE(to_local(tensor).is_alias_of(to_local(other)));
  other.reset();
  EXPECT_EQ(tensor.storage().use_count(), 2u);
  EXPECT_EQ(tensor.storage().nbytes(), 72u);
}

// PyTorch writes what lies behind a storage without asking whether anything
// does.
TEST(ShardTensor, CannotBeSavedAsIfItWerePlain) {
  const auto tensor = shard_of(at::rand({4, 2}), 0, Partition({2, 2}));
  std::ostringstream file;
  try {
    torch::save(tensor, file);
    FAIL() << "nothing was raised";
  } catch (const c10::Error& error) {
    EXPECT_NE(
        error.msg().find("a ShardTensor has no memory of its global sizes"),
        std::string::npos)
        << error.msg();
  }
}

TEST(ShardTensor, PromotedParametersKeepPlainGradients) {
  const auto tensor = shard_of(at::rand({4, 2}), 1, Partition({1, 1}));
  const auto bias = at::rand({4, 1}).requires_grad_();
  const auto out = tensor + promote(bias, spec(tensor)->mesh());
  EXPECT_TRUE(is_shard_tensor(out));
  EXPECT_FALSE(is_shard_tensor(bias));
  EXPECT_EQ(spec(promote(bias, spec(tensor)->mesh()))->is_replicated(), true);
}

TEST(ShardTensor, OneRankRedistributesWithoutMessages) {
  const auto full = at::rand({4, 6});
  const auto tensor = shard_of(full, 0, Partition({4}));
  const auto moved = redistribute(tensor, {Placement::shard(1)});
  EXPECT_EQ(spec(moved)->sharded_dims(), std::vector<int64_t>{1});
  EXPECT_TRUE(full_tensor(moved).equal(full));
}

TEST(ShardTensor, CutsAReplicatedTensorByCopy) {
  const auto full = at::rand({4, 6});
  const auto whole = from_local(full, make_replicated(mesh_of({2}), {4, 6}));
  auto cut = redistribute(whole, {Placement::shard(0)});
  cut.zero_();
  EXPECT_GT(full.abs().sum().item<double>(), 0);
}

} // namespace
} // namespace shardtensor
