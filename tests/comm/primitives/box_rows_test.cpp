#include "shardtensor/comm/primitives/box_rows.h"

#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

using Numbers = std::vector<int64_t>;

struct Boxes {
  Numbers sizes;
  std::vector<Numbers> begins;
  std::vector<Numbers> extents;
};

std::vector<MessageBox> boxes_of(const Boxes& c) {
  std::vector<MessageBox> boxes;
  for (size_t i = 0; i < c.begins.size(); ++i) {
    MessageBox box;
    box.begin = c.begins[i];
    box.extent = c.extents[i];
    box.numel = c10::multiply_integers(c.extents[i]);
    boxes.push_back(box);
  }
  return boxes;
}

/// The elements of the boxes, counted by hand.
Numbers elements_of(const Boxes& c) {
  Numbers elements;
  for (size_t i = 0; i < c.begins.size(); ++i) {
    Numbers at(c.sizes.size(), 0);
    while (at[0] < c.extents[i][0]) {
      int64_t element = 0;
      for (size_t dim = 0; dim < at.size(); ++dim) {
        element = element * c.sizes[dim] + c.begins[i][dim] + at[dim];
      }
      elements.push_back(element);
      auto dim = static_cast<int64_t>(at.size()) - 1;
      while (++at[dim] == c.extents[i][dim] && dim > 0) {
        at[dim--] = 0;
      }
    }
  }
  return elements;
}

TEST(BoxRows, AreTheElementsOfTheBoxesInOrder) {
  const std::vector<Boxes> cases{
      {{4, 6}, {{1, 0}, {3, 0}}, {{1, 4}, {1, 4}}},
      {{4, 6}, {{1, 0}, {3, 0}}, {{1, 6}, {1, 6}}},
      {{8, 3, 2}, {{0, 0, 0}, {4, 0, 0}}, {{2, 3, 2}, {2, 3, 2}}},
      {{2, 9, 5, 4},
       {{0, 3, 0, 0}, {0, 6, 0, 0}},
       {{2, 3, 5, 4}, {1, 3, 5, 4}}},
      {{2, 3, 5}, {{0, 1, 2}, {1, 0, 0}}, {{1, 2, 3}, {1, 1, 5}}},
      {{3, 4}, {{0, 0}, {0, 0}}, {{3, 4}, {3, 4}}},
      {{7}, {{3}, {0}, {3}}, {{2}, {1}, {1}}}};
  for (const auto& c : cases) {
    const auto found = rows_of(c.sizes, boxes_of(c), 100).value();
    Numbers elements;
    for (const auto row : found.rows) {
      for (int64_t i = 0; i < found.length; ++i) {
        elements.push_back(row * found.length + i);
      }
    }
    EXPECT_EQ(elements, elements_of(c));
  }
}

TEST(BoxRows, AreAsLongAsTheyCanBe) {
  const Boxes c{{8, 3, 2}, {{0, 0, 0}, {4, 0, 0}}, {{2, 3, 2}, {2, 3, 2}}};
  const auto rows = rows_of(c.sizes, boxes_of(c), 2).value();
  EXPECT_EQ(rows.length, 12);
  EXPECT_EQ(rows.rows, Numbers({0, 2}));
  EXPECT_TRUE(rows.distinct);
  EXPECT_FALSE(rows_of(c.sizes, boxes_of(c), 1));
}

TEST(BoxRows, TellWhetherBoxesOverlap) {
  const Boxes c{{7}, {{3}, {0}, {3}}, {{2}, {1}, {1}}};
  EXPECT_FALSE(rows_of(c.sizes, boxes_of(c), 9).value().distinct);
}

} // namespace
} // namespace shardtensor::detail
