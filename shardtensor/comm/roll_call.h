#pragma once

#include <string>

namespace shardtensor {

/// For an error of the group's backend that names nobody: "; heard nothing from
/// rank 2, rank 3", of those that do not come here, too, within two seconds.
/// Empty where all do, or where the group is gone or its store can't tell.
std::string who_is_missing(const std::string& group);

} // namespace shardtensor
