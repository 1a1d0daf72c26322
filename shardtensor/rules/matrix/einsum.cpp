#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/einsum.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/tensor/dtensor.h"
#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/shard_tensor.h"

// einsum merges dims, for it is a product of matrices in the end. Two cut dims
// as one cannot stay cut as both are. So where a tensor is cut in several dims,
// ranks agree about layouts by its labels, and each does the einsum of its
// pieces. Elsewhere what einsum is made of has rules.

namespace shardtensor::detail {
namespace {

using at::Tensor;

struct Equation {
  std::vector<std::vector<int64_t>> operands; // labels
  std::vector<int64_t> output;
};

constexpr int64_t kEllipsis = 1000; // the last dim of "..."

/// The labels of a term such as "b...ij", "..." standing for `ellipsis` dims.
/// Nothing for a label that occurs twice and for what is no term.
std::optional<std::vector<int64_t>> labels_of_term(
    const std::string& term,
    int64_t ellipsis) {
  std::vector<int64_t> labels;
  const auto dots = term.find("...");
  for (size_t i = 0; i < term.size(); ++i) {
    if (i == dots) {
      for (int64_t dim = ellipsis; dim > 0; --dim) {
        labels.push_back(kEllipsis + dim - 1);
      }
      i += 2;
      continue;
    }
    if (std::isalpha(static_cast<unsigned char>(term[i])) == 0 ||
        std::ranges::find(labels, term[i]) != labels.end()) {
      return std::nullopt;
    }
    labels.push_back(term[i]);
  }
  return labels;
}

/// How many dims "..." stands for in a term of a tensor.
int64_t ellipsis_of(const std::string& term, const Tensor& tensor) {
  const auto dots = term.find("...");
  return dots == std::string::npos
      ? 0
      : tensor.dim() - static_cast<int64_t>(term.size()) + 3;
}

/// What einsum gives where no output is told: labels that occur once.
std::vector<int64_t> implied_output(
    const std::vector<std::vector<int64_t>>& operands,
    int64_t ellipsis) {
  std::map<int64_t, int64_t> counts;
  for (const auto& labels : operands) {
    for (const auto label : labels) {
      ++counts[label];
    }
  }
  auto output = *labels_of_term("...", ellipsis);
  for (const auto& [label, count] : counts) {
    if (count == 1 && label < kEllipsis) {
      output.push_back(label);
    }
  }
  return output;
}

/// Nothing for diagonals and for what einsum may refuse.
std::optional<Equation> parse(std::string text, at::TensorList tensors) {
  std::erase(text, ' ');
  const auto arrow = text.find("->");
  auto inputs = text.substr(0, arrow) + ",";
  Equation equation;
  int64_t ellipsis = 0;
  for (const auto& tensor : tensors) {
    const auto comma = inputs.find(',');
    if (comma == std::string::npos) {
      return std::nullopt;
    }
    const auto term = inputs.substr(0, comma);
    inputs.erase(0, comma + 1);
    const auto own = ellipsis_of(term, tensor);
    const auto labels = labels_of_term(term, own);
    if (!labels || static_cast<int64_t>(labels->size()) != tensor.dim()) {
      return std::nullopt;
    }
    equation.operands.push_back(*labels);
    ellipsis = std::max(ellipsis, own);
  }
  const auto output = arrow == std::string::npos
      ? std::optional(implied_output(equation.operands, ellipsis))
      : labels_of_term(text.substr(arrow + 2), ellipsis);
  if (!inputs.empty() || !output) {
    return std::nullopt;
  }
  equation.output = *output;
  return equation;
}

/// The extents of the output. Dims that are broadcast lose their label; nothing
/// where extents don't fit.
std::optional<std::vector<int64_t>> find_sizes(
    Equation& equation,
    at::TensorList tensors) {
  std::map<int64_t, int64_t> extents;
  const auto visit = [&](const auto& see) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      for (int64_t dim = 0; dim < tensors[i].dim(); ++dim) {
        see(equation.operands[i][dim], tensors[i].size(dim));
      }
    }
  };
  visit([&](int64_t label, int64_t size) {
    auto& extent = extents.emplace(label, size).first->second;
    extent = extent == 1 ? size : extent;
  });
  bool fits = true;
  visit([&](int64_t& label, int64_t size) {
    const auto extent = extents.at(label);
    fits = fits && (size == extent || size == 1);
    label = size == extent ? label : kPrivate;
  });
  std::vector<int64_t> sizes;
  for (const auto label : equation.output) {
    const auto found = extents.find(label);
    if (!fits || found == extents.end()) {
      return std::nullopt;
    }
    sizes.push_back(found->second);
  }
  return sizes;
}

/// The mesh of the operands, where the pieces of ranks are to be multiplied.
MeshPtr mesh_of_pieces(at::TensorList tensors) {
  MeshPtr mesh;
  bool is_cut_twice = false;
  for (const auto& tensor : tensors) {
    if (tensor.scalar_type() != tensors.front().scalar_type() ||
        tensor.layout() != at::kStrided || is_dtensor(tensor)) {
      return nullptr;
    }
    if (is_shard_tensor(tensor)) {
      const auto& own = spec(tensor);
      if (own->has_partial() || (mesh && mesh != own->mesh())) {
        return nullptr;
      }
      mesh = own->mesh();
      is_cut_twice = is_cut_twice || own->sharded_dims().size() > 1;
    }
  }
  return is_cut_twice ? mesh : nullptr;
}

