#include "shardtensor/tensor/infer_spec.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "../comm/thread_ranks.h"
#include "../layout/support.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {
namespace {

using testing::expect_error;
using testing::run_on_mesh;

TEST(InferSpec, RanksTellEachOtherTheirSizes) {
  run_on_mesh({2, 2}, [](const MeshPtr& mesh) {
    const int64_t row = mesh->coordinate(0);
    const int64_t column = mesh->coordinate(1);
    const auto local = at::zeros({row == 0 ? 5 : 0, column == 0 ? 1 : 2});
    const auto spec =
        infer_spec(local, mesh, {Placement::shard(0), Placement::shard(-1)});
    const auto whole = from_local(local, spec);
    EXPECT_EQ(whole.sizes(), at::IntArrayRef({5, 3}));
    EXPECT_EQ(spec->partition(0), Partition({5, 0}));
    EXPECT_EQ(spec->partition(1), Partition({1, 2}));
  });
}

TEST(InferSpec, EveryRankRaisesWhereTheyDiffer) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const int64_t rank = mesh->position();
    const auto rows = Placement::shard(0);
    const auto x = at::zeros({2, 3});
    EXPECT_THROW(
        infer_spec(at::zeros({2, rank == 1 ? 4 : 3}), mesh, {rows}),
        c10::ValueError);
    EXPECT_THROW(
        infer_spec(rank == 2 ? at::zeros({2}) : x, mesh, {rows}),
        c10::ValueError);
    EXPECT_THROW(
        infer_spec(rank == 0 ? x.to(at::kHalf) : x, mesh, {rows}),
        c10::ValueError);
    EXPECT_THROW(
        infer_spec(x, mesh, {rank == 1 ? Placement::replicate() : rows}),
        c10::ValueError);
    EXPECT_THROW(
        infer_spec(
            at::zeros(std::vector<int64_t>(rank == 1 ? 31 : 2, 1)),
            mesh,
            {rows}),
        c10::ValueError);
    EXPECT_THROW(infer_spec(x, mesh, {Placement::shard(2)}), c10::IndexError);
    expect_error<c10::TypeError>(
        [&] { infer_spec(rank == 1 ? at::Tensor() : x, mesh, {rows}); },
        "infer_spec: expected a tensor, got an undefined one (on rank 1 of "
        "group '" +
            mesh->group() + "')");
    EXPECT_THROW(
        infer_spec(x, mesh, {rows}, rank == 2 ? ", otherwise" : ""),
        c10::ValueError);
    expect_error<c10::IndexError>(
        [&] {
          if (rank == 0) {
            raise_in_infer_spec(mesh, "IndexError", "no such row");
          }
          infer_spec(x, mesh, {rows});
        },
        "no such row (on rank 0 of group '" + mesh->group() + "')");
  });
}

TEST(InferSpec, NeedsARankOfTheMesh) {
  expect_error<c10::ValueError>(
      [] {
        infer_spec(
            at::zeros({2}), testing::mesh_of({2}, -1), {Placement::shard(0)});
      },
      "infer_spec: this rank is none of Mesh(2), whose ranks alone know their "
      "sizes");
}

} // namespace
} // namespace shardtensor
