#include "shardtensor/tensor/shard_tensor.h"

#include <algorithm>
#include <numeric>
#include <typeinfo>

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "shardtensor/comm/check_mode.h"
#include "shardtensor/comm/own_operator.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/tensor/dtensor.h"
#include "shardtensor/tensor/equal_on_ranks.h"
#include "shardtensor/tensor/gradients/completing_node.h"
#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/order_in_memory.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

using namespace detail;
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// A gradient of a whole ShardTensor: one itself, or plain, which some of
/// ATen's formulas make, the same on every rank. Not what is inside a
/// transform.
bool is_gradient_of_all(const at::Tensor& grad) {
  return grad.defined() &&
      (is_shard_tensor(grad) || !grad.key_set().has_any(kTransformKeys));
}

/// The terms that make one element where they are averaged, else 1: a term has
/// this part of the whole tensor's gradient.
int64_t averaged_terms(const ShardSpec& spec) {
  int64_t terms = 1;
  for (const int64_t axis : spec.partial_axes()) {
    const bool averages = spec.placement(axis).reduce == Reduce::Avg;
    terms *= averages ? spec.mesh()->ranks(axis) : 1;
  }
  return terms;
}

/// Backward of to_local: the ranks' gradients make one ShardTensor again, in
/// the layout of the tensor they belong to.
struct ToLocalBackward : Node {
  ToLocalBackward(const SpecPtr& grad_spec, const SpecPtr& spec)
      : spec_(without_partial(spec)),
        grad_spec_(grad_spec ? grad_spec : spec_),
        terms_(grad_spec ? 1 : averaged_terms(*spec)) {}
  std::string name() const override {
    return "ShardTensorToLocalBackward";
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    // A recomputation may have kept sharded what was gathered before.
    const auto grad = redistribute(
        layout_of(grads[0]) ? grads[0] : from_local(grads[0], grad_spec_),
        spec_);
    return {terms_ == 1 ? grad : grad * terms_};
  }
  SpecPtr spec_;
  SpecPtr grad_spec_;
  int64_t terms_;
};

/// Whether each rank holds the same rows in both.
bool cuts_alike(const ShardSpec& a, const ShardSpec& b) {
  if (a.mesh() != b.mesh() || a.sizes() != b.sizes()) {
    return false;
  }
  for (size_t axis = 0; axis < a.placements().size(); ++axis) {
    const auto& one = a.placements()[axis];
    const auto& other = b.placements()[axis];
    if ((one.is_shard() || other.is_shard()) && one != other) {
      return false;
    }
  }
  return a.partitions() == b.partitions();
}

/// Backward of from_local: the part of the gradient, in the layout grad_spec.
struct FromLocalBackward : Node {
  FromLocalBackward(const SpecPtr& spec, const SpecPtr& grad_spec)
      : spec_(spec),
        grad_spec_(grad_spec ? grad_spec : without_partial(spec)) {}
  std::string name() const override {
    return "ShardTensorFromLocalBackward";
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    const auto& placements = spec_->placements();
    TORCH_CHECK_NOT_IMPLEMENTED(
        std::all_of(placements.begin(), placements.end(), is_linear),
        "from_local: the terms of ",
        to_string(*spec_),
        " have no gradient, expected a sum or an average of terms");
    const auto grad = to_local(tangent_as(grads[0], grad_spec_), read_as());
    const auto terms = averaged_terms(*spec_);
    return {terms == 1 ? grad : grad / terms};
  }

  /// How gradients of the result are read. Ranks use the gradient of a term for
  /// different work: theirs sum again.
  SpecPtr read_as() const {
    auto placements = without_partial(grad_spec_)->placements();
    for (const int64_t axis : spec_->partial_axes()) {
      if (!grad_spec_->placement(axis).is_partial()) {
        placements[axis] = Placement::partial();
      }
    }
    return with_placements(grad_spec_, std::move(placements));
  }

  SpecPtr spec_; // of the wrapper
  SpecPtr grad_spec_;
};

struct RedistributeBackward : Node {
  explicit RedistributeBackward(SpecPtr spec) : spec_(std::move(spec)) {}
  std::string name() const override {
    return "ShardTensorRedistributeBackward";
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined() || !layout_of(grads[0])) {
      return {grads[0]};
    }
    return {redistribute(grads[0], spec_)};
  }
  SpecPtr spec_;
};

