// The process groups that DistributedManager makes: MPI's or gloo's.
#include <chrono>
#include <cstdlib>
#include <thread>

#include "support.h"

namespace shardtensor::testing {

namespace {

using Tensors = std::vector<at::Tensor>;

/// The group of all ranks, which each test asks c10d for by name.
c10::intrusive_ptr<c10d::ProcessGroup> world() {
  return c10d::resolve_process_group(manager().group());
}

constexpr auto kReducible = {
    at::kByte,
    at::kChar,
    at::kInt,
    at::kLong,
    at::kHalf,
    at::kBFloat16,
    at::kFloat,
    at::kDouble};

TEST(RanksManager, KnowsItsPlace) {
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  ASSERT_TRUE(rank);
  EXPECT_EQ(manager().rank(), std::atoll(rank));
  EXPECT_EQ(world()->getRank(), manager().rank());
  EXPECT_EQ(world()->getSize(), manager().world_size());
  EXPECT_GE(manager().local_rank(), 0);
  EXPECT_THROW(DistributedManager::initialize(), c10::Error);
}

TEST(RanksManager, GivesEachAxisItsGroup) {
  const int64_t rows = manager().world_size() % 2 == 0 ? 2 : 1;
  const auto mesh = grid(rows);
  EXPECT_EQ(manager().global_mesh(), mesh);
  EXPECT_EQ(mesh->ranks(0), rows);
  for (int64_t axis = 0; axis < 2; ++axis) {
    const auto sum = all_reduce(
        at::full({1}, mesh->position(), at::kLong), Reduce::Sum, *mesh, {axis});
    int64_t expected = 0;
    for (int64_t i = 0; i < mesh->ranks(axis); ++i) {
      expected += mesh->with_coordinate(mesh->position(), axis, i);
    }
    EXPECT_EQ(sum.item<int64_t>(), expected);
    const auto line = manager().mesh(mesh->axis_name(axis));
    EXPECT_EQ(line->ranks(), mesh->ranks(axis));
    EXPECT_EQ(line->position(), mesh->coordinate(axis));
    EXPECT_EQ(line->group(), mesh->group(axis));
  }
  EXPECT_THROW(manager().mesh("time"), c10::ValueError);
}

TEST(RanksManager, RefusesMeshesThatDoNotFit) {
  auto& job = manager();
  const auto ranks = job.world_size();
  EXPECT_THROW(job.initialize_mesh({ranks + 1}, {"a"}), c10::ValueError);
  EXPECT_THROW(job.initialize_mesh({-1, -1}, {"a", "b"}), c10::ValueError);
  EXPECT_THROW(job.initialize_mesh({-1}, {}), c10::ValueError);
  EXPECT_THROW(job.initialize_mesh({1, -1}, {"a", "a"}), c10::ValueError);
}

TEST(RanksPeers, ReducesEveryDtype) {
  const auto ranks = manager().world_size();
  for (const auto dtype : kReducible) {
    for (const auto& [reduce, expected] :
         std::vector<std::pair<c10d::ReduceOp, int64_t>>{
             {c10d::ReduceOp::SUM, ranks * (ranks + 1) / 2},
             {c10d::ReduceOp::MAX, ranks},
             {c10d::ReduceOp::MIN, 1}}) {
      Tensors x{at::full({3, 2}, manager().rank() + 1, dtype)};
      c10d::AllreduceOptions options;
      options.reduceOp = reduce;
      world()->allreduce(x, options)->wait();
      EXPECT_TRUE(x[0].equal(at::full({3, 2}, expected, dtype)))
          << dtype << x[0];
    }
  }
}

TEST(MpiPeers, ReducesTensorsThatAreNotContiguous) {
  const auto whole = at::arange(6, at::kDouble).reshape({2, 3});
  Tensors x{whole.clone().t()};
  world()->allreduce(x)->wait();
  expect_close(x[0], whole.t() * manager().world_size());
}

TEST(RanksGroup, ReducesLargeTensorsInParts) {
  const auto ranks = manager().world_size();
  const auto x = numbered({1001, 37}); // more than 16 KiB
  const auto sum =
      all_reduce(x * (manager().rank() + 1), Reduce::Sum, manager().group());
  expect_close(sum, x * (ranks * (ranks + 1) / 2));
}

TEST(RanksPeers, ExchangesUnevenPieces) {
  const auto me = manager().rank();
  const auto ranks = manager().world_size();
  // Rank r sends r + p numbers to rank p.
  std::vector<int64_t> sends, receives;
  Tensors sent, expected;
  for (int64_t p = 0; p < ranks; ++p) {
    sends.push_back(me + p);
    receives.push_back(me + p);
    sent.push_back(at::full({me + p}, 10 * me + p, at::kLong));
    expected.push_back(at::full({me + p}, 10 * p + me, at::kLong));
  }
  auto in = at::cat(sent);
  auto out = at::empty_like(at::cat(expected));
  world()
      ->getBackend(c10::DeviceType::CPU)
      ->alltoall_base(out, in, receives, sends)
      ->wait();
  EXPECT_TRUE(out.equal(at::cat(expected))) << out;
}

TEST(RanksPeers, BroadcastsGathersAndScatters) {
  const auto me = manager().rank();
  const auto ranks = manager().world_size();
  const auto mine = at::full({2}, me, at::kFloat);
  for (int64_t root = 0; root < ranks; ++root) {
    Tensors x{mine.clone()};
    c10d::BroadcastOptions broadcast;
    broadcast.rootRank = root;
    world()->broadcast(x, broadcast)->wait();
    EXPECT_TRUE(x[0].equal(at::full({2}, root, at::kFloat)));

    std::vector<Tensors> rows(me == root ? 1 : 0);
    for (int64_t p = 0; me == root && p < ranks; ++p) {
      rows[0].push_back(at::empty({2}));
    }
    Tensors input{mine};
    c10d::GatherOptions gather;
    gather.rootRank = root;
    world()->gather(rows, input, gather)->wait();
    for (int64_t p = 0; me == root && p < ranks; ++p) {
      EXPECT_TRUE(rows[0][p].equal(at::full({2}, p, at::kFloat)));
    }

    Tensors output{at::empty({2})};
    c10d::ScatterOptions scatter;
    scatter.rootRank = root;
    world()->scatter(output, rows, scatter)->wait();
    EXPECT_TRUE(output[0].equal(mine)) << output[0];
  }
  std::vector<Tensors> all{at::empty({ranks, 2}).unbind(0)};
  Tensors input{mine};
  world()->allgather(all, input)->wait();
  EXPECT_TRUE(
      at::stack(all[0]).equal(
          at::arange(ranks, at::kFloat).unsqueeze(1).expand({ranks, 2})));
  world()->barrier()->wait();
}

TEST(MpiPeers, ReducesToOneRankAndInParts) {
  const auto backend = world()->getBackend(c10::DeviceType::CPU);
  const auto me = manager().rank();
  const auto ranks = manager().world_size();
  const auto total = static_cast<double>(ranks * (ranks + 1) / 2);
  const auto mine = at::full({2, 3}, me + 1, at::kDouble);
  c10d::ReduceOptions to_last;
  to_last.rootRank = ranks - 1;
  Tensors x{mine.clone()};
  backend->reduce(x, to_last)->wait();
  expect_close(x[0], me == ranks - 1 ? at::full_like(mine, total) : mine);

  c10d::ReduceScatterOptions average;
  average.reduceOp = c10d::ReduceOp::AVG;
  const auto rows = at::arange(ranks, at::kDouble).unsqueeze(1).expand({-1, 3});
  auto input = (rows + me).contiguous();
  auto output = at::empty({1, 3}, at::kDouble);
  backend->_reduce_scatter_base(output, input, average)->wait();
  const auto expected = rows.narrow(0, me, 1) + total / ranks - 1;
  expect_close(output, expected);
  Tensors outputs{at::empty({3, 1}, at::kDouble).t()}, inputs{input};
  backend->reduce_scatter_tensor_coalesced(outputs, inputs, average)->wait();
  expect_close(outputs[0], expected);
  std::vector<Tensors> lists{input.split(1)};
  outputs[0].zero_();
  backend->reduce_scatter(outputs, lists, average)->wait();
  expect_close(outputs[0], expected);
}

TEST(MpiPeers, GathersAndExchangesFlatTensors) {
  const auto backend = world()->getBackend(c10::DeviceType::CPU);
  const auto me = manager().rank();
  const auto ranks = manager().world_size();
  const auto numbers = at::arange(ranks, at::kFloat);
  const auto expected = numbers.unsqueeze(1).expand({ranks, 2});
  auto row = at::full({2}, me, at::kFloat);
  auto rows = at::empty({ranks, 2});
  backend->_allgather_base(rows, row, {})->wait();
  expect_close(rows, expected);
  Tensors outputs{at::empty({2, ranks}).t()}, inputs{row};
  backend->allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
  expect_close(outputs[0], expected);
  Tensors received = at::empty({ranks, 1}).unbind(0);
  Tensors sent = (10 * me + numbers).unsqueeze(1).unbind(0);
  backend->alltoall(received, sent, {})->wait();
  expect_close(at::cat(received), 10 * numbers + me);
}

/// Large enough for a second half.
Tensors large(double value) {
  return {at::full({9000}, value, at::kFloat)};
}

TEST(MpiPeers, KeepsApartCallsOfWhichARankPolledOne) {
  const auto ranks = static_cast<double>(manager().world_size());
  auto first = large(1), second = large(7);
  const auto work = world()->allreduce(first);
  while (manager().rank() == 0 && !work->isCompleted()) {
  }
  const auto next = world()->allreduce(second);
  work->wait();
  next->wait();
  expect_close(first[0], large(ranks)[0]);
  expect_close(second[0], large(7 * ranks)[0]);
}

TEST(MpiPeers, BoundsAWaitAndNotTheTimeBeforeIt) {
  auto x = large(1);
  c10d::AllreduceOptions options;
  options.timeout = std::chrono::seconds(1);
  const auto work = world()->allreduce(x, options);
  std::this_thread::sleep_for(2 * options.timeout);
  work->wait();
  expect_close(x[0], large(static_cast<double>(manager().world_size()))[0]);
}

TEST(MpiPeers, GivesAFutureOfItsResults) {
  const auto ranks = static_cast<double>(manager().world_size());
  Tensors both{at::ones({2}), at::ones({5000})};
  const auto future = world()->allreduce_coalesced(both)->getFuture();
  ASSERT_TRUE(future->completed());
  const auto results = future->value().toTensorVector();
  ASSERT_EQ(results.size(), 2);
  expect_close(results[1], at::full({5000}, ranks, at::kFloat));
}

TEST(RanksPeers, TellsMessagesApartByTag) {
  const auto me = manager().rank();
  const auto ranks = manager().world_size();
  const auto next = static_cast<int>((me + 1) % ranks);
  const auto previous = static_cast<int>((me + ranks - 1) % ranks);
  Tensors first{at::full({4}, 10 * me + 1, at::kFloat)},
      second{at::full({4}, 10 * me + 2, at::kFloat)};
  Tensors got_first{at::empty({4})}, got_second{at::empty({4})};
  const auto sends = {
      world()->send(first, next, 1), world()->send(second, next, 2)};
  world()->recv(got_second, previous, 2)->wait();
  world()->recv(got_first, previous, 1)->wait();
  for (const auto& send : sends) {
    send->wait();
  }
  EXPECT_TRUE(got_first[0].equal(at::full({4}, 10 * previous + 1, at::kFloat)));
  EXPECT_TRUE(
      got_second[0].equal(at::full({4}, 10 * previous + 2, at::kFloat)));
}

TEST(MpiPeers, RefusesCallsThatMakeNoSense) {
  const auto backend = world()->getBackend(c10::DeviceType::CPU);
  const auto expect = [](const std::string& text, const auto& call) {
    const auto error = error_of<c10::Error>(call);
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  Tensors two{at::ones({2}), at::ones({2})}, one{at::ones({2})};
  expect("of 2 tensors, expected 1", [&] { backend->allreduce(two); });
  Tensors meta{at::ones({2}, at::device(at::kMeta))};
  expect("of a Strided tensor on meta, expected a dense one with memory", [&] {
    backend->allreduce(meta);
  });
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::BAND;
  expect("allreduce knows sum, avg, product, max and min only", [&] {
    backend->allreduce(one, options);
  });
  options.reduceOp = c10d::ReduceOp::AVG;
  Tensors integers{at::ones({2}, at::kInt)};
  expect("(avg) of a Int tensor, expected a floating-point", [&] {
    backend->allreduce(integers, options);
  });
  c10d::BroadcastOptions nowhere;
  nowhere.rootRank = manager().world_size();
  expect(
      "expected one of the group's", [&] { backend->broadcast(one, nowhere); });
  std::vector<Tensors> few{Tensors{}};
  expect("one per rank", [&] { backend->allgather(few, one); });
  few.clear();
  expect("of 0 lists of tensors, expected 1", [&] {
    backend->allgather(few, one);
  });
  auto odd = at::empty({2 * manager().world_size() + 1});
  expect("expected one row for each of the", [&] {
    backend->_allgather_base(odd, one[0], {});
  });
  std::vector<int64_t> splits(manager().world_size(), 3);
  expect("parts that add up to its first dim", [&] {
    backend->alltoall_base(one[0], one[0], splits, splits);
  });
}

TEST(RanksPeers, CheckModeNamesCallsThatDiffer) {
  set_check_mode(true);
  const auto x = at::ones({manager().rank() == 0 ? 2 : 3});
  const auto text = error_of<c10::Error>(
      [&] { all_reduce(x, Reduce::Sum, manager().group()); });
  set_check_mode(false);
  EXPECT_NE(text.find("do not make the same call"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
}

} // namespace

} // namespace shardtensor::testing
