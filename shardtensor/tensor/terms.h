#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// Every rank's `local` (laid out as `spec`, but different on each rank of
/// `axes`) stacked along a new dim 0, in rank order. Communication: one
/// exchange; local.numel() elements to each rank of the axes.
at::Tensor gather_terms(
    const at::Tensor& local,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes);

/// Makes one term of several: what belongs together, each tensor's terms
/// stacked along a new dim 0. Whether some were merged before must not matter,
/// and one term stays as it is.
using Terms = std::vector<at::Tensor>;
using MergeTerms = c10::function_ref<Terms(const Terms& stacked)>;

/// All ranks' terms as one, the same bits on every rank of `axes`: `own` are
/// this rank's, each with as many elements as `spec` gives it. Communication:
/// one exchange with the other ranks of the axes, if they are at most
/// kMostTerms; else some more with that many ranks (layout/plans/merge_plan.h).
/// One for each dtype among the terms. Memory: at most kMostTerms terms.
Terms merge_terms(
    Terms own,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes,
    MergeTerms merge);

/// The same for one tensor.
at::Tensor merge_terms(
    const at::Tensor& own,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes,
    c10::function_ref<at::Tensor(const at::Tensor& stacked)> merge);

} // namespace shardtensor::detail