/// Backward of promote: what the shards contributed, summed, as the plain
/// gradient of the plain parameter.
struct PromoteBackward : CompletingNode {
  explicit PromoteBackward(MeshPtr mesh) : mesh_(std::move(mesh)) {}
  std::string name() const override {
    return "ShardTensorPromoteBackward";
  }
  variable_list complete_from(variable_list&& grads) override {
    if (!is_shard_tensor(grads[0])) {
      return {grads[0]};
    }
    const auto terms = as_terms(grads[0]);
    const auto axes = spec(terms)->partial_axes();
    return complete({to_local(terms)}, mesh_, axes);
  }
  // Partial sums stay, everything else becomes Replicate.
  static at::Tensor as_terms(const at::Tensor& grad) {
    auto placements = spec(grad)->placements();
    for (auto& placement : placements) {
      if (placement != Placement::partial()) {
        placement = Placement::replicate();
      }
    }
    return redistribute(grad, placements);
  }
  MeshPtr mesh_;
};

/// Lives as long as the leaf, which it looks at anew: its data may be set.
struct LeafGradientHook : torch::autograd::FunctionPreHook {
  explicit LeafGradientHook(const ShardTensorImpl* leaf) : leaf_(leaf) {}
  variable_list operator()(const variable_list& grads) override {
    auto result = grads;
    if (is_gradient_of_all(result[0])) {
      if (result[0].sizes() != leaf_->sizes()) { // unsqueeze_, say, since
        result[0] = result[0].expand(leaf_->sizes());
      }
      result[0] = tangent_as(result[0], without_partial(leaf_->spec()));
    }
    return result;
  }
  const ShardTensorImpl* leaf_;
};

/// Of a wrapper and a plain tensor of one memory: autograd sees what is written
/// into either, where the other was saved.
void share_version_counter(const at::Tensor& from, const at::Tensor& to) {
  if (!from.is_inference() && !to.is_inference()) {
    torch::autograd::impl::set_version_counter(
        to, torch::autograd::impl::version_counter(from));
  }
}

// ---- inside of transforms ---------------------------------------------------

// See Note [Transforms]. An operator's kernel for autograd meets what a level
// wraps, and records it there; the one above autograd a ShardTensor.

using OfTransform = at::Tensor(const at::Tensor&, int64_t);

const auto& to_local_operator() {
  static const auto op =
      find_own_operator<OfTransform>("shardtensor::_to_local");
  return op;
}
const auto& from_local_operator() {
  static const auto op =
      find_own_operator<OfTransform>("shardtensor::_from_local");
  return op;
}
const auto& redistribute_operator() {
  static const auto op =
      find_own_operator<OfTransform>("shardtensor::_redistribute");
  return op;
}

using OperatorOfTransform = c10::TypedOperatorHandle<OfTransform>;

/// Not of autograd's batched gradients, whose older vmap has no rule for these.
bool is_of_level(const at::Tensor& tensor) {
  return is_transformed(tensor) &&
      !tensor.key_set().has(c10::DispatchKey::Batched);
}

at::Tensor call_in_transform(
    const OperatorOfTransform& op,
    const at::Tensor& tensor,
    const SpecPtr& spec) {
  const SpecOfCall of_call(spec);
  return op.call(tensor, of_call.place());
}

at::Tensor call_inside(
    const OperatorOfTransform& op,
    c10::DispatchKeySet keys,
    const at::Tensor& tensor,
    int64_t place) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(keys & c10::after_autograd_keyset, tensor, place);
}

at::Tensor to_local_inside(const at::Tensor& tensor, int64_t place) {
  return to_local(tensor, spec_of_call(place));
}
at::Tensor from_local_inside(const at::Tensor& local, int64_t place) {
  return from_local(local, spec_of_call(place));
}
at::Tensor redistribute_inside(const at::Tensor& tensor, int64_t place) {
  return redistribute(tensor, spec_of_call(place));
}

at::Tensor to_local_of_level(
    c10::DispatchKeySet keys,
    const at::Tensor& tensor,
    int64_t place) {
  const auto layout = layout_of(tensor);
  if (!is_transformed(tensor) || !layout) {
    return to_local_inside(tensor, place);
  }
  const auto result = call_inside(to_local_operator(), keys, tensor, place);
  connect<ToLocalBackward>(result, tensor, spec_of_call(place), layout);
  carry_tangent(result, tensor, [&](const auto& t) {
    return to_local(tangent_as(t, layout));
  });
  return result;
}

