#include "shardtensor/rules/neighborhood/by_natten.h"

#include <ATen/ops/zeros.h>

#include "shardtensor/comm/own_operator.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/rules/neighborhood/device_table.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

// NATTEN knows whole domains, of as many queries as keys. A piece becomes one:
// the rows of its keys, with queries of zeros where it has none, whose results
// are dropped. A window that is moved inwards at the end of the domain is moved
// alike at the end of the piece, for there both end; others lie within the
// piece's keys. Rows of zeros in front let dilation and stride begin where they
// begin in the domain.

/// Where the rows of one dim of a tensor stand among the domain's.
struct Places {
  int64_t first = 0;
  int64_t count = 0;
  Tensor rows; // on the device; undefined where they are next to each other
};

struct Domain {
  std::vector<int64_t> kernel;
  std::vector<int64_t> dilation;
  std::vector<int64_t> stride;
  std::vector<bool> causal;
  std::vector<int64_t> length;
  std::vector<Places> keys; // that the piece holds
  std::vector<Places> queries;
};

Places places_of(std::vector<int64_t> rows, at::Device device) {
  const auto count = static_cast<int64_t>(rows.size());
  Places places{rows.front(), count, {}};
  if (rows.back() - rows.front() + 1 != count) {
    places.rows = device_table(rows, {count}, device);
  }
  return places;
}

/// Nothing where the keys are too few for a window.
std::optional<Domain> domain_of(
    const std::vector<NeighborhoodDim>& dims,
    at::Device device) {
  Domain domain;
  for (const auto& dim : dims) {
    auto keys = key_rows(dim);
    if (keys.empty()) {
      return std::nullopt;
    }
    const int64_t begin =
        keys.front() - keys.front() % (dim.dilation * dim.stride);
    const int64_t length = keys.back() + 1 - begin;
    if (dim.kernel < 2 || dim.kernel * dim.dilation > length) {
      return std::nullopt;
    }
    for (auto& key : keys) {
      key -= begin;
    }
    domain.kernel.push_back(dim.kernel);
    domain.dilation.push_back(dim.dilation);
    domain.stride.push_back(dim.stride);
    domain.causal.push_back(dim.causal);
    domain.length.push_back(length);
    domain.keys.push_back(places_of(std::move(keys), device));
    domain.queries.push_back(
        {dim.queries.begin - begin, dim.queries.extent(), {}});
  }
  return domain;
}

/// x, whose dims after the batch have these places, with zeros elsewhere.
Tensor extended(
    Tensor x,
    const Domain& domain,
    const std::vector<Places>& places) {
  for (size_t i = 0; i < places.size(); ++i) {
    const auto dim = static_cast<int64_t>(i) + 1;
    const int64_t length = domain.length[i];
    if (x.size(dim) == length) {
      continue;
    }
    auto sizes = x.sizes().vec();
    sizes[dim] = length;
    const auto whole = at::zeros(sizes, x.options());
    if (places[i].rows.defined()) {
      whole.index_copy_(dim, places[i].rows, x);
    } else {
      whole.narrow(dim, places[i].first, x.size(dim)).copy_(x);
    }
    x = whole;
  }
  return x.contiguous();
}

/// What extended() brought there.
Tensor cropped(Tensor x, const std::vector<Places>& places) {
  for (size_t i = 0; i < places.size(); ++i) {
    const auto dim = static_cast<int64_t>(i) + 1;
    x = places[i].rows.defined()
        ? x.index_select(dim, places[i].rows)
        : x.narrow(dim, places[i].first, places[i].count);
  }
  return x.contiguous();
}

using NattenForward = std::vector<Tensor>(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef kernel,
    c10::IntArrayRef dilation,
    c10::IntArrayRef stride,
    c10::List<bool> causal,
    double scale);
using NattenBackward = std::vector<Tensor>(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef kernel,
    c10::IntArrayRef dilation,
    c10::IntArrayRef stride,
    c10::List<bool> causal,
    double scale);

const auto& natten_forward() {
  static const auto op =
      find_own_operator<NattenForward>("shardtensor::_natten_attention");
  return op;
}

const auto& natten_backward() {
  static const auto op = find_own_operator<NattenBackward>(
      "shardtensor::_natten_attention_backward");
  return op;
}

bool is_installed(const Tensor& x) {
  return natten_forward().hasKernelForDispatchKey(
      c10::highestPriorityBackendTypeId(x.key_set()));
}

/// op's results on whole domains; none where NATTEN cannot.
template <class Op, class... Tensors>
std::vector<Tensor> call(
    const Op& op,
    const Domain& domain,
    double scale,
    const Tensors&... operands) {
  c10::List<bool> causal;
  for (const bool one : domain.causal) {
    causal.push_back(one);
  }
  return op.call(
      operands...,
      domain.kernel,
      domain.dilation,
      domain.stride,
      std::move(causal),
      scale);
}

bool takes(const Tensor& query, const Tensor& key, const Tensor& value) {
  const auto type = query.scalar_type();
  return (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) &&
      query.numel() > 0 && query.size(-2) == key.size(-2) &&
      query.size(-1) == value.size(-1) && is_installed(query);
}

/// What NATTEN attends to in the place of the piece, if it can. Kept with its
/// tables on the device, each copy of which would wait for it.
std::shared_ptr<const std::optional<Domain>> domain_of_piece(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims) {
  static const auto none = std::make_shared<const std::optional<Domain>>();
  if (!takes(query, key, value)) {
    return none;
  }
  static PlanCache<std::optional<Domain>> domains;
  const auto device = query.device();
  PlanKey plan;
  plan.add(encode(dims))
      .add(static_cast<int64_t>(device.type()))
      .add(static_cast<int64_t>(device.index()));
  return domains.find(plan, [&] { return domain_of(dims, device); });
}

} // namespace

std::optional<NeighborhoodOutput> attend_by_natten(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  const auto found = domain_of_piece(query, key, value, dims);
  const auto& domain = *found;
  if (!domain) {
    return std::nullopt;
  }
  const auto attended = call(
      natten_forward(),
      *domain,
      scale,
      extended(query, *domain, domain->queries),
      extended(key, *domain, domain->keys),
      extended(value, *domain, domain->keys));
  if (attended.empty()) {
    return std::nullopt;
  }
  return NeighborhoodOutput{
      cropped(attended[0], domain->queries),
      cropped(attended[1], domain->queries)};
}

std::optional<std::tuple<Tensor, Tensor, Tensor>> attend_by_natten_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  const auto found = domain_of_piece(query, key, value, dims);
  const auto& domain = *found;
  if (!domain) {
    return std::nullopt;
  }
  const auto grads = call(
      natten_backward(),
      *domain,
      scale,
      extended(grad, *domain, domain->queries),
      extended(query, *domain, domain->queries),
      extended(key, *domain, domain->keys),
      extended(value, *domain, domain->keys));
  if (grads.empty()) {
    return std::nullopt;
  }
  return std::make_tuple(
      cropped(grads[0], domain->queries),
      cropped(grads[1], domain->keys),
      cropped(grads[2], domain->keys));
}

} // namespace shardtensor::detail
