#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include "shardtensor/layout/plans/view_plan.h"

namespace shardtensor::detail {

// What the kernels of view operators share.

/// The plan that was made for the same operator, layout and arguments before,
/// or a new one.
ViewPlanPtr find_view_plan(
    const char* op,
    const SpecPtr& spec,
    c10::IntArrayRef arguments,
    c10::function_ref<ViewPlan()> make);

/// The same for a view of `self`, with the strides and the offset that `view`
/// gives to a tensor of its global sizes and strides. PyTorch's own errors come
/// from there, the same on every rank.
ViewPlanPtr find_view_plan(
    const char* op,
    const at::Tensor& self,
    c10::IntArrayRef arguments,
    c10::function_ref<ViewPlan()> make,
    c10::function_ref<at::Tensor(const at::Tensor&)> view);

/// How far from where `self` begins an offset of as_strided is, which counts
/// from where the memory begins that `self` may be a part of.
int64_t offset_within(
    const at::Tensor& self,
    std::optional<int64_t> storage_offset);

// Note [Origins of views]
// ATen's backward of a slice or a row is told the sizes of its input, not the
// layout. Any layout is a right one, but only the input's own needs no messages
// when the gradient arrives there. So a view notes the layout it was taken
// from, and its backward asks for the last one noted for the layout of the
// gradient: a hint, the same on every rank.

void note_origin(
    const at::Tensor& self,
    const SpecPtr& output,
    c10::IntArrayRef arguments);
/// Null where nothing was noted.
SpecPtr find_origin(const SpecPtr& grad, c10::IntArrayRef arguments);

/// A view that gathers its input first is reported as a fallback; one that cuts
/// it along other rows or dims is an exchange like another.
void note_view_repair(
    const char* op,
    const SpecPtr& own,
    const SpecPtr& wanted);

} // namespace shardtensor::detail
