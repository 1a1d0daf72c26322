#include "shardtensor/threads/setting.h"

#include <thread>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace shardtensor {
namespace {

enum class Colour { Red, Green, Blue };

Setting<Colour> colour{"colour", Colour::Red};
Setting<int64_t> number{"number", int64_t{1} << 40};
Setting<bool> flag{"flag", false};

Colour in_a_thread() {
  Colour found{};
  std::thread([&] { found = colour; }).join();
  return found;
}

TEST(Setting, IsOfTheProcess) {
  EXPECT_EQ(colour, Colour::Red);
  colour = Colour::Blue;
  EXPECT_EQ(in_a_thread(), Colour::Blue);
  EXPECT_EQ(number, int64_t{1} << 40);
  EXPECT_FALSE(flag);
  colour = Colour::Red;
}

TEST(Setting, IsAThreadsOwnWhereThatHoldsIt) {
  const auto before = hold_setting("colour");
  EXPECT_FALSE(before);
  EXPECT_EQ(colour, Colour::Red);
  colour = Colour::Green;
  const auto inner = hold_setting("colour");
  colour = Colour::Blue;
  EXPECT_EQ(in_a_thread(), Colour::Red);
  std::thread([] { colour = Colour::Blue; }).join();
  release_setting("colour", inner);
  EXPECT_EQ(colour, Colour::Green);
  release_setting("colour", before);
  EXPECT_EQ(colour, Colour::Blue);
  colour = Colour::Red;
}

TEST(Setting, IsKnownByItsName) {
  EXPECT_THROW(hold_setting("size"), c10::ValueError);
  EXPECT_THROW(release_setting("size", 1), c10::ValueError);
}

} // namespace
} // namespace shardtensor
