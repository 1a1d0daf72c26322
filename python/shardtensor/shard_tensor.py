"""The tensor that users hold."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C, anomaly, handlers, modes, traced
from shardtensor.compile import library_digest, order_communication
from shardtensor.device_mesh import core_mesh, default_mesh, device_of
from shardtensor.infer import errors_while_asking, from_pieces, infer_layout
from shardtensor.placements import as_list, check_placements, replicated, to_core
from shardtensor.spec import OpenSpec, ShardTensorSpec, Sizes, make_spec, partitions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from torch.utils.hooks import RemovableHandle

    from shardtensor.placements import Placements


class ShardTensor(torch.Tensor, metaclass=handlers.Registries):
    """A tensor of global shape of which each rank holds one piece.

    It goes through unchanged PyTorch code: operators give the numbers of one
    device and communicate where they must. Plain tensors that meet it are the
    same on every rank (parameters, constants) and stay plain.

        x = ShardTensor.from_local(piece, mesh, (Shard(2),))
        model(x).square().mean().backward()

    Thread safety / ordering: every rank runs the same operators in the same
    order; `repr`, shapes and layouts never communicate.
    """

    # Disabled until somebody registers a function handler, see handlers.py.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(
        cls,
        local_tensor: torch.Tensor,
        spec: ShardTensorSpec | None = None,
        *,
        requires_grad: bool = False,
    ) -> ShardTensor:
        """A leaf of a known layout, without history: PhysicsNeMo's first choice
        for what an operator of one's own gives; from_spec is differentiable."""
        if isinstance(spec, OpenSpec):
            spec = spec.of(local_tensor)
        if not isinstance(spec, ShardTensorSpec):
            raise TypeError(
                "a ShardTensor is made by ShardTensor.from_local, from_spec, "
                "from_dtensor, scatter_tensor, distribute_tensor, a factory such as "
                "zeros, or ShardTensor(local_tensor, spec)"
            )
        leaf = _C.from_local(local_tensor.detach(), spec._core)
        return leaf.requires_grad_(requires_grad)

    def __init__(self, *_, **__):
        pass

    # ---- making one ---------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> ShardTensor:
        """The tensor of which each rank holds `local_tensor`, differentiable, without
        a copy but to the mesh's kind of device. `sharding_shapes` says how the
        others' pieces look: "infer" asks them (one small gather); "chunk" takes
        torch.chunk's split of global_shape (of equal pieces without it); a dict
        gives, for each mesh axis, the local shapes along it, of this tensor or of
        another that is cut alike. The last two do not communicate.
        Default: the mesh entered or DistributedManager's, Replicate.

        As a DTensor's: `shape` is global_shape, `stride` what the whole tensor shows,
        contiguous by default; run_check raises on all ranks where replicas differ, as
        check mode does (two reductions of the piece and one of a number).
        `grad_placements` are those that the gradient is brought to, by default
        `placements` with Partial made Replicate; say Partial() where the ranks'
        gradients of a replicated piece shall stay terms."""
        mesh = default_mesh() if device_mesh is None else device_mesh
        if placements is None:
            placements = replicated(mesh.ndim)
        if global_shape is None:
            global_shape = shape
        elif shape is not None:
            raise TypeError("from_local: shape is global_shape, expected one of them")
        more = run_check or grad_placements is not None
        if traced.is_tracing() and traced.is_traceable(stride, global_shape, more):
            if sharding_shapes == "infer" and shape is not None:
                sharding_shapes = "chunk"  # a DTensor's: nobody can be asked here
            if traced.is_known_alone(sharding_shapes, placements):
                local_tensor = _on_device_of(mesh, local_tensor)
                return traced.from_local(
                    local_tensor, mesh, placements, sharding_shapes, global_shape
                )
        return _from_local(
            local_tensor,
            mesh,
            placements,
            sharding_shapes,
            global_shape,
            stride,
            grad_placements,
            run_check,
        )

    @staticmethod
    def from_spec(local_tensor: torch.Tensor, spec: ShardTensorSpec) -> ShardTensor:
        """The same with a known layout. No communication."""
        if traced.is_tracing():
            return traced.from_spec(local_tensor, spec)
        return _C.from_local(local_tensor, spec._core)

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> ShardTensor:
        """The same pieces, differentiable: a leaf gets its `.grad`, a DTensor
        that lies as it does, and the result keeps its own, too. A ShardTensor
        comes back as it is. No communication."""
        import shardtensor.dtensor  # noqa: F401  tells the core what a DTensor is

        if isinstance(dtensor, ShardTensor):
            return dtensor
        result = _C.from_dtensor(dtensor)
        if dtensor.is_leaf and result.requires_grad:
            result.retain_grad()
        return result

    def register_hook(self, hook: Callable) -> RemovableHandle:
        """As of any tensor: it gets the gradient, of a leaf in the leaf's layout."""
        handle = super().register_hook(hook)
        _C.keep_gradient_layout(self)  # its hook, which PyTorch has dropped
        return handle

    # ---- leaving ------------------------------------------------------------

    def to_dtensor(self) -> DTensor:
        """As a DTensor, differentiable. A DTensor is always cut as torch.chunk
        does: another split is redistributed first."""
        from torch.distributed.tensor import DTensor

        even = make_spec(self.device_mesh, self.shape, self.placements)._core
        # A DTensor hands each term the whole gradient, of an average, too.
        grad = even.without_partial()
        local = _C.to_local(_C.redistribute(self, even), grad)
        return DTensor.from_local(
            local,
            self.device_mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride(),
        )

    def to_local(
        self, grad_placements: Sequence[Placement] | None = None
    ) -> torch.Tensor:
        """This rank's piece as a plain tensor, differentiable, no copy. The
        ranks' gradients of it are read as `grad_placements`: by default the
        tensor's own placements with Partial made Replicate; say Partial()
        where ranks use a replicated tensor for different work. A view that is a copy
        (a row of a cut dim) fetches what was written into the piece since: write on
        all ranks, or take the view afterwards."""
        return _C.to_local(self, self._grad_spec(grad_placements))

    def full_tensor(
        self, grad_placements: Sequence[Placement] | None = None
    ) -> torch.Tensor:
        """The whole tensor, plain, on every rank; differentiable, its gradient
        the same on every rank (else see grad_placements in to_local)."""
        return _C.full_tensor(self, self._grad_spec(grad_placements))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sizes: Sizes | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
    ) -> ShardTensor:
        """The same tensor in another layout, differentiable. `sizes` asks for
        an uneven split, {dim: piece sizes}; a dim that stays cut by the same
        mesh axes keeps its split otherwise. Every element moves at most once.
        `async_op` is taken for DTensor's sake: the exchange is done on return.
        It travels in forward_dtype, its own by default, which the result has."""
        del async_op
        if device_mesh is not None and core_mesh(device_mesh) != self._core.mesh:
            raise ValueError(
                f"redistribute: the tensor is on {self.device_mesh}, it cannot "
                f"move to {device_mesh}; use full_tensor() and distribute_tensor()"
            )
        if placements is None and sizes is None:
            raise ValueError("redistribute: expected placements, sizes or both")
        placements = as_list(self.placements if placements is None else placements)
        source = self if forward_dtype is None else self.to(forward_dtype)
        return _C.redistribute(
            source,
            [to_core(placement) for placement in placements],
            partitions(placements, self.dim(), sizes),
        )

    # ---- layout -------------------------------------------------------------

    @property
    def _core(self):
        return _C.spec(self)

    @property
    def spec(self) -> ShardTensorSpec:
        """Everything but the data: mesh, placements and every rank's piece."""
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        meta = TensorMeta(self.shape, self.stride(), self.dtype)
        return ShardTensorSpec(_C.spec(self), meta)

    _spec = spec  # the name that DTensor and PhysicsNeMo have for it

    @property
    def placements(self) -> Placements:
        return ShardTensorSpec(_C.spec(self)).placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return ShardTensorSpec(_C.spec(self)).mesh

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Where this rank's piece begins, see ShardTensorSpec.offsets."""
        return ShardTensorSpec(_C.spec(self)).offsets(mesh_dim)

    @property
    def _local_tensor(self) -> torch.Tensor:
        """The piece itself, outside autograd."""
        return _C.local(self)

    @_local_tensor.setter
    def _local_tensor(self, local):
        _C.set_local(self, local)

    def _grad_spec(self, grad_placements):
        if grad_placements is None:
            return None
        wanted = [to_core(placement) for placement in as_list(grad_placements)]
        return _C.with_placements(self._core, wanted)

    # ---- autograd -----------------------------------------------------------

    def backward(self, gradient=None, *args, **kwargs) -> None:
        """As torch.Tensor.backward; a plain gradient must be whole and the
        same on every rank. PyTorch raises for one of another shape."""
        is_whole = isinstance(gradient, torch.Tensor) and gradient.shape == self.shape
        if is_whole and not isinstance(gradient, ShardTensor):
            core = self._core
            gradient = _C.promote(gradient, core.mesh)
            gradient = _C.redistribute(gradient, core.without_partial())
        with anomaly.found_by_all_ranks(self):
            super().backward(gradient, *args, **kwargs)

    # ---- torch.compile ------------------------------------------------------
    # Only instances made around fake tensors carry the Python dispatch key, so
    # eager calls never come here.

    def __tensor_flatten__(self):
        order_communication()
        if self.requires_grad:
            _C.keep_gradient_layout(self)  # as an eager operator would
        spec = ShardTensorSpec(_C.spec(self))
        spec._settings = modes.kept_by_graphs()
        return ["_local_tensor"], spec

    @classmethod
    def __metadata_guard__(cls, traced, given):
        """Whether a graph that was traced with a tensor like `traced` may take
        `given`: under other settings it would have other messages."""
        return traced == given and traced._settings == given._settings

    @staticmethod
    def __tensor_unflatten__(inner, spec, outer_size, outer_stride):
        return _C.unflatten(inner["_local_tensor"], spec._core, outer_stride)

    def __coerce_tangent_metadata__(self):
        """The layout that a compiled function's result will have its gradient in:
        that of a Partial is replicated."""
        core = _C.spec(self)
        if not any(p.is_partial() for p in self.placements):
            return self
        return _C.redistribute(self, core.without_partial())

    def __coerce_same_metadata_as_tangent__(self, metadata, expected_type=None):
        """A gradient in the layout that it was compiled for: one exchange, or an
        all-reduce of a Partial, where it comes otherwise."""
        if expected_type:
            return None
        if any(placement.is_partial() for placement in metadata.placements):
            raise RuntimeError(f"expected no gradient that is Partial, got {metadata}")
        return _C.redistribute(self, metadata._core)

    def _stable_hash_for_caching(self) -> str:
        """Compiled code is this rank's: it holds what goes to which peer. Ranks
        that share a cache of compiled graphs must not take each other's."""
        core, local = _C.spec(self), _C.local(self)
        mesh = core.mesh
        told = (
            *(repr(core), mesh.position, mesh.group, self.stride()),
            *(self.dtype, local.stride(), local.device, self.requires_grad),
            *(modes.kept_by_graphs(), library_digest()),
        )
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        schema = func._schema
        return _C.run_operator(
            schema.name, schema.overload_name, *args, **(kwargs or {})
        )

    # ---- handlers and modes -------------------------------------------------

    _enable_shard_patches = True  # may be assigned; see patches_enabled

    @classmethod
    def patches_enabled(cls) -> bool:
        """True: operators understand ShardTensors from the import on, by the
        dispatcher. The few functions of PyTorch that are replaced: _patches.py."""
        return True

    register_function_handler = classmethod(handlers.register_function_handler)
    register_named_function_handler = classmethod(
        handlers.register_named_function_handler
    )
    register_dispatch_handler = classmethod(handlers.register_dispatch_handler)
    unregister_function_handler = classmethod(handlers.unregister_function_handler)
    unregister_named_function_handler = classmethod(
        handlers.unregister_named_function_handler
    )
    unregister_dispatch_handler = classmethod(handlers.unregister_dispatch_handler)

    get_promotion_mode = staticmethod(modes.get_promotion_mode)
    set_promotion_mode = staticmethod(modes.set_promotion_mode)
    promotion_mode = staticmethod(modes.promotion_mode)

    # ---- printing and copying -----------------------------------------------

    def __repr__(self, *, tensor_contents=None) -> str:
        # No communication: a rank may print alone.
        with torch.no_grad():
            local = repr(_C.local(self).detach())
        spec = self.spec
        parts = [f"shape={tuple(self.shape)}", f"placements={spec.placements}"]
        if self.requires_grad:
            name = type(self.grad_fn).__name__
            graph = self.grad_fn is not None
            parts.append(f"grad_fn=<{name}>" if graph else "requires_grad=True")
        head = f"{type(self).__name__}({', '.join(parts)}, {self._core.mesh}"
        return f"{head},\n  local={local.replace(chr(10), chr(10) + '  ')})"

    __str__ = __repr__

    def __format__(self, format_spec):
        if self.dim() == 0 and format_spec and not self.is_meta:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)  # PyTorch's TypeError of others

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy: expected a ShardTensor that is a leaf of the graph; "
                "detach() it first"
            )
        local = _C.local(self).detach().clone()
        copied = _C.unflatten(local, self._core, self.stride())
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol):
        """The local tensor and the layout: each rank saves its piece and loads
        it on the same rank of an equal mesh."""
        local, spec = _C.local(self).detach(), ShardTensorSpec(self._core)
        position, grad = self._core.mesh.position, self.requires_grad
        attributes = dict(self.__dict__)
        return _rebuild, (local, spec, grad, attributes, position, self.stride())

    # What torch.distributed.checkpoint asks a tensor.

    def __create_write_items__(self, fqn, _):
        from shardtensor.checkpoint import pieces

        return pieces.write_items(fqn, self)

    def __create_chunk_list__(self):
        from shardtensor.checkpoint import pieces

        return pieces.chunks(self)

    def __get_tensor_shard__(self, index):
        from shardtensor.checkpoint import pieces

        return pieces.shard_at(self, index)

    # ---- what one rank cannot answer ----------------------------------------

    def new_tensor(self, data, **kwargs) -> torch.Tensor:
        """A plain tensor of this dtype and device."""
        kwargs.setdefault("dtype", self.dtype)
        kwargs.setdefault("device", self.device)
        return torch.tensor(data, **kwargs)

    def new(self, *args, device=None, size=None) -> torch.Tensor:
        """new_empty of sizes, or new_tensor of numbers, as Tensor.new tells them."""
        if size is not None:
            return self.new_empty(size, device=device)
        numbers = (int, torch.SymInt, torch.Size)
        if len(args) == 1 and not isinstance(args[0], numbers):
            return self.new_tensor(args[0], device=device or self.device)
        sizes = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return self.new_empty(sizes, device=device)

    def tolist(self):
        return self.item() if self.dim() == 0 else _whole(self, "tolist").tolist()

    def numpy(self, **kwargs):
        """Where every rank has the whole: its memory, as of a plain tensor."""
        return _whole(self, "numpy").numpy(**kwargs)

    def __array__(self, *args, **kwargs):
        return _whole(self, "conversion to a numpy array").__array__(*args, **kwargs)

    def data_ptr(self):
        stager = "async_stager=shardtensor.checkpoint.Stager() for dcp.async_save"
        _refuse(self, "data_ptr", f", or {stager}")

    def storage(self):
        _refuse(self, "storage")

    def __dlpack__(self, *_, **__):
        _refuse(self, "dlpack")

    def share_memory_(self):
        _refuse(self, "share_memory_")

    def apply_(self, function: Callable) -> ShardTensor:
        """function(x) in place of each element, on the rank that has it."""
        return _write_elements(self, "apply_", (), function)

    def map_(self, tensor, function: Callable) -> ShardTensor:
        """function(x, y) in place of each element; y is tensor's, broadcast."""
        return _write_elements(self, "map_", (tensor,), function)

    def map2_(self, x, y, function: Callable) -> ShardTensor:
        return _write_elements(self, "map2_", (x, y), function)

    def set_(self, *_, **__):
        _refuse(self, "set_")

    def as_strided(self, *_, **__):
        _refuse(self, "as_strided")

    def as_strided_(self, *_, **__):
        _refuse(self, "as_strided_")


