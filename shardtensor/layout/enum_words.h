#pragma once

#include <array>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

namespace shardtensor::detail {

/// The words by which programs and errors name the values of an enum.
///
/// Example:
///   constexpr EnumWords<Side, 2> kSides{
///       "side", {{{Side::Left, "left"}, {Side::Right, "right"}}}};
///   kSides.parse("up"): side: expected 'left' or 'right', got 'up'
template <class Value, size_t count>
struct EnumWords {
  const char* title; // of the errors
  std::array<std::pair<Value, const char*>, count> words;

  const char* word(Value value) const {
    for (const auto& [known, word] : words) {
      if (known == value) {
        return word;
      }
    }
    TORCH_INTERNAL_ASSERT(
        false, title, ": no word for ", static_cast<int>(value));
  }

  Value parse(const std::string& name) const {
    for (const auto& [value, word] : words) {
      if (name == word) {
        return value;
      }
    }
    TORCH_CHECK_VALUE(
        false, title, ": expected ", alternatives(), ", got '", name, "'");
  }

 private:
  std::string alternatives() const {
    std::string result;
    for (size_t i = 0; i < count; ++i) {
      result += i == 0 ? "'" : i + 1 == count ? "' or '" : "', '";
      result += words[i].second;
    }
    return result + "'";
  }
};

} // namespace shardtensor::detail
