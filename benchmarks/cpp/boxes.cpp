// Many small boxes of a tensor, packed into one buffer and written from it: one
// copy for each box, or one kernel that picks their rows. Sets the constants of
// shardtensor/comm/primitives/exchange_schedule.cpp.
//
//     cmake --build build --target benchmark_boxes
//     build/benchmarks/boxes [rounds]
//
// Prints a table in Markdown. The two variants take turns, on one thread; times
// are medians, the ratio is the median of the rounds' ratios.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "shardtensor/comm/primitives/box_rows.h"
#include "shardtensor/comm/primitives/exchange_boxes.h"

using shardtensor::detail::MessageBox;
using shardtensor::detail::Messages;

namespace {

constexpr double kBlock = 0.005; // seconds that one variant runs in a turn

/// Boxes of `rows` rows of `length` elements each: every other one of those of
/// a tensor of (2 * boxes, rows, width), whose rows are as wide as the boxes or
/// twice as wide.
struct Boxes {
  int64_t count;
  int64_t rows;
  int64_t length;
  int64_t width;
  std::vector<std::vector<int64_t>> numbers; // that the boxes look at

  at::Tensor tensor() const {
    return at::randn({2 * count, rows, width});
  }

  Messages messages(bool one_kernel) {
    const std::vector<int64_t> sizes{2 * count, rows, width};
    Messages result;
    numbers.reserve(4 * count + numbers.size());
    for (int64_t i = 0; i < count; ++i) {
      MessageBox box;
      box.begin = numbers.emplace_back(std::vector<int64_t>{2 * i, 0, 0});
      box.extent = numbers.emplace_back(std::vector<int64_t>{1, rows, length});
      box.numel = rows * length;
      result.numel += box.numel;
      result.pieces.push_back(box);
    }
    if (one_kernel) {
      const auto found =
          shardtensor::detail::rows_of(sizes, result.pieces, result.numel);
      result.rows = at::tensor(found->rows, at::kLong);
      result.row_length = found->length;
    }
    return result;
  }
};

// ---- timing -----------------------------------------------------------------

using Times = std::vector<double>; // seconds per call, of each round
using Call = std::function<void()>;

double seconds_per_call(const Call& call, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    call();
  }
  const std::chrono::duration<double> passed =
      std::chrono::steady_clock::now() - begin;
  return passed.count() / calls;
}

int calls_per_block(const Call& call) {
  seconds_per_call(call, 20);
  return std::max(1, static_cast<int>(kBlock / seconds_per_call(call, 20)));
}

double median(Times times) {
  const auto middle = times.begin() + times.size() / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

struct Compared {
  double apart;
  double together;
  double ratio;
};

Compared compare(const Call& apart, const Call& together, int rounds) {
  const int apart_calls = calls_per_block(apart);
  const int together_calls = calls_per_block(together);
  Times first, second, ratios;
  for (int round = 0; round < rounds; ++round) {
    first.push_back(seconds_per_call(apart, apart_calls));
    second.push_back(seconds_per_call(together, together_calls));
    ratios.push_back(second.back() / first.back());
  }
  return {median(first), median(second), median(ratios)};
}

// ---- the table --------------------------------------------------------------

void measure(Boxes boxes, int rounds) {
  using shardtensor::detail::pack;
  using shardtensor::detail::unpack;
  const auto x = boxes.tensor();
  const auto apart = boxes.messages(false);
  const auto together = boxes.messages(true);
  const auto buffer = pack(x, apart).clone();
  TORCH_CHECK(buffer.equal(pack(x, together)));
  const auto packed =
      compare([&] { pack(x, apart); }, [&] { pack(x, together); }, rounds);
  const auto written = compare(
      [&] { unpack(x, buffer, apart); },
      [&] { unpack(x, buffer, together); },
      rounds);
  std::printf(
      "| %lld boxes of %lld x %lld%s | %.2f µs | %.2f µs | %.2f | %.2f µs | "
      "%.2f µs | %.2f |\n",
      static_cast<long long>(boxes.count),
      static_cast<long long>(boxes.rows),
      static_cast<long long>(boxes.length),
      boxes.width == boxes.length ? "" : " of wider rows",
      packed.apart * 1e6,
      packed.together * 1e6,
      packed.ratio,
      written.apart * 1e6,
      written.together * 1e6,
      written.ratio);
}

} // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::max(1, std::atoi(arguments[1])) : 9;
  at::set_num_threads(1);
  std::puts("### Many boxes on the host\n");
  std::puts(
      "|  | pack apart | pack by one kernel | one / apart | write apart | write "
      "by one kernel | one / apart |\n| --- | --- | --- | --- | --- | --- | --- "
      "|");
  for (const int64_t boxes : {2, 4, 8, 32}) {
    for (const int64_t elements : {16, 256, 2048, 8192, 32768}) {
      measure({boxes, 1, elements, elements, {}}, rounds);
      measure({boxes, elements / 16, 16, 32, {}}, rounds);
    }
  }
  return 0;
}