@traced.between_graphs(
    "ShardTensor.from_local asks the other ranks for their pieces, which a graph "
    'cannot; say sharding_shapes="chunk" or a dict, or shape='
)
def _from_local(
    local,
    mesh,
    placements,
    sharding_shapes,
    global_shape,
    stride,
    grad_placements,
    run_check,
):
    alike = f", stride {[*stride]}" if stride is not None else ""
    alike += ", run_check" if run_check else ""
    with errors_while_asking(mesh, sharding_shapes):
        local = _on_device_of(mesh, local)
        placements = check_placements(placements, mesh.ndim)
        if grad_placements is not None:
            grad_placements = check_placements(grad_placements, mesh.ndim)
            alike += f", grad_placements {grad_placements}"
        if global_shape is not None:
            global_shape = list(global_shape)
    layout = infer_layout(
        "from_local", local, mesh, placements, sharding_shapes, global_shape, alike
    )
    grad_layout = None
    if grad_placements is not None:
        wanted = [to_core(placement) for placement in grad_placements]
        grad_layout = _C.with_placements(layout, wanted)
    result = from_pieces("from_local", local, layout, stride, grad_layout)
    if run_check or _C.check_mode():
        _C.check_replicas(local, layout)
    return result


def _on_device_of(mesh: DeviceMesh, local: torch.Tensor) -> torch.Tensor:
    """As DTensor.from_local moves it."""
    if not isinstance(local, torch.Tensor) or isinstance(local, ShardTensor):
        raise TypeError(
            f"from_local: expected a plain tensor, got a {type(local).__name__}"
        )
    elsewhere = local.device.type != mesh.device_type and not local.is_meta
    return local.to(device_of(mesh)) if elsewhere else local


