#pragma once

namespace shardtensor {

/// Note [Operators registered later]
/// An operator that another library defines after us may have an explicit
/// composite kernel, which would hide our fallback. A listener notes its name;
/// the function level, which every call passes first, calls this to register
/// what is pending. Costs one atomic load where nothing is.
void register_late_operators();

} // namespace shardtensor
