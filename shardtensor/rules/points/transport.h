#pragma once

#include <string>

namespace shardtensor {

/// How queries meet the points of other ranks. Auto chooses by sizes and by the
/// boxes of the ranks' pieces.
/// - Ring: pieces of points pass all ranks, while those search.
/// - Boxes: a query goes to the ranks whose points' box is nearer than its
///   neighbours so far, and they search. For points that lie near each other
///   where they are near in order, see partition_points.
enum class PointTransport { Auto, Ring, Boxes };

/// For all calls of the process from now on, the same on all ranks.
void set_point_transport(PointTransport transport);
PointTransport point_transport();
/// "auto", "ring", "boxes".
const char* to_string(PointTransport transport);
/// Raises on another name.
PointTransport parse_point_transport(const std::string& name);

} // namespace shardtensor
