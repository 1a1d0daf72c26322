#include "shardtensor/layout/mesh.h"

#include <gtest/gtest.h>

#include "support.h"

namespace shardtensor {
namespace {

using namespace testing;

Mesh::Options two_by_two() {
  Mesh::Options options;
  options.shape = {2, 2};
  options.ranks = {0, 1, 4, 5};
  options.axis_names = {"dp", "domain"};
  options.axis_groups = {"1", "2"};
  options.group = "0";
  options.position = 2;
  return options;
}

template <class Change>
void expect_refused(const Change& change, const std::string& message) {
  Mesh::Options options = two_by_two();
  change(options);
  expect_error<c10::ValueError>([&] { make_mesh(options); }, message);
}

TEST(Mesh, KnowsWhereEachRankStands) {
  const MeshPtr mesh = make_mesh(two_by_two());
  EXPECT_EQ(mesh->axes(), 2);
  EXPECT_EQ(mesh->ranks(), 4);
  EXPECT_EQ(mesh->ranks(1), 2);
  EXPECT_EQ(mesh->global_rank(2), 4);
  EXPECT_TRUE(mesh->contains_this_rank());
  EXPECT_EQ(mesh->coordinate(0), 1);
  EXPECT_EQ(mesh->coordinate(1), 0);
  EXPECT_EQ(mesh->axis_name(1), "domain");
  EXPECT_EQ(mesh->group(0), "1");
  EXPECT_EQ(mesh->group(), "0");
  EXPECT_EQ(printed(*mesh), "Mesh(2x2: dp, domain)");
}

TEST(Mesh, PositionsAreRowMajor) {
  for (const auto& shape : mesh_shapes()) {
    const MeshPtr mesh = mesh_of(shape);
    int64_t position = 0;
    for_each_index(shape, [&](const std::vector<int64_t>& coordinates) {
      for (int64_t axis = 0; axis < mesh->axes(); ++axis) {
        ASSERT_EQ(mesh->coordinate(position, axis), coordinates[axis]);
        for (int64_t to = 0; to < shape[axis]; ++to) {
          std::vector<int64_t> moved = coordinates;
          moved[axis] = to;
          ASSERT_EQ(
              mesh->with_coordinate(position, axis, to), flat(shape, moved));
        }
      }
      ++position;
    });
    ASSERT_EQ(position, mesh->ranks());
  }
}

TEST(Mesh, PiecesCountOverSomeAxesOnly) {
  const MeshPtr mesh = mesh_of({2, 3, 4});
  const int64_t position = 1 * 12 + 2 * 4 + 3;
  EXPECT_EQ(mesh->piece(position, {}), 0);
  EXPECT_EQ(mesh->piece(position, {1}), 2);
  EXPECT_EQ(mesh->piece(position, {0, 2}), 1 * 4 + 3);
  EXPECT_EQ(mesh->piece(position, {0, 1, 2}), position);
}

TEST(Mesh, WithoutNamesOrGroups) {
  const MeshPtr mesh = mesh_of({2, 3});
  EXPECT_EQ(mesh->axis_name(1), "");
  EXPECT_EQ(printed(*mesh), "Mesh(2x3)");
  expect_error<c10::Error>(
      [&] { mesh->group(1); },
      "Mesh: no group for axis 1 of Mesh(2x3), expected a mesh with process "
      "groups");
}

TEST(Mesh, RanksOutsideTheMeshStandNowhere) {
  const MeshPtr mesh = mesh_of({2}, -1);
  EXPECT_FALSE(mesh->contains_this_rank());
  expect_error<c10::IndexError>(
      [&] { mesh->coordinate(0); },
      "Mesh: position -1, expected 0 <= position < 2");
  expect_error<c10::IndexError>(
      [&] { mesh->coordinate(2, 0); },
      "Mesh: position 2, expected 0 <= position < 2");
}

TEST(Mesh, RefusesAxesAndPositionsOutside) {
  const MeshPtr mesh = make_mesh(two_by_two());
  const auto no_axis = "Mesh: axis 3, expected 0 <= axis < 2";
  expect_error<c10::IndexError>([&] { mesh->ranks(3); }, no_axis);
  expect_error<c10::IndexError>([&] { mesh->group(3); }, no_axis);
  expect_error<c10::IndexError>([&] { mesh->axis_name(3); }, no_axis);
  expect_error<c10::IndexError>([&] { mesh->coordinate(3); }, no_axis);
  expect_error<c10::IndexError>(
      [&] { mesh->with_coordinate(0, 3, 0); }, no_axis);
  expect_error<c10::IndexError>(
      [&] { mesh->global_rank(4); },
      "Mesh: position 4, expected 0 <= position < 4");
}

TEST(Mesh, EqualMeshesAreOnePointer) {
  const int64_t before = interned_meshes();
  {
    const MeshPtr mesh = make_mesh(two_by_two());
    EXPECT_EQ(mesh, make_mesh(two_by_two()));
    EXPECT_EQ(interned_meshes(), before + 1);
    Mesh::Options elsewhere = two_by_two();
    elsewhere.position = 3;
    EXPECT_NE(mesh, make_mesh(elsewhere));
    Mesh::Options renamed = two_by_two();
    renamed.axis_names = {"dp", "tp"};
    EXPECT_NE(mesh, make_mesh(renamed));
  }
  EXPECT_EQ(interned_meshes(), before);
}

TEST(Mesh, RefusesShapesThatDoNotHoldTheRanks) {
  expect_refused(
      [](auto& options) { options.shape = {}; },
      "Mesh: no axes, expected at least one");
  expect_refused(
      [](auto& options) { options.shape = {2, 0}; },
      "Mesh: 0 ranks on an axis of shape (2, 0), expected at least 1");
  expect_refused(
      [](auto& options) { options.shape = {2, 3}; },
      "Mesh: 4 ranks for shape (2, 3), expected 6");
}

TEST(Mesh, RefusesRanksOutOfOrder) {
  for (const std::string ranks : {"0, 1, 5, 4", "0, 1, 1, 2", "-1, 0, 1, 2"}) {
    expect_refused(
        [&](auto& options) {
          options.ranks.clear();
          std::istringstream in(ranks);
          for (int64_t rank; in >> rank; in.ignore()) {
            options.ranks.push_back(rank);
          }
        },
        "Mesh: ranks [" + ranks +
            "], expected them to increase in row-major order, from 0 or more");
  }
  for (int64_t position : {-2, 4}) {
    expect_refused(
        [&](auto& options) { options.position = position; },
        "Mesh: position " + std::to_string(position) +
            ", expected -1 (not in the mesh) to 3");
  }
}

TEST(Mesh, RefusesNamesThatDoNotFit) {
  expect_refused(
      [](auto& options) { options.axis_names = {"dp"}; },
      "Mesh: 1 axis names (dp), expected none or one for each of 2 axes");
  expect_refused(
      [](auto& options) { options.axis_groups = {"1", "2", "3"}; },
      "Mesh: 3 axis groups (1, 2, 3), expected none or one for each of 2 "
      "axes");
  expect_refused(
      [](auto& options) { options.axis_names = {"dp", "dp"}; },
      "Mesh: axis names (dp, dp), expected different ones");
}

} // namespace
} // namespace shardtensor
