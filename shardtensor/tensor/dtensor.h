#pragma once

#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

// PyTorch's DTensors beside ShardTensors. A DTensor is a Python object without
// a class in C++: what it is, the Python package says. Programs without Python
// meet none.

/// How a DTensor lies, and the way to more of them.
class DTensorLayout {
 public:
  virtual ~DTensorLayout() = default;
  /// On the DTensor's own mesh.
  virtual const SpecPtr& spec() const = 0;
  /// A DTensor without history whose piece on this rank is `local`: with the
  /// same placements, each Partial made Replicate.
  virtual at::Tensor make(const at::Tensor& local) const = 0;
};
using DTensorLayoutPtr = std::shared_ptr<const DTensorLayout>;

class DTensorBridge {
 public:
  virtual ~DTensorBridge() = default;
  virtual bool is_dtensor(const at::Tensor& tensor) const = 0;
  /// The DTensor itself where a ShardSpec can say how it lies; else brought to
  /// Replicate by PyTorch: the pending norm of a DTensor, say; or the whole as
  /// a plain tensor, where FSDP has cut it. Differentiable.
  virtual at::Tensor plain_layout(const at::Tensor& dtensor) const = 0;
  /// This rank's piece, the memory itself, and the layout.
  virtual std::pair<at::Tensor, DTensorLayoutPtr> open(
      const at::Tensor& dtensor) const = 0;
  /// The smallest mesh that has the axes of both; null for unrelated ones.
  virtual MeshPtr joint_mesh(const MeshPtr& one, const MeshPtr& other)
      const = 0;
};
/// Kept until the process ends.
void set_dtensor_bridge(std::unique_ptr<DTensorBridge> bridge);

bool is_dtensor(const at::Tensor& tensor);

/// The smallest mesh that has the axes of both meshes; without a bridge one of
/// them. Raises, on every rank, where there is none; `op` is for the message.
/// Communication: a process group is made where the mesh was never used.
MeshPtr joint_mesh(const char* op, const MeshPtr& one, const MeshPtr& other);

/// A DTensor in a layout that the functions below take, or a plain tensor: see
/// DTensorBridge.
at::Tensor with_plain_layout(const at::Tensor& dtensor);

/// The layout of a DTensor on its own mesh. No communication.
SpecPtr dtensor_spec(const at::Tensor& dtensor);

/// The same pieces (no copy, shared version counter) as a ShardTensor on
/// `mesh`, which has the axes of the DTensor's; Replicate along the others.
/// Differentiable to any order: the gradient is a DTensor that lies as the
/// DTensor does (Partial made Replicate), in memory, too. No communication
/// forward.
at::Tensor from_dtensor(const at::Tensor& dtensor, const MeshPtr& mesh);

/// A ShardTensor brought to the layout and mesh of `like`, a DTensor or a
/// ShardTensor whose axes the tensor's mesh has; differentiable.
at::Tensor returned_as(const at::Tensor& tensor, const at::Tensor& like);

/// The same pieces on a mesh that has the axes of the tensor's, the same along
/// all others (in check mode ranks compare them). Differentiable. No
/// communication otherwise.
at::Tensor on_mesh(const at::Tensor& tensor, const MeshPtr& mesh);

} // namespace shardtensor
