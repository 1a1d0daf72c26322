#pragma once

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "shardtensor/layout/in_range.h"

namespace shardtensor {

class Mesh;
/// Interned: equal meshes are the same pointer.
using MeshPtr = std::shared_ptr<const Mesh>;

/// Ranks arranged in an n-d grid with named axes. A *position* is a rank's
/// row-major index in the grid, a *coordinate* its index along one axis. Group
/// names are PyTorch's process-group names; nothing here communicates.
///
/// Example: shape {2, 2} over ranks {0, 1, 2, 3}: position 2 has coordinates
/// (1, 0); its neighbours along axis 1 are the positions 2 and 3.
class Mesh {
 public:
  struct Options {
    std::vector<int64_t> shape;
    std::vector<int64_t> ranks; // row-major, global ranks
    std::vector<std::string> axis_names; // empty, or one per axis
    std::vector<std::string> axis_groups; // of this process; as axis_names
    std::string group; // all ranks of the mesh
    int64_t position = -1; // of this process; -1: not in the mesh

    bool operator==(const Options&) const = default;
  };

  explicit Mesh(Options options); // use make_mesh

  int64_t axes() const {
    return static_cast<int64_t>(options_.shape.size());
  }
  const std::vector<int64_t>& shape() const {
    return options_.shape;
  }
  /// The number of ranks along one axis.
  int64_t ranks(int64_t axis) const {
    return options_.shape[detail::in_range("Mesh", "axis", axis, axes())];
  }
  /// The number of ranks that differ along `axes` alone, this one among them.
  int64_t ranks(const std::vector<int64_t>& axes) const {
    int64_t ranks = 1;
    for (const int64_t axis : axes) {
      ranks *= this->ranks(axis);
    }
    return ranks;
  }
  /// The number of ranks in the mesh.
  int64_t ranks() const {
    return static_cast<int64_t>(options_.ranks.size());
  }
  int64_t global_rank(int64_t position) const {
    return options_
        .ranks[detail::in_range("Mesh", "position", position, ranks())];
  }
  int64_t position() const {
    return options_.position;
  }
  bool contains_this_rank() const {
    return options_.position >= 0;
  }
  int64_t coordinate(int64_t position, int64_t axis) const;
  /// This rank's.
  int64_t coordinate(int64_t axis) const {
    return coordinate(options_.position, axis);
  }
  /// The position with the same coordinates but for one axis.
  int64_t with_coordinate(int64_t position, int64_t axis, int64_t to) const;
  /// The row-major index over `axes` alone: which piece of a dim that these
  /// axes shard together belongs to `position`.
  int64_t piece(int64_t position, const std::vector<int64_t>& axes) const;

  /// "" when the axes have no names.
  const std::string& axis_name(int64_t axis) const;
  /// Raises when the mesh was made without groups.
  const std::string& group(int64_t axis) const;
  const std::string& group() const {
    return options_.group;
  }
  const Options& options() const {
    return options_;
  }

 private:
  Options options_;
  std::vector<int64_t> strides_;
};

/// Raises unless there is an axis, the shape's product is the number of ranks,
/// ranks increase in row-major order (process groups order their members so: a
/// position is then the rank in `group`, a coordinate the rank in the axis
/// group), names differ, and names and groups are one per axis where given.
MeshPtr make_mesh(Mesh::Options options);

/// Live interned meshes; for tests.
int64_t interned_meshes();

/// "Mesh(2x2: dp, domain)".
std::ostream& operator<<(std::ostream& out, const Mesh& mesh);

} // namespace shardtensor
