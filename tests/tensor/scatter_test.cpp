#include "shardtensor/tensor/scatter.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "../comm/thread_ranks.h"
#include "../layout/support.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {
namespace {

using testing::run_on_mesh;

TEST(Scatter, EveryRankGetsItsPieceInTheFormatThatItIsTold) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto whole = at::arange(240, at::kDouble)
                           .reshape({2, 4, 6, 5})
                           .contiguous(at::MemoryFormat::ChannelsLast);
    const auto rows = make_spec(mesh, {2, 4, 6, 5}, {Placement::shard(2)});
    for (int64_t source = 0; source < mesh->ranks(); ++source) {
      const auto mine =
          mesh->position() == source ? whole : at::empty({0}, whole.options());
      for (const auto format :
           {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
        const auto x = scatter(mine, source, rows, format);
        EXPECT_EQ(x.strides(), whole.contiguous(format).strides());
        EXPECT_TRUE(full_tensor(x).equal(whole));
      }
    }
  });
}

/// The first line of what this rank's call raises.
template <class E, class Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const E& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  }
  return "no error";
}

TEST(Scatter, WhatOneRankPassesWrongEveryRankRaises) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const auto rank = mesh->position();
    const auto rows = make_spec(mesh, {6}, {Placement::shard(0)});
    const auto x = at::ones({6});
    const auto on_one = " (on rank 1 of group '" + mesh->group() + "')";
    EXPECT_EQ(
        error_of<c10::ValueError>([&] { scatter(at::ones({5}), 1, rows); }),
        "scatter: the source's tensor has sizes [5], expected [6]" + on_one);
    EXPECT_EQ(
        error_of<c10::TypeError>(
            [&] { scatter(rank == 1 ? at::Tensor() : x, 0, rows); }),
        "scatter: got an undefined tensor, expected a plain one, on other ranks "
        "than the source an empty one of its dtype and device" +
            on_one);
    const auto sharded = scatter(x, 0, rows);
    const std::string refused =
        "scatter: expected a plain tensor, got a ShardTensor; use "
        "redistribute()";
    EXPECT_EQ(
        error_of<c10::TypeError>([&] { scatter(sharded, 0, rows); }), refused);
    EXPECT_EQ(
        error_of<c10::TypeError>(
            [&] { scatter(rank == 1 ? sharded : x, 0, rows); }),
        refused + on_one);
    const auto differ = "shardtensor: the ranks of group '" + mesh->group() +
        "' do not make the same call:";
    EXPECT_EQ(
        error_of<c10::ValueError>(
            [&] { scatter(rank == 1 ? x.to(at::kLong) : x, 0, rows); }),
        differ);
    EXPECT_EQ(
        error_of<c10::ValueError>([&] { scatter(x, rank == 1, rows); }),
        differ);
    EXPECT_TRUE(full_tensor(scatter(x, 0, rows)).equal(x)); // all is well
  });
}

} // namespace
} // namespace shardtensor
