#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {

/// self[indices] = values, or += values, by integers, where named dims are cut
/// and so is an index, or the values along its dims: each rank sends what its
/// part writes into rows of others (Note [Rows by a cut index]). Does nothing
/// and says so where another way is needed. Of values for one element the last
/// stays, as on one device where that writes in order. Communication: a plan,
/// when made, and one message to each rank whose rows are named.
bool puts_rows(
    const at::Tensor& self,
    const Indices& indices,
    const at::Tensor& values,
    bool accumulate);

/// values broadcast to self[index], which is laid out as `result`, and cut like
/// it; a plain number on the device of `self`. Raises for another dtype.
at::Tensor local_values(
    const at::Tensor& values,
    const SpecPtr& result,
    const at::Tensor& self);

} // namespace shardtensor::detail