/// Whose gradients are terms of a sum along axes that cut other operands alone.
Tensor piece_of_operand(
    const Tensor& operand,
    const SpecPtr& layout,
    const std::vector<int64_t>& axes) {
  const auto& mesh = layout->mesh();
  const auto dims = layout->sharded_dims();
  const bool is_box = std::ranges::all_of(dims, [&](int64_t dim) {
    return layout->partition(dim).is_contiguous();
  });
  if (!is_shard_tensor(operand) && is_box) {
    auto piece = shared_weights({operand}, mesh, axes)[0];
    for (const auto dim : dims) {
      const auto own = layout->interval(dim);
      piece = piece.narrow(dim, own.begin, own.extent());
    }
    return piece;
  }
  auto placements = layout->placements();
  for (const auto axis : axes) {
    if (!placements[axis].is_shard()) {
      placements[axis] = Placement::partial();
    }
  }
  return to_local(
      redistribute(promote(operand, mesh), layout),
      with_placements(layout, std::move(placements)));
}

/// Those that the result shows on one device.
std::vector<int64_t> strides_of_result(
    c10::string_view equation,
    at::TensorList tensors,
    at::OptionalIntArrayRef path) {
  std::vector<Tensor> shapes;
  for (const auto& tensor : tensors) {
    shapes.push_back(
        at::empty_strided(
            tensor.sizes(),
            tensor.strides(),
            at::TensorOptions(at::kMeta).dtype(tensor.dtype())));
  }
  return at::einsum(equation, shapes, path).strides().vec();
}

/// How ranks do an einsum of their pieces.
struct EinsumPlan {
  ProductLayouts layouts;
  std::vector<int64_t> axes; // along which ranks have different pieces
  std::vector<int64_t> strides; // of the result
};

/// None for what is not done so.
std::optional<EinsumPlan> plan_einsum(
    c10::string_view text,
    at::TensorList tensors,
    at::OptionalIntArrayRef path,
    const MeshPtr& mesh) {
  auto equation = parse(std::string(text), tensors);
  const auto sizes = equation ? find_sizes(*equation, tensors) : std::nullopt;
  if (!sizes) {
    return std::nullopt;
  }
  std::vector<SpecPtr> specs;
  for (const auto& tensor : tensors) {
    specs.push_back(
        is_shard_tensor(tensor) ? spec(tensor)
                                : make_replicated(mesh, tensor.sizes().vec()));
  }
  EinsumPlan plan{
      product_layouts(specs, equation->operands, equation->output, *sizes),
      {},
      strides_of_result(text, tensors, path)};
  for (int64_t axis = 0; axis < mesh->axes(); ++axis) {
    if (std::ranges::any_of(plan.layouts.operands, [&](const SpecPtr& layout) {
          return layout->placement(axis).is_shard();
        })) {
      plan.axes.push_back(axis);
    }
  }
  return plan;
}

/// The plan that was made for such operands before, or a new one.
std::shared_ptr<const std::optional<EinsumPlan>> find_plan(
    c10::string_view text,
    at::TensorList tensors,
    at::OptionalIntArrayRef path,
    const MeshPtr& mesh) {
  static PlanCache<std::optional<EinsumPlan>> plans;
  PlanKey key;
  for (const char letter : text) {
    key.add(int64_t{letter});
  }
  key.add(int64_t{path.has_value()}).add(path.value_or(at::IntArrayRef()));
  for (const auto& tensor : tensors) {
    key.add(is_shard_tensor(tensor) ? spec(tensor) : SpecPtr())
        .add(tensor.sizes())
        .add(tensor.strides());
  }
  return plans.find(
      key, [&] { return plan_einsum(text, tensors, path, mesh); });
}

/// At most two along each dim, to try whether kernels take the dtype: an empty
/// piece would not ask.
std::vector<Tensor> few_zeros_like(at::TensorList tensors) {
  std::vector<Tensor> zeros;
  for (const auto& tensor : tensors) {
    auto sizes = tensor.sizes().vec();
    for (auto& size : sizes) {
      size = std::min<int64_t>(size, 2);
    }
    zeros.push_back(at::zeros(sizes, tensor.options()));
  }
  return zeros;
}

Tensor einsum_of_pieces(
    c10::string_view text,
    at::TensorList tensors,
    at::OptionalIntArrayRef path,
    const EinsumPlan& plan) {
  if (at::isIntegralType(tensors[0].scalar_type(), /*includeBool=*/true)) {
    at::einsum(text, few_zeros_like(tensors), path);
  }
  std::vector<Tensor> operands;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (must_promote(tensors[i])) {
      check_promotion(tensors[i], "aten::einsum");
    }
    operands.push_back(
        piece_of_operand(tensors[i], plan.layouts.operands[i], plan.axes));
  }
  return from_local_strided(
      at::einsum(text, operands, path), plan.layouts.output, plan.strides);
}

Tensor einsum_function(
    c10::DispatchKeySet keys,
    c10::string_view text,
    at::TensorList tensors,
    at::OptionalIntArrayRef path) {
  if (const auto mesh = mesh_of_pieces(tensors)) {
    const auto plan = find_plan(text, tensors, path, mesh);
    if (*plan) {
      return einsum_of_pieces(text, tensors, path, **plan);
    }
  }
  return without_rule<at::_ops::einsum>(keys, text, tensors, path);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("einsum", function_rule<at::_ops::einsum, einsum_function>);
}

} // namespace shardtensor::detail
