"""Passing local tensors around the ring of a mesh axis.

A program that needs every rank's piece, one at a time, holds its own, computes,
passes it on, and computes with what came, one step fewer than there are ranks:

    config = RingPassingConfig(mesh_dim=0, mesh_size=mesh.size(0))
    for _ in range(mesh.size(0)):
        best = merge(best, search(piece))
        piece = perform_ring_iteration(piece, mesh, config)

ring_tour does so while the next piece is on its way, ring_sum adds up what a
function makes of each piece and differentiates it:

    forces = ring_sum(attraction, bodies, own, mesh=mesh)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C, _ops
from shardtensor.agree import agree_on_call

_DIRECTIONS = {"forward": 1, "backward": -1}


@dataclass
class RingPassingConfig:
    """Which axis of a mesh is the ring, and which way round: "forward" sends to
    the next rank and receives from the one before, "backward" the other way.
    `communication_method`, "p2p" or "a2a", is a hint: the same data moves."""

    mesh_dim: int
    mesh_size: int
    ring_direction: str = "forward"
    communication_method: str = "a2a"

    def __post_init__(self):
        _check_choice("ring_direction", self.ring_direction, _DIRECTIONS)
        _check_choice("communication_method", self.communication_method, ("p2p", "a2a"))


def perform_ring_iteration(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    ring_config: RingPassingConfig,
    recv_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """What the neighbour sends while `tensor`, a local tensor, goes to the
    other one. `recv_shape` is the shape of what comes, where the pieces differ;
    every rank raises where it is another one. Differentiable: the gradient goes
    the other way round. Communication: one message each way, and three integers
    from each rank to each (not inside torch.compile)."""
    group = mesh.get_group(ring_config.mesh_dim)
    return _ops.ring_step(
        tensor,
        _DIRECTIONS[ring_config.ring_direction],
        list(tensor.shape if recv_shape is None else recv_shape),
        group.group_name,
    )


def perform_ring_iteration_async(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    ring_config: RingPassingConfig,
    recv_tensor: torch.Tensor | None = None,
    recv_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, list[dist.Work]]:
    """The same while the program goes on: the result is valid, and `tensor`
    may change, once every work's wait() has returned. `recv_tensor` is the
    buffer for it, if given. Not differentiable. "p2p" only."""
    if ring_config.communication_method != "p2p":
        raise ValueError(
            "perform_ring_iteration_async: expected communication_method 'p2p', "
            f"got {ring_config.communication_method!r}"
        )
    if not tensor.is_contiguous():
        raise ValueError("perform_ring_iteration_async: tensor is not contiguous")
    received = recv_tensor
    if received is None:
        shape = tensor.shape if recv_shape is None else tuple(recv_shape)
        received = tensor.new_empty(shape)
    group = mesh.get_group(ring_config.mesh_dim)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return received.copy_(tensor.detach()), []
    step = _DIRECTIONS[ring_config.ring_direction]
    # Backends refuse messages without elements; both ends know of them.
    messages = [
        dist.P2POp(operation, buffer, group=group, group_peer=peer % ranks)
        for operation, buffer, peer in (
            (dist.isend, tensor.detach(), rank + step),
            (dist.irecv, received, rank - step),
        )
        if buffer.numel() > 0
    ]
    return received, dist.batch_isend_irecv(messages) if messages else []


def ring_tour(
    block: torch.Tensor,
    visit: Callable[[int, torch.Tensor], None],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    shapes: Sequence[Sequence[int]] | None = None,
) -> None:
    """visit(owner, piece) with every rank's `block`, a local tensor: the own one
    first, then those of the ranks before, nearest first, each while the next is
    on its way. `shapes` are those of all ranks' blocks, where they differ. What
    visit raises on one rank is an error on all, after the messages. Not
    differentiable. Communication: one message to and from each other rank, and
    three integers from each rank to each before and after."""
    group, rank = mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim)
    sizes = _agreed_sizes("ring_tour", block, shapes, group)

    def meet(owner, piece):
        visit(owner, piece)

    with torch.no_grad():
        _tour(block, sizes, group, lambda: visit(rank, block.detach()), meet)


def ring_sum(
    fn: Callable[..., torch.Tensor],
    block: torch.Tensor,
    *own: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    shapes: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """The sum of fn(piece, *own) over every rank's `block`, a local tensor, in
    the order of ring_tour. Differentiable once, also where fn is: backward is
    a tour on which fn runs again, and the gradient of each piece travels to its
    owner. `own` are local tensors that stay here; what else fn uses gets no
    gradient. Communication and errors: as ring_tour."""
    group = mesh.get_group(mesh_dim)
    sizes = _agreed_sizes("ring_sum", block, shapes, group)
    return _RingSum.apply(fn, sizes, group, block, *own)


class _RingSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, sizes, group, block, *own):
        ctx.tour = fn, sizes, group
        ctx.save_for_backward(block, *own)
        terms = []

        def visit(_owner, piece):
            term = fn(piece, *own)
            terms[:] = [terms[0] + term] if terms else [term]

        _tour(block, sizes, group, lambda: visit(None, block), visit)
        return terms[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        fn, sizes, group = ctx.tour
        block, *own = ctx.saved_tensors
        sums = [torch.zeros_like(x) for x in (block, *own)]

        def gradient(_owner, piece):
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (piece, *own)]
                output = fn(*inputs)
                grads = torch.autograd.grad(output, inputs, grad, allow_unused=True)
            for total, part in zip(sums[1:], grads[1:], strict=True):
                if part is not None:
                    total += part
            return torch.zeros_like(piece) if grads[0] is None else grads[0]

        _tour(
            block,
            sizes,
            group,
            lambda: sums[0].add_(gradient(None, block)),
            gradient,
            sums[0].add_,
        )
        return None, None, None, *sums


def _tour(block, sizes, group, own, other, returned=None):
    """_C.ring_tour. After an error nothing is called, but messages go on, so that
    it can be raised on all ranks."""
    errors = []

    def unless_failed(call, otherwise=lambda *_: None):
        def checked(*args):
            if not errors:
                try:
                    return call(*args)
                except Exception as error:  # noqa: BLE001
                    errors.append(error)
            return otherwise(*args)

        return checked

    _C.ring_tour(
        block,
        sizes,
        group.group_name,
        unless_failed(own),
        unless_failed(other, lambda _, piece: torch.zeros_like(piece)),
        unless_failed(returned) if returned else None,
    )
    try:
        agree_on_call(group, "the end of ring_tour", *errors, x=block)
    except Exception as error:
        raise (errors or [error])[0] from None


def _agreed_sizes(name, block, shapes, group):
    """Those of all ranks' blocks, which every rank knows alike."""
    told, problem, sizes = "", None, []
    try:
        sizes = _sizes(name, block, shapes, group)
        told = f"{name} of {block.dtype} blocks of sizes {sizes}"
    except (TypeError, ValueError) as error:
        problem = error
    agree_on_call(group, told, problem, block)
    return sizes


def _sizes(name, block, shapes, group):
    own = list(block.shape)
    if shapes is None:
        return [own] * group.size()
    sizes = [list(shape) for shape in shapes]
    if len(sizes) != group.size():
        raise ValueError(
            f"{name}: expected the shapes of {group.size()} blocks, one for each rank, "
            f"got {len(sizes)}"
        )
    if sizes[group.rank()] != own:
        raise ValueError(
            f"{name}: the block of this rank has shape {own}, expected "
            f"{sizes[group.rank()]}, as `shapes` say"
        )
    return sizes


def _check_choice(name, value, expected):
    if value not in expected:
        raise ValueError(f"{name}: expected one of {list(expected)}, got {value!r}")
