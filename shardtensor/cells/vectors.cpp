#include "shardtensor/cells/vectors.h"

#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor::detail {

using at::Tensor;

Tensor dot(const Vector& a, const Vector& b) {
  return a[0].mul(b[0]).add(a[1].mul(b[1])).add(a[2].mul(b[2]));
}

Vector cross(const Vector& a, const Vector& b) {
  return {
      a[1].mul(b[2]).sub(a[2].mul(b[1])),
      a[2].mul(b[0]).sub(a[0].mul(b[2])),
      a[0].mul(b[1]).sub(a[1].mul(b[0]))};
}

Vector over(const Vector& a, const Tensor& divisor) {
  return {a[0].div(divisor), a[1].div(divisor), a[2].div(divisor)};
}

Vector vector_of(const Tensor& x) {
  Vector result;
  for (int64_t dim = 0; dim < 3; ++dim) {
    result[dim] =
        dim < x.size(-1) ? x.select(-1, dim) : at::zeros_like(result[0]);
  }
  return result;
}

Tensor stacked(const Vector& a, int64_t dims) {
  return at::stack({a.begin(), a.begin() + dims}, -1);
}

Stretch stretch_of(const std::vector<Vector>& tangents, int64_t space) {
  const auto& a = tangents[0];
  if (tangents.size() == 1) {
    const auto square = dot(a, a);
    return {space == 1 ? a[0] : square.sqrt(), {over(a, square)}};
  }
  const auto& b = tangents[1];
  if (tangents.size() == 2) {
    const auto normal = cross(a, b);
    const auto square = dot(normal, normal);
    return {
        space == 2 ? normal[2] : square.sqrt(),
        {over(cross(b, normal), square), over(cross(normal, a), square)}};
  }
  const auto& c = tangents[2];
  const auto volume = dot(a, cross(b, c));
  return {
      volume,
      {over(cross(b, c), volume),
       over(cross(c, a), volume),
       over(cross(a, b), volume)}};
}

Tensor solved(const Tensor& matrices, const Tensor& rights) {
  const int64_t dims = matrices.size(-1);
  std::vector<Vector> columns;
  for (int64_t dim = 0; dim < dims; ++dim) {
    columns.push_back(vector_of(matrices.select(2, dim)));
  }
  std::vector<Tensor> rows;
  for (const auto& dual : stretch_of(columns, dims).duals) {
    rows.push_back(stacked(dual, dims));
  }
  return at::matmul(at::stack(rows, 1), rights);
}

Tensor constant_beside(const Tensor& x, const Tensor& constant) {
  const auto& local = layout_of(x) ? to_local(x.detach()) : x;
  const auto here = constant.to(local.options());
  return layout_of(x) ? promote(here, spec_inside(x)->mesh()) : here;
}

} // namespace shardtensor::detail