at::Tensor from_local_of_level(
    c10::DispatchKeySet keys,
    const at::Tensor& local,
    int64_t place) {
  if (!is_transformed(local)) {
    return from_local_inside(local, place);
  }
  const auto spec = spec_of_call(place);
  const auto result = call_inside(from_local_operator(), keys, local, place);
  connect<FromLocalBackward>(result, local, spec, SpecPtr());
  carry_tangent(
      result, local, [&](const auto& t) { return from_local(t, spec); });
  return result;
}

at::Tensor redistribute_of_level(
    c10::DispatchKeySet keys,
    const at::Tensor& tensor,
    int64_t place) {
  const auto from = layout_of(tensor);
  if (!is_transformed(tensor) || !from) {
    return redistribute_inside(tensor, place);
  }
  const auto to = spec_of_call(place);
  const auto result = call_inside(redistribute_operator(), keys, tensor, place);
  connect<RedistributeBackward>(result, tensor, without_partial(from));
  carry_tangent(result, tensor, [&](const auto& t) {
    return redistribute(tangent_as(t, from), to);
  });
  return result;
}

TORCH_LIBRARY_IMPL(shardtensor, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("_to_local", to_local_inside);
  m.impl("_redistribute", redistribute_inside);
}
TORCH_LIBRARY_IMPL(shardtensor, Autograd, m) {
  m.impl("_to_local", to_local_of_level);
  m.impl("_from_local", from_local_of_level);
  m.impl("_redistribute", redistribute_of_level);
}
TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("_to_local", to_local_inside);
  m.impl("_from_local", from_local_inside);
  m.impl("_redistribute", redistribute_inside);
}

} // namespace

at::Tensor tangent_as(const at::Tensor& tangent, const SpecPtr& spec) {
  return redistribute(promote(tangent, spec->mesh()), spec);
}

const SpecPtr& spec(const at::Tensor& tensor) {
  return impl_of(tensor)->spec();
}

at::Tensor from_local(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::MemoryFormat format,
    const SpecPtr& grad_spec) {
  TORCH_CHECK_VALUE(spec, "from_local: no spec, expected one");
  return from_local_strided(
      local, spec, strides_of_format(format, spec->sizes()), grad_spec);
}

at::Tensor detail::from_local_strided(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::IntArrayRef strides,
    const SpecPtr& grad_spec) {
  TORCH_CHECK_TYPE(
      !is_shard_tensor(local),
      "from_local: expected a plain tensor, got a ShardTensor of ",
      to_string(*shardtensor::spec(local)));
  TORCH_CHECK_VALUE(
      !grad_spec || cuts_alike(*spec, *grad_spec),
      "from_local: expected a gradient in the pieces of ",
      to_string(*spec),
      ", got ",
      to_string(*grad_spec));
  if (is_of_level(local)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !grad_spec,
        "from_local: torch.func makes its own gradients, expected no layout for "
        "them, got ",
        to_string(*grad_spec));
    return call_in_transform(from_local_operator(), local, spec);
  }
  const OutsideTransforms of_all_levels;
  auto result = wrap(local.detach(), spec, strides);
  share_version_counter(local, result);
  connect<FromLocalBackward>(result, local, spec, grad_spec);
  carry_tangent(result, local, [&](const auto& t) {
    return from_local_strided(t, spec, strides);
  });
  return result;
}

at::Tensor to_local(const at::Tensor& tensor, const SpecPtr& grad_spec) {
  if (is_transformed(tensor) && layout_of(tensor)) {
    return call_in_transform(to_local_operator(), tensor, grad_spec);
  }
  const OutsideTransforms of_all_levels;
  auto* impl = impl_of(tensor);
  if (impl->constant_view()) {
    impl->separate_elements(); // whoever holds it may write
  }
  auto result = impl->local().detach();
  share_version_counter(tensor, result);
  if (needs_node(tensor)) {
    connect<ToLocalBackward>(result, tensor, grad_spec, impl->spec());
  }
  carry_tangent(result, tensor, [&](const auto& t) {
    return to_local(tangent_as(t, impl->spec()));
  });
  return result;
}

