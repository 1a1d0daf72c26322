#include "shardtensor/rules/points/nearest_op.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "shardtensor/comm/own_operator.h"
#include "shardtensor/rules/points/finite.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;

/// This rank's place among the pieces, the queries of a rank, then where the
/// pieces begin and end.
Numbers encode(const CloudPieces& cloud) {
  Numbers code{cloud.rank, cloud.queries};
  for (const auto& rows : cloud.rows) {
    code.push_back(rows.begin);
    code.push_back(rows.end);
  }
  return code;
}

CloudPieces decode(at::IntArrayRef code, std::string group) {
  CloudPieces cloud;
  cloud.rank = code[0];
  cloud.queries = code[1];
  cloud.group = std::move(group);
  for (size_t i = 2; i < code.size(); i += 2) {
    cloud.rows.push_back({code[i], code[i + 1]});
  }
  return cloud;
}

std::tuple<Tensor, Tensor> nearest_kernel(
    const Tensor& points,
    const Tensor& queries,
    int64_t most,
    std::optional<double> radius,
    at::IntArrayRef pieces,
    std::string op,
    std::string everybody,
    std::string group) {
  check_finite(op.c_str(), points, queries, everybody);
  const auto found = find_neighbours(
                         points.contiguous(),
                         queries.contiguous(),
                         {most, radius},
                         decode(pieces, std::move(group)),
                         point_transport())
                         .nearest;
  return {found.rows, found.squares};
}

std::tuple<Tensor, Tensor> nearest_meta(
    const Tensor&,
    const Tensor& queries,
    int64_t most,
    std::optional<double>,
    at::IntArrayRef,
    std::string,
    std::string,
    std::string) {
  const auto sizes = queries.sym_sizes().slice(0, 2);
  std::vector<c10::SymInt> all(sizes.begin(), sizes.end());
  all.emplace_back(most);
  return {
      at::empty_symint(all, queries.options().dtype(at::kLong)),
      at::empty_symint(all, queries.options())};
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("_nearest", nearest_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("_nearest", nearest_meta);
}

} // namespace

Nearest run_nearest(
    const LocalCall& call,
    int64_t most,
    std::optional<double> radius) {
  static const auto op =
      find_own_operator<decltype(nearest_kernel)>("shardtensor::_nearest");
  const auto [rows, squares] = op.call(
      call.points.detach(),
      call.queries.detach(),
      most,
      radius,
      encode(call.cloud),
      call.op,
      call.mesh ? call.mesh->group() : "",
      call.cloud.group);
  return {squares, rows};
}

} // namespace shardtensor::detail