def _whole(tensor: ShardTensor, what: str) -> torch.Tensor:
    """The plain tensor of one that is Replicate on all axes."""
    if not all(placement.is_replicate() for placement in tensor.placements):
        _refuse(tensor, what)
    return tensor.to_local()


def _write_elements(self: ShardTensor, name: str, others, function) -> ShardTensor:
    """PyTorch's loops over Python's functions go through memory: here each piece's,
    of copies, for views of this tensor are told by copy_ alone."""
    if self.requires_grad:
        raise RuntimeError(f"Can't call {name}() on Variable that requires grad.")
    spec = self._core.without_partial()
    own = _C.redistribute(self.clone(), spec)
    given = [torch.empty_like(own, dtype=x.dtype).copy_(x) for x in others]
    pieces = [x.to_local().contiguous() for x in (own, *given)]
    result = getattr(pieces[0], name)(*pieces[1:], function)
    return self.copy_(ShardTensor.from_spec(result, own.spec))


def _refuse(tensor: ShardTensor, what: str, otherwise: str = ""):
    raise NotImplementedError(
        f"{what}: this rank holds one piece of {tensor.spec}; use full_tensor() "
        f"for the whole tensor or to_local() for the piece{otherwise}"
    )


def _rebuild(local, spec, requires_grad, attributes, position, strides):
    """Loads what __reduce_ex__ saved."""
    if spec._core.mesh.position != position:
        raise RuntimeError(
            f"this is the piece of mesh position {position} of {spec}, loaded at "
            f"position {spec._core.mesh.position}; use shardtensor.checkpoint for "
            "what other ranks, or another number of them, shall load"
        )
    tensor = _C.unflatten(local, spec._core, strides).requires_grad_(requires_grad)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


torch.serialization.add_safe_globals([_rebuild])
_C.set_tensor_class(ShardTensor)
handlers.tensor_class = ShardTensor