at::Tensor redistribute(const at::Tensor& tensor, const SpecPtr& to) {
  TORCH_CHECK_VALUE(to, "redistribute: no spec, expected one");
  if (is_transformed(tensor) && layout_of(tensor)) {
    return layout_of(tensor) == to
        ? tensor
        : call_in_transform(redistribute_operator(), tensor, to);
  }
  const OutsideTransforms of_all_levels;
  const auto* impl = impl_of(tensor);
  const auto from = impl->spec();
  if (from == to) {
    return tensor;
  }
  at::Tensor local;
  {
    at::NoGradGuard no_grad;
    local = redistribute_local(
        impl->local(), from, to, tensor.suggest_memory_format());
    if (local.is_alias_of(impl->local())) {
      local = local.clone();
    }
  }
  auto result = wrap(local, to, detail::order_in_memory(tensor));
  connect<RedistributeBackward>(result, tensor, without_partial(from));
  const auto& placements = from->placements();
  if (!std::all_of(placements.begin(), placements.end(), is_linear)) {
    check_no_tangent("reducing a Partial that is no sum", tensor);
  }
  carry_tangent(result, tensor, [&](const auto& t) {
    return redistribute(tangent_as(t, from), to);
  });
  return result;
}

at::Tensor redistribute(
    const at::Tensor& tensor,
    const std::vector<Placement>& placements,
    const ShardSpec::Partitions& partitions) {
  return redistribute(
      tensor, with_placements(spec_inside(tensor), placements, partitions));
}

void keep_gradient_layout(const at::Tensor& tensor) {
  if (!tensor.is_leaf()) {
    return;
  }
  // The first hook that a program registers replaces ours, for PyTorch keeps
  // one list of hooks in Python or one in C++ and starts it anew: Python's
  // register_hook calls this again.
  auto& hooks =
      torch::autograd::impl::materialize_autograd_meta(tensor)->hooks_;
  for (const auto& hook : hooks) {
    const auto& known = *hook; // every operator asks: no dynamic_cast
    if (typeid(known) == typeid(LeafGradientHook)) {
      return;
    }
  }
  hooks.insert(
      hooks.begin(), std::make_unique<LeafGradientHook>(impl_of(tensor)));
}

at::Tensor full_tensor(const at::Tensor& tensor, const SpecPtr& grad_spec) {
  const auto whole = replicated(spec_inside(tensor));
  // A deferred term of a plain gradient is made complete by averaging.
  const bool averages = gradient_policy() == GradientPolicy::Deferred;
  const auto average = averages
      ? with_placements(
            whole,
            std::vector<Placement>(
                whole->placements().size(), Placement::partial(Reduce::Avg)))
      : nullptr;
  return to_local(redistribute(tensor, whole), grad_spec ? grad_spec : average);
}

void check_equal_on_all_ranks(const at::Tensor& tensor, const Mesh& mesh) {
  if (!check_mode() || !mesh.contains_this_rank()) {
    return;
  }
  std::vector<int64_t> axes(mesh.axes());
  std::iota(axes.begin(), axes.end(), 0);
  TORCH_CHECK_VALUE(
      !differs_along(tensor, mesh, axes),
      "a plain tensor of sizes ",
      tensor.sizes(),
      " meets a ShardTensor, so it must be equal on all ranks, but it differs; "
      "broadcast it first, or make it a ShardTensor with from_local()");
}

at::Tensor promote(const at::Tensor& tensor, const MeshPtr& mesh) {
  if (layout_of(tensor)) {
    return tensor;
  }
  TORCH_CHECK_VALUE(mesh, "promote: no mesh, expected one");
  if (is_of_level(tensor)) {
    return from_local(tensor, make_replicated(mesh, tensor.sizes().vec()));
  }
  const OutsideTransforms of_all_levels;
  if (is_dtensor(tensor)) {
    const auto readable = with_plain_layout(tensor);
    return is_dtensor(readable) ? from_dtensor(readable, mesh)
                                : promote(readable, mesh);
  }
  // Not a TypeError, see check_promotion.
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == at::kStrided,
      "got a plain tensor of layout ",
      tensor.layout(),
      " beside a ShardTensor, whose pieces are strided; use to_dense(), or "
      "full_tensor() or to_local() of the ShardTensor");
  // Forward mode's zeros have no memory, which a wrapper doesn't show.
  const auto local = tensor._is_zerotensor()
      ? at::zeros(tensor.sizes(), tensor.options())
      : tensor.detach();
  check_equal_on_all_ranks(local, *mesh);
  auto result = wrap(
      local,
      make_replicated(mesh, tensor.sizes().vec()),
      tensor.is_contiguous() ? at::IntArrayRef() : local.strides());
  share_version_counter(tensor, result);
  check_no_tangent("a plain tensor beside ShardTensors", tensor);
  connect<PromoteBackward>(result, tensor, mesh);
  return result;
}

} // namespace shardtensor
