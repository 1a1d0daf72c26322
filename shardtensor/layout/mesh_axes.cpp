#include "shardtensor/layout/mesh_axes.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

namespace shardtensor {
namespace {

/// The ranks along one axis through this rank.
std::vector<int64_t> line(const Mesh& mesh, int64_t axis) {
  std::vector<int64_t> ranks;
  for (int64_t i = 0; i < mesh.ranks(axis); ++i) {
    ranks.push_back(
        mesh.global_rank(mesh.with_coordinate(mesh.position(), axis, i)));
  }
  return ranks;
}

/// The first axis from `begin` on that is axis `own` of `part`. Axes of one
/// rank are all alike: names decide where both have them.
std::optional<int64_t> find_axis(
    const Mesh& part,
    int64_t own,
    const Mesh& whole,
    int64_t begin) {
  std::optional<int64_t> found;
  for (int64_t axis = begin; axis < whole.axes(); ++axis) {
    if (line(whole, axis) != line(part, own)) {
      continue;
    }
    if (whole.axis_name(axis) == part.axis_name(own)) {
      return axis;
    }
    found = found ? found : axis;
  }
  return found;
}

} // namespace

std::optional<std::vector<int64_t>> axes_in(
    const Mesh& part,
    const Mesh& whole) {
  if (!part.contains_this_rank() || !whole.contains_this_rank()) {
    return std::nullopt;
  }
  std::vector<int64_t> axes;
  for (int64_t own = 0; own < part.axes(); ++own) {
    const auto found =
        find_axis(part, own, whole, axes.empty() ? 0 : axes.back() + 1);
    if (!found) {
      return std::nullopt;
    }
    axes.push_back(*found);
  }
  return axes;
}

SpecPtr on_mesh(const SpecPtr& spec, const MeshPtr& mesh) {
  if (spec->mesh() == mesh) {
    return spec;
  }
  const auto axes = axes_in(*spec->mesh(), *mesh);
  TORCH_CHECK_VALUE(
      axes,
      "expected a mesh that has the axes of ",
      *spec->mesh(),
      ", got ",
      *mesh);
  std::vector<Placement> placements(mesh->axes(), Placement::replicate());
  for (size_t own = 0; own < axes->size(); ++own) {
    placements[(*axes)[own]] = spec->placement(static_cast<int64_t>(own));
  }
  return make_spec(
      mesh, spec->sizes(), std::move(placements), spec->partitions());
}

MeshPtr detail::axis_mesh(const Mesh& mesh, const std::string& name) {
  const auto& names = mesh.options().axis_names;
  const auto found = std::ranges::find(names, name);
  TORCH_CHECK_VALUE(
      found != names.end(), "expected an axis of ", mesh, ", got '", name, "'");
  TORCH_CHECK_VALUE(
      mesh.contains_this_rank(), "expected a rank of ", mesh, ", got another");
  const int64_t axis = found - names.begin();
  Mesh::Options options;
  options.shape = {mesh.ranks(axis)};
  options.ranks = line(mesh, axis);
  options.axis_names = {name};
  options.group = mesh.group(axis);
  options.axis_groups = {options.group};
  options.position = mesh.coordinate(axis);
  return make_mesh(std::move(options));
}

std::optional<std::string> detail::group_of(
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  if (static_cast<int64_t>(axes.size()) == mesh.axes()) {
    return mesh.group();
  }
  if (axes.size() == 1) {
    return mesh.group(axes.front());
  }
  return {};
}

} // namespace shardtensor
