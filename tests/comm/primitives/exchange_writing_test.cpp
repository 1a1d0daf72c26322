#include <algorithm>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "shardtensor/comm/primitives/exchange_writing.h"

namespace shardtensor::detail {
namespace {

/// Boxes of a side, by peer.
struct Side {
  std::vector<int64_t> sizes;
  std::vector<int64_t> peers;
  std::vector<Box> boxes;

  std::vector<BoxOfPeer> entries() const {
    std::vector<BoxOfPeer> result;
    for (size_t i = 0; i < boxes.size(); ++i) {
      result.push_back({peers[i], &boxes[i]});
    }
    return result;
  }
};

template <class Visit>
void for_each_element(const Side& side, const Box& box, const Visit& visit) {
  for (int64_t i = box[0].begin; i < box[0].end; ++i) {
    for (int64_t j = box[1].begin; j < box[1].end; ++j) {
      visit(i * side.sizes[1] + j);
    }
  }
}

/// What a target becomes whose memory was NaN, when box i holds i + 1 and is
/// written as planned.
std::vector<double> written(const Side& side, int64_t rank, bool in_order) {
  auto entries = side.entries();
  const Writing writing = plan_writing(entries, rank, side.sizes);
  EXPECT_TRUE(writing.in_rank_order || !in_order);
  const double unwritten =
      writing.starts_at_zero ? 0 : std::numeric_limits<double>::quiet_NaN();
  std::vector<double> target(side.sizes[0] * side.sizes[1], unwritten);
  const auto write = [&](bool own) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!writing.in_rank_order && (entries[i].peer == rank) != own) {
        continue;
      }
      for_each_element(side, side.boxes[i], [&](int64_t at) {
        target[at] = (entries[i].adds ? target[at] : 0) + double(i + 1);
      });
    }
  };
  write(true);
  if (!writing.in_rank_order) {
    write(false);
  }
  return target;
}

std::vector<double> summed(const Side& side) {
  std::vector<double> target(side.sizes[0] * side.sizes[1], 0);
  for (size_t i = 0; i < side.boxes.size(); ++i) {
    for_each_element(
        side, side.boxes[i], [&](int64_t at) { target[at] += double(i + 1); });
  }
  return target;
}

/// Two peers that are not `rank` write one element.
bool needs_order(const Side& side, int64_t rank) {
  std::vector<std::pair<int64_t, int64_t>> writers(
      side.sizes[0] * side.sizes[1], {-1, -1});
  bool needs = false;
  for (size_t i = 0; i < side.boxes.size(); ++i) {
    for_each_element(side, side.boxes[i], [&](int64_t at) {
      const int64_t peer = side.peers[i];
      if (peer != rank) {
        needs |= writers[at].first >= 0 && writers[at].first != peer;
        writers[at].first = peer;
      }
    });
  }
  return needs;
}

Side random_side(size_t count, std::mt19937& random) {
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  };
  Side side{{below(12) + 1, below(12) + 1}, {}, {}};
  for (size_t i = 0; i < count; ++i) {
    Box box;
    for (const int64_t size : side.sizes) {
      const int64_t begin = below(size);
      box.push_back({begin, begin + 1 + below(size - begin)});
    }
    side.boxes.push_back(box);
    side.peers.push_back(below(5));
  }
  std::sort(side.peers.begin(), side.peers.end());
  return side;
}

TEST(PlanWriting, SumsWhatSeveralWriteInTheOrderOfRanks) {
  std::mt19937 random(0);
  for (int trial = 0; trial < 500; ++trial) {
    const Side side = random_side(trial % 12, random);
    const int64_t rank = trial % 5;
    ASSERT_EQ(written(side, rank, needs_order(side, rank)), summed(side));
  }
}

TEST(PlanWriting, SumsVeryManyBoxesToo) {
  std::mt19937 random(0);
  for (int trial = 0; trial < 20; ++trial) {
    const Side side = random_side(200, random);
    ASSERT_EQ(written(side, 2, needs_order(side, 2)), summed(side));
  }
}

TEST(PlanWriting, ARowForThousandsIsOneWriteAndAdds) {
  constexpr size_t kRanks = 16384;
  Side side{{4, 2}, {}, std::vector<Box>(kRanks, {{0, 4}, {0, 2}})};
  for (size_t rank = 0; rank < kRanks; ++rank) {
    side.peers.push_back(rank);
  }
  auto entries = side.entries();
  const Writing writing = plan_writing(entries, 7, side.sizes);
  EXPECT_TRUE(writing.in_rank_order);
  EXPECT_FALSE(writing.starts_at_zero);
  EXPECT_EQ(
      std::count_if(
          entries.begin(),
          entries.end(),
          [](const BoxOfPeer& box) { return box.adds; }),
      kRanks - 1);
  EXPECT_FALSE(entries[0].adds);
}

TEST(PlanWriting, ThousandsOfTilesAddNothing) {
  constexpr int64_t kEdge = 128;
  Side side{{2 * kEdge, kEdge}, {}, {}};
  for (int64_t tile = 0; tile < kEdge * kEdge; ++tile) {
    const int64_t row = 2 * (tile / kEdge);
    const int64_t column = tile % kEdge;
    side.boxes.push_back({{row, row + 2}, {column, column + 1}});
    side.peers.push_back(tile);
  }
  auto entries = side.entries();
  const Writing writing = plan_writing(entries, 7, side.sizes);
  EXPECT_FALSE(writing.in_rank_order || writing.starts_at_zero);
  for (const BoxOfPeer& entry : entries) {
    ASSERT_FALSE(entry.adds);
  }
}

} // namespace
} // namespace shardtensor::detail
