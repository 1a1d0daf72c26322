#include "shardtensor/layout/plans/merge_plan.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "shardtensor/layout/interval.h"

namespace shardtensor::detail {

namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// Whether a tree of so many levels, each node with so many children, has this
/// many leaves.
bool reaches(int64_t children, int64_t levels, int64_t leaves) {
  int64_t reached = 1;
  for (int64_t level = 0; level < levels && reached < leaves; ++level) {
    reached *= children;
  }
  return reached >= leaves;
}

/// The children of a node on each level, from the root on: as few levels as can
/// be, then as few children.
std::vector<int64_t> children_of_levels(int64_t leaves, int64_t most) {
  int64_t levels = 1;
  while (!reaches(most, levels, leaves)) {
    ++levels;
  }
  std::vector<int64_t> result;
  for (; levels > 0; --levels) {
    int64_t children = 1;
    while (!reaches(children, levels, leaves)) {
      ++children;
    }
    result.push_back(children);
    leaves = ceil_div(leaves, children);
  }
  return result;
}

/// The node's children, their extents differing by one at most.
std::vector<Interval> split(const Interval& node, int64_t children) {
  children = std::min(children, node.extent());
  std::vector<Interval> result;
  for (int64_t child = 0; child < children; ++child) {
    const auto cut = [&](int64_t at) {
      return node.begin + at * node.extent() / children;
    };
    result.push_back({cut(child), cut(child + 1)});
  }
  return result;
}

/// The step of a piece of the child `own`.
MergeStep make_step(
    const std::vector<Interval>& children,
    const Interval& own,
    int64_t piece) {
  const int64_t place = piece - own.begin;
  MergeStep step;
  for (const Interval& child : children) {
    if (child == own) {
      step.sources.push_back(piece);
      continue;
    }
    // Those whose place is mine, or mine and my child's extent, and so on.
    step.sources.push_back(child.begin + place % child.extent());
    for (int64_t at = place; at < child.extent(); at += own.extent()) {
      step.receivers.push_back(child.begin + at);
    }
  }
  return step;
}

} // namespace

std::vector<MergeStep> plan_merge(
    int64_t pieces,
    int64_t piece,
    int64_t most_terms) {
  TORCH_CHECK_INDEX(
      piece >= 0 && piece < pieces,
      "plan_merge: piece ",
      piece,
      ", expected 0 <= piece < ",
      pieces);
  TORCH_CHECK_VALUE(
      most_terms >= 2,
      "plan_merge: at most ",
      most_terms,
      " terms, expected at least 2");
  std::vector<MergeStep> steps;
  Interval node{0, pieces};
  for (const int64_t count : children_of_levels(pieces, most_terms)) {
    const auto children = split(node, count);
    node = *std::find_if(
        children.begin(), children.end(), [&](const Interval& child) {
          return piece < child.end;
        });
    steps.push_back(make_step(children, node, piece));
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

} // namespace shardtensor::detail
