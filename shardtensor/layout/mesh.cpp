#include "shardtensor/layout/mesh.h"

#include <algorithm>
#include <functional>
#include <set>

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include "shardtensor/layout/intern.h"
#include "shardtensor/layout/print.h"

namespace shardtensor {

using namespace detail;

namespace {

// Never destroyed: meshes may outlive the program's static objects.
InternTable<Mesh>& meshes() {
  static auto* const meshes = new InternTable<Mesh>();
  return *meshes;
}

void check_shape(const Mesh::Options& options) {
  TORCH_CHECK_VALUE(
      !options.shape.empty(), "Mesh: no axes, expected at least one");
  int64_t product = 1;
  for (int64_t ranks : options.shape) {
    TORCH_CHECK_VALUE(
        ranks >= 1,
        "Mesh: ",
        ranks,
        " ranks on an axis of shape (",
        join(options.shape),
        "), expected at least 1");
    product *= ranks;
  }
  TORCH_CHECK_VALUE(
      product == static_cast<int64_t>(options.ranks.size()),
      "Mesh: ",
      options.ranks.size(),
      " ranks for shape (",
      join(options.shape),
      "), expected ",
      product);
}

void check_ranks(const Mesh::Options& options) {
  const bool increasing =
      std::adjacent_find(
          options.ranks.begin(), options.ranks.end(), std::greater_equal<>()) ==
      options.ranks.end();
  TORCH_CHECK_VALUE(
      increasing && options.ranks.front() >= 0,
      "Mesh: ranks [",
      join(options.ranks),
      "], expected them to increase in row-major order, from 0 or more");
  TORCH_CHECK_VALUE(
      options.position >= -1 &&
          options.position < static_cast<int64_t>(options.ranks.size()),
      "Mesh: position ",
      options.position,
      ", expected -1 (not in the mesh) to ",
      static_cast<int64_t>(options.ranks.size()) - 1);
}

void check_one_per_axis(
    const char* what,
    const std::vector<std::string>& names,
    const Mesh::Options& options) {
  TORCH_CHECK_VALUE(
      names.empty() || names.size() == options.shape.size(),
      "Mesh: ",
      names.size(),
      " axis ",
      what,
      " (",
      join(names),
      "), expected none or one for each of ",
      options.shape.size(),
      " axes");
}

void check_names(const Mesh::Options& options) {
  check_one_per_axis("names", options.axis_names, options);
  check_one_per_axis("groups", options.axis_groups, options);
  const std::set<std::string> distinct(
      options.axis_names.begin(), options.axis_names.end());
  TORCH_CHECK_VALUE(
      distinct.size() == options.axis_names.size(),
      "Mesh: axis names (",
      join(options.axis_names),
      "), expected different ones");
}

template <class T>
size_t hash_all(size_t seed, const std::vector<T>& items) {
  seed = c10::hash_combine(seed, items.size());
  for (const T& item : items) {
    seed = c10::hash_combine(seed, std::hash<T>()(item));
  }
  return seed;
}

size_t hash_of(const Mesh::Options& options) {
  size_t seed = std::hash<std::string>()(options.group);
  seed = c10::hash_combine(seed, std::hash<int64_t>()(options.position));
  seed = hash_all(seed, options.shape);
  seed = hash_all(seed, options.ranks);
  seed = hash_all(seed, options.axis_names);
  return hash_all(seed, options.axis_groups);
}

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) {
    strides[axis - 1] = strides[axis] * shape[axis];
  }
  return strides;
}

} // namespace

Mesh::Mesh(Options options)
    : options_(std::move(options)),
      strides_(row_major_strides(options_.shape)) {}

int64_t Mesh::coordinate(int64_t position, int64_t axis) const {
  in_range("Mesh", "position", position, ranks());
  in_range("Mesh", "axis", axis, axes());
  return position / strides_[axis] % options_.shape[axis];
}

int64_t Mesh::with_coordinate(int64_t position, int64_t axis, int64_t to)
    const {
  return position + (to - coordinate(position, axis)) * strides_[axis];
}

int64_t Mesh::piece(int64_t position, const std::vector<int64_t>& axes) const {
  int64_t index = 0;
  for (int64_t axis : axes) {
    index = index * ranks(axis) + coordinate(position, axis);
  }
  return index;
}

const std::string& Mesh::axis_name(int64_t axis) const {
  static const std::string unnamed;
  in_range("Mesh", "axis", axis, axes());
  return options_.axis_names.empty() ? unnamed : options_.axis_names[axis];
}

const std::string& Mesh::group(int64_t axis) const {
  in_range("Mesh", "axis", axis, axes());
  TORCH_CHECK(
      !options_.axis_groups.empty(),
      "Mesh: no group for axis ",
      axis,
      " of ",
      *this,
      ", expected a mesh with process groups");
  return options_.axis_groups[axis];
}

MeshPtr make_mesh(Mesh::Options options) {
  check_shape(options);
  check_ranks(options);
  check_names(options);
  const size_t hash = hash_of(options);
  return meshes().get(
      hash,
      [&](const Mesh& mesh) { return mesh.options() == options; },
      [&] { return std::make_unique<const Mesh>(std::move(options)); });
}

int64_t interned_meshes() {
  return meshes().size();
}

std::ostream& operator<<(std::ostream& out, const Mesh& mesh) {
  out << "Mesh(" << join(mesh.shape(), "x");
  const std::vector<std::string>& names = mesh.options().axis_names;
  return out << (names.empty() ? "" : ": ") << join(names) << ')';
}

} // namespace shardtensor
