#include "shardtensor/rules/neighborhood/windows.h"

#include <algorithm>

namespace shardtensor::detail {
namespace {

/// How many of `length` rows are `dilation` apart from `first`, itself among
/// them.
int64_t rows_apart(int64_t length, int64_t first, int64_t dilation) {
  return (length - first + dilation - 1) / dilation;
}

/// The window of query `i` of a sequence of `length` rows.
Interval dense_window(const NeighborhoodDim& dim, int64_t i, int64_t length) {
  const int64_t group = i / dim.stride * dim.stride;
  if (dim.causal) {
    const int64_t leader = std::min(group + dim.stride, length) - 1;
    return {std::max<int64_t>(leader - dim.kernel + 1, 0), i + 1};
  }
  const int64_t leader = std::min(group + dim.stride / 2, length - 1);
  const int64_t begin =
      std::clamp<int64_t>(leader - dim.kernel / 2, 0, length - dim.kernel);
  return {begin, begin + dim.kernel};
}

/// The longest run of queries that see own rows only.
Interval queries_of_own_rows(const NeighborhoodDim& dim) {
  const auto& own = dim.queries;
  Interval longest{own.begin, own.begin};
  Interval run = longest;
  for (int64_t query = own.begin; query < own.end; ++query) {
    const auto window = key_window(dim, query);
    const int64_t last = window.first + (window.count - 1) * dim.dilation;
    if (window.first < own.begin || last >= own.end) {
      run.begin = query + 1;
    }
    run.end = query + 1;
    if (run.extent() > longest.extent()) {
      longest = run;
    }
  }
  return longest;
}

} // namespace

KeyWindow key_window(const NeighborhoodDim& dim, int64_t query) {
  const int64_t first = query % dim.dilation;
  const auto window = dense_window(
      dim, query / dim.dilation, rows_apart(dim.length, first, dim.dilation));
  return {first + window.begin * dim.dilation, window.extent()};
}

std::vector<int64_t> key_rows(const NeighborhoodDim& dim) {
  const auto& queries = dim.queries;
  std::vector<int64_t> rows;
  const auto add = [&](int64_t first, int64_t last, int64_t step) {
    for (int64_t row = first; row <= last; row += step) {
      rows.push_back(row);
    }
  };
  if (queries == Interval{0, dim.length}) {
    add(0, dim.length - 1, 1);
    return rows;
  }
  // Windows of queries that are `dilation` apart overlap or touch, for no
  // stride is larger than the kernel.
  const int64_t sequences = std::min(dim.dilation, queries.extent());
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t first = queries.begin + i;
    const int64_t last = first +
        (rows_apart(queries.extent(), i, dim.dilation) - 1) * dim.dilation;
    const auto end = key_window(dim, last);
    add(key_window(dim, first).first,
        end.first + (end.count - 1) * dim.dilation,
        dim.dilation);
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

std::vector<int64_t> rows_of_others(const NeighborhoodDim& dim) {
  auto rows = key_rows(dim);
  std::erase_if(rows, [&](int64_t row) {
    return row >= dim.queries.begin && row < dim.queries.end;
  });
  return rows;
}

std::vector<NeighborhoodPart> split_by_owner(const NeighborhoodDim& dim) {
  const auto& own = dim.queries;
  const auto others = rows_of_others(dim);
  const auto part_of = [&](const Interval& queries) {
    NeighborhoodPart part;
    part.dim = dim;
    part.dim.queries = queries;
    for (const int64_t row : key_rows(part.dim)) {
      if (row >= own.begin && row < own.end) {
        part.own.push_back(row - own.begin);
        continue;
      }
      const auto place = std::lower_bound(others.begin(), others.end(), row);
      (row < own.begin ? part.before : part.after)
          .push_back(place - others.begin());
    }
    return part;
  };
  const auto inner = queries_of_own_rows(dim);
  std::vector<NeighborhoodPart> parts;
  for (const auto& queries :
       {inner,
        Interval{own.begin, inner.begin},
        Interval{inner.end, own.end}}) {
    if (!queries.empty()) {
      parts.push_back(part_of(queries));
    }
  }
  return parts;
}

std::vector<int64_t> encode(const std::vector<NeighborhoodDim>& dims) {
  std::vector<int64_t> code;
  for (const auto& dim : dims) {
    code.insert(
        code.end(),
        {dim.length,
         dim.kernel,
         dim.dilation,
         dim.causal ? -dim.stride : dim.stride,
         dim.queries.begin,
         dim.queries.end});
  }
  return code;
}

std::vector<NeighborhoodDim> decode_neighborhood(c10::IntArrayRef code) {
  std::vector<NeighborhoodDim> dims;
  for (size_t i = 0; i + 6 <= code.size(); i += 6) {
    dims.push_back(
        {code[i],
         code[i + 1],
         code[i + 2],
         std::abs(code[i + 3]),
         code[i + 3] < 0,
         {code[i + 4], code[i + 5]}});
  }
  return dims;
}

LocalWindows::LocalWindows(const NeighborhoodDim& dim)
    : dilation_(dim.dilation) {
  const auto rows = key_rows(dim);
  keys_ = static_cast<int64_t>(rows.size());
  if (rows.empty()) {
    return;
  }
  places_.resize(rows.back() - rows.front() + 1, -1);
  for (int64_t place = 0; place < keys_; ++place) {
    places_[rows[place] - rows.front()] = place;
  }
  for (int64_t row = dim.queries.begin; row < dim.queries.end; ++row) {
    auto window = key_window(dim, row);
    window.first -= rows.front();
    windows_.push_back(window);
  }
}

} // namespace shardtensor::detail
