#include "shardtensor/layout/plans/row_source.h"

namespace shardtensor {
namespace {

bool continues(const RowSource::Run& run, const RowSource::Run& next) {
  return run.begin == RowSource::kZeros ? next.begin == RowSource::kZeros
                                        : next.begin == run.begin + run.extent;
}

} // namespace

RowSource::RowSource(std::initializer_list<int64_t> rows)
    : RowSource(std::vector<int64_t>(rows)) {}

RowSource::RowSource(const std::vector<int64_t>& rows) {
  for (const int64_t row : rows) {
    push_back(row);
  }
}

void RowSource::push_back(int64_t row) {
  append(Run{row, 1});
}

void RowSource::append(const Interval& rows) {
  append(Run{rows.begin, rows.extent()});
}

void RowSource::append_zeros(int64_t extent) {
  append(Run{kZeros, extent});
}

void RowSource::append(const RowSource& more) {
  for (const Run& run : more.runs_) {
    append(run);
  }
}

void RowSource::append(const Run& run) {
  if (run.extent <= 0) {
    return;
  }
  if (!runs_.empty() && continues(runs_.back(), run)) {
    runs_.back().extent += run.extent;
  } else {
    runs_.push_back(run);
  }
}

RowSource RowSource::shifted(int64_t by) const {
  RowSource result = *this;
  for (Run& run : result.runs_) {
    run.begin += run.begin == kZeros ? 0 : by;
  }
  return result;
}

int64_t RowSource::extent() const {
  int64_t extent = 0;
  for (const Run& run : runs_) {
    extent += run.extent;
  }
  return extent;
}

} // namespace shardtensor
