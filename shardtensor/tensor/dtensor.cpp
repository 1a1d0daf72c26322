#include "shardtensor/tensor/dtensor.h"

#include <algorithm>

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/check_mode.h"
#include "shardtensor/layout/mesh_axes.h"
#include "shardtensor/tensor/equal_on_ranks.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

using namespace detail;
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

DTensorBridge* bridge = nullptr;

/// What a gradient must be like: where it lies, and in which order in memory,
/// for fused optimizers walk through parameter and gradient side by side.
struct Target {
  DTensorLayoutPtr layout;
  SpecPtr spec; // on the mesh of the ShardTensors, without Partial
  std::vector<int64_t> local_strides;
  bool dense;
};

/// The local tensor for somebody who keeps it and may write into it.
at::Tensor own_local(const at::Tensor& tensor, const Target& target) {
  const auto local = impl_of(tensor)->local().detach();
  const bool alone =
      tensor.use_count() == 1 && local.storage().use_count() == 2;
  if (alone && local.strides() == at::IntArrayRef(target.local_strides)) {
    return local;
  }
  if (!target.dense) {
    return local.clone(at::MemoryFormat::Contiguous);
  }
  return at::empty_strided(local.sizes(), target.local_strides, local.options())
      .copy_(local);
}

struct ToDTensorBackward : Node {
  ToDTensorBackward(Target target) : target_(std::move(target)) {}
  std::string name() const override {
    return "ShardTensorToDTensorBackward";
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    const auto grad = promote(grads[0], target_.spec->mesh());
    return {redistribute(grad, target_.spec)};
  }
  Target target_;
};

/// A ShardTensor as the DTensor that `target` says.
at::Tensor dtensor_from(at::Tensor tensor, const Target& target) {
  const auto moved = redistribute(tensor, target.spec);
  tensor.reset(); // so that own_local sees who else holds it
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = target.layout->make(own_local(moved, target));
  }
  connect<ToDTensorBackward>(result, moved, target);
  return result;
}

struct FromDTensorBackward : Node {
  FromDTensorBackward(Target target) : target_(std::move(target)) {}
  std::string name() const override {
    return "ShardTensorFromDTensorBackward";
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined() || is_dtensor(grads[0])) {
      return {grads[0]};
    }
    auto grad = promote(grads[0], target_.spec->mesh());
    grads.clear();
    return {dtensor_from(std::move(grad), target_)};
  }
  Target target_;
};

Target target_of(
    const at::Tensor& local,
    DTensorLayoutPtr layout,
    const MeshPtr& mesh) {
  const auto spec = without_partial(on_mesh(layout->spec(), mesh));
  return {
      std::move(layout),
      spec,
      local.strides().vec(),
      local.is_non_overlapping_and_dense()};
}

/// In check mode: raises when the ranks along the axes that only `mesh` has do
/// not hold the same.
void check_equal_along_new_axes(
    const at::Tensor& local,
    const Mesh& own,
    const Mesh& mesh) {
  if (!check_mode()) {
    return;
  }
  const auto known = *axes_in(own, mesh);
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < mesh.axes(); ++axis) {
    if (std::find(known.begin(), known.end(), axis) == known.end()) {
      axes.push_back(axis);
    }
  }
  TORCH_CHECK_VALUE(
      !differs_along(local, mesh, axes),
      "a ShardTensor on ",
      own,
      " meets a tensor on ",
      mesh,
      ", so it must be equal along all other axes, but it differs; put it on "
      "the larger mesh");
}

/// The one that has the other's axes, if one has: what a program without device
/// meshes knows.
MeshPtr larger_mesh(const MeshPtr& one, const MeshPtr& other) {
  return axes_in(*one, *other) ? other : axes_in(*other, *one) ? one : nullptr;
}

} // namespace

void set_dtensor_bridge(std::unique_ptr<DTensorBridge> value) {
  bridge = value.release();
}

bool is_dtensor(const at::Tensor& tensor) {
  return bridge && tensor.defined() &&
      tensor.key_set().has(c10::DispatchKey::Python) &&
      bridge->is_dtensor(tensor);
}

MeshPtr joint_mesh(const char* op, const MeshPtr& one, const MeshPtr& other) {
  if (one == other) {
    return one;
  }
  const auto joint =
      bridge ? bridge->joint_mesh(one, other) : larger_mesh(one, other);
  TORCH_CHECK_VALUE(
      joint,
      op,
      ": expected all tensors on one mesh or on axes of one device mesh, got ",
      *one,
      " and ",
      *other);
  return joint;
}

at::Tensor with_plain_layout(const at::Tensor& dtensor) {
  return bridge->plain_layout(dtensor);
}

SpecPtr dtensor_spec(const at::Tensor& dtensor) {
  return bridge->open(dtensor).second->spec();
}

at::Tensor from_dtensor(const at::Tensor& dtensor, const MeshPtr& mesh) {
  const auto [local, layout] = bridge->open(dtensor);
  check_no_tangent("a DTensor beside ShardTensors", dtensor);
  const auto result =
      wrap(local.detach(), on_mesh(layout->spec(), mesh), dtensor.strides());
  if (!dtensor.is_inference() && !result.is_inference()) {
    torch::autograd::impl::set_version_counter(
        result, torch::autograd::impl::version_counter(dtensor));
  }
  if (needs_node(dtensor)) {
    connect<FromDTensorBackward>(
        result, dtensor, target_of(local, layout, mesh));
  }
  return result;
}

at::Tensor returned_as(const at::Tensor& tensor, const at::Tensor& like) {
  const auto& mesh = spec(tensor)->mesh();
  if (is_dtensor(like)) {
    const auto [local, layout] = bridge->open(like);
    return dtensor_from(tensor, target_of(local, layout, mesh));
  }
  const auto& wanted = spec(like);
  return from_local(
      to_local(redistribute(tensor, on_mesh(wanted, mesh))), wanted);
}

at::Tensor on_mesh(const at::Tensor& tensor, const MeshPtr& mesh) {
  const auto& own = spec(tensor);
  if (own->mesh() == mesh) {
    return tensor;
  }
  const auto wanted = on_mesh(own, mesh);
  check_equal_along_new_axes(impl_of(tensor)->local(), *own->mesh(), *mesh);
  return from_local(to_local(tensor), wanted);
}

} // namespace shardtensor
