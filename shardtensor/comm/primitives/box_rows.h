#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/util/ArrayRef.h>

#include "shardtensor/comm/primitives/exchange_code.h"

namespace shardtensor::detail {

/// Boxes of a row-major tensor as rows of equal length: row r is the elements
/// [r * length, (r + 1) * length). They stand in the order of the boxes'
/// elements, so that picking them packs the boxes.
///
/// Example: columns [0, 4) of the rows 1 and 3 of a (4, 6) tensor: length 2,
/// which divides 0, 4 and 6; rows {3, 4, 9, 10}.
struct BoxRows {
  int64_t length = 1;
  std::vector<int64_t> rows;
  bool distinct = true; // none of them twice
};

/// The longest rows that all boxes are made of; std::nullopt where that takes
/// more than `most` of them.
std::optional<BoxRows> rows_of(
    c10::IntArrayRef sizes,
    const std::vector<MessageBox>& boxes,
    int64_t most);

} // namespace shardtensor::detail
