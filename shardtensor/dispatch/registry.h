#pragma once

#include <set>
#include <string>

#include <ATen/core/operator_name.h>

namespace shardtensor::detail {

/// "aten::add.Tensor" taken apart.
c10::OperatorName parse_operator_name(const std::string& op);

/// See Note [Unboxed kernels].
bool has_unboxed_kernel(const c10::OperatorName& name);

/// Whether no rule or kernel of ours serves the operator: its inputs are
/// gathered.
bool is_gathered(const c10::OperatorName& name);

/// Of an operator with a rule: what it writes into row i comes from row i of
/// its other tensors. PyTorch's tags don't say it of all forms.
void note_elementwise(const std::string& op);
bool is_elementwise(const c10::OperatorName& name);

/// Operators that tables of rules name and this PyTorch doesn't have.
const std::set<std::string>& absent_operators();

/// Note [Operators registered later]
/// An operator that another library defines after us may have an explicit
/// composite kernel, which would hide our fallback. A listener notes its name;
/// the function level, which every call passes first, calls this to register
/// what is pending. Costs one atomic load where nothing is.
void register_late_operators();

} // namespace shardtensor::detail
