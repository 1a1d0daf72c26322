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
    group, sizes = mesh.get_group(mesh_dim), _sizes(block, mesh, mesh_dim, shapes)

    def visit_it(owner, piece):
        visit(owner, piece)  # whatever it returns

    with torch.no_grad():
        _C.ring_tour(block, sizes, group.group_name, group.rank(), visit_it)


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
    sizes = _sizes(block, mesh, mesh_dim, shapes)
    group = mesh.get_group(mesh_dim).group_name
    return _C.ring_sum(lambda piece, own: fn(piece, *own), block, own, sizes, group)


def _sizes(block, mesh, mesh_dim, shapes):
    """Those of all ranks' blocks; all as the own one where nothing else is said."""
    if shapes is None:
        return [list(block.shape)] * mesh.size(mesh_dim)
    try:
        return [[int(extent) for extent in shape] for shape in shapes]
    except (TypeError, ValueError) as error:
        agree_on_call(mesh.get_group(mesh_dim), "", error, block)
        raise


def _check_choice(name, value, expected):
    if value not in expected:
        raise ValueError(f"{name}: expected one of {list(expected)}, got {value!r}")
