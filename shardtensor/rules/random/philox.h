#pragma once

#include <array>
#include <cstdint>

namespace shardtensor::detail {

/// Philox4x32-10 (Salmon et al., SC 2011): 128 random bits for each 128-bit
/// counter under a 64-bit key. kLanes counters at a time, side by side for the
/// vector units; what a lane gives does not depend on its place.
class Philox {
 public:
  static constexpr int64_t kLanes = 64;
  using Row = std::array<uint32_t, kLanes>;
  using Words = std::array<Row, 4>; // word w of lane l is words[w][l]

  static constexpr uint32_t kFactor0 = 0xD2511F53;
  static constexpr uint32_t kFactor1 = 0xCD9E8D57;
  static constexpr uint32_t kStep0 = 0x9E3779B9;
  static constexpr uint32_t kStep1 = 0xBB67AE85;
  static constexpr int kRounds = 10;

  explicit Philox(uint64_t key)
      : key0_(static_cast<uint32_t>(key)),
        key1_(static_cast<uint32_t>(key >> 32)) {}

  /// Counters in, their bits out.
  [[gnu::always_inline]] inline void operator()(Words& words) const {
    uint32_t key0 = key0_;
    uint32_t key1 = key1_;
    for (int round = 0; round < kRounds; ++round) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const uint64_t product0 = uint64_t{kFactor0} * words[0][lane];
        const uint64_t product1 = uint64_t{kFactor1} * words[2][lane];
        words[0][lane] =
            static_cast<uint32_t>(product1 >> 32) ^ words[1][lane] ^ key0;
        words[2][lane] =
            static_cast<uint32_t>(product0 >> 32) ^ words[3][lane] ^ key1;
        words[1][lane] = static_cast<uint32_t>(product1);
        words[3][lane] = static_cast<uint32_t>(product0);
      }
      key0 += kStep0;
      key1 += kStep1;
    }
  }

  /// One counter alone.
  std::array<uint32_t, 4> operator()(std::array<uint32_t, 4> counter) const {
    uint32_t key0 = key0_;
    uint32_t key1 = key1_;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t product0 = uint64_t{kFactor0} * counter[0];
      const uint64_t product1 = uint64_t{kFactor1} * counter[2];
      counter = {
          static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0,
          static_cast<uint32_t>(product1),
          static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1,
          static_cast<uint32_t>(product0)};
      key0 += kStep0;
      key1 += kStep1;
    }
    return counter;
  }

 private:
  uint32_t key0_;
  uint32_t key1_;
};

/// 53 of 64 bits as a number in (0, 1].
[[gnu::always_inline]] inline double unit_double(uint32_t high, uint32_t low) {
  const auto bits = (uint64_t{high} << 32 | low) >> 11;
  return (static_cast<double>(static_cast<int64_t>(bits)) + 0.5) * 0x1p-53;
}

} // namespace shardtensor::detail
