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
from shardtensor.agree import errors_on_all_ranks
from shardtensor.device_mesh import check_axis, group_along
from shardtensor.distributed.autograd import check_local, numbers

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
    group = group_along(mesh, ring_config.mesh_dim)
    with errors_on_all_ranks("perform_ring_iteration", group):
        check_local(tensor)
        step = _step(mesh, ring_config)
        shape = _shape(tensor, recv_shape)
    return _ops.ring_step(tensor, step, shape, group.group_name)


def perform_ring_iteration_async(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    ring_config: RingPassingConfig,
    recv_tensor: torch.Tensor | None = None,
    recv_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, list[dist.Work]]:
    """The same while the program goes on: the result is valid, and `tensor`
    may change, once every work's wait() has returned. `recv_tensor` is the
    buffer for it, if given. Not differentiable. "p2p" only. Errors and
    communication: as perform_ring_iteration."""
    group = group_along(mesh, ring_config.mesh_dim)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    with errors_on_all_ranks("perform_ring_iteration_async", group):
        check_local(tensor)
        step = _step(mesh, ring_config)
        _check_method(ring_config)
        received = _buffer(tensor, recv_tensor, recv_shape)
    if ranks == 1 or not _sends_from(tensor, group):
        shape = list(received.shape)
        arrived = _ops.ring_step(tensor.detach(), step, shape, group.group_name)
        return received.copy_(arrived), []
    # A step of no rows, which sends nothing, compares sizes and all else.
    nothing = tensor.new_empty((0, *tensor.shape))
    _ops.ring_step(nothing, step, [0, *received.shape], group.group_name)
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
    on its way. `shapes` are those of all ranks' blocks, which may differ; without,
    ranks tell each other theirs, of one number of dims. What visit raises on one rank
    is an error on all, after the messages. Not differentiable. Communication: one
    message to and from each other rank, three integers from each rank to each before
    and after, and an all-gather of shapes where none are told. `visit` must not write
    into a piece, which may be on its way."""
    group = group_along(mesh, mesh_dim)
    with errors_on_all_ranks("ring_tour", group):
        _check_function(visit)
        sizes = _sizes(block, mesh, mesh_dim, shapes)

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
    gradient; forward mode of `block` and torch.func's transforms are errors. fn must
    not write into a piece, which may be on its way. `shapes`, communication and
    errors: as ring_tour.

        own = bodies.to_local()
        forces = ring_sum(attraction, own, own, mesh=mesh)"""
    group = group_along(mesh, mesh_dim)
    with errors_on_all_ranks("ring_sum", group):
        _check_function(fn)
        sizes = _sizes(block, mesh, mesh_dim, shapes)
        for tensor in own:
            check_local(tensor)
    name = group.group_name
    return _C.ring_sum(lambda piece, own: fn(piece, *own), block, own, sizes, name)


# ---- arguments --------------------------------------------------------------


def _check_function(function):
    if not callable(function):
        raise TypeError(f"expected a function of a piece, got {function!r}")


def _step(mesh, ring_config):
    check_axis(mesh, ring_config.mesh_dim)
    _check_choice("ring_direction", ring_config.ring_direction, _DIRECTIONS)
    return _DIRECTIONS[ring_config.ring_direction]


def _shape(tensor, told):
    return list(tensor.shape) if told is None else numbers("recv_shape", told)


def _check_method(ring_config):
    if ring_config.communication_method != "p2p":
        raise ValueError(
            "expected communication_method 'p2p', got "
            f"{ring_config.communication_method!r}"
        )


def _buffer(tensor, told, shape):
    """For what comes."""
    if not tensor.is_contiguous():
        raise ValueError("tensor is not contiguous")
    if told is None:
        return tensor.new_empty(_shape(tensor, shape))
    check_local(told)
    if not told.is_contiguous():
        raise ValueError("recv_tensor is not contiguous")
    if told.dtype != tensor.dtype or told.device != tensor.device:
        raise ValueError(
            f"recv_tensor: expected {tensor.dtype} on {tensor.device}, got "
            f"{told.dtype} on {told.device}"
        )
    if shape is not None and list(told.shape) != _shape(tensor, shape):
        raise ValueError(
            f"recv_tensor: expected the shape of recv_shape, {[*shape]}, got "
            f"{[*told.shape]}"
        )
    return told


def _sends_from(tensor, group):
    """Whether the group's messages may name the tensor's memory: gloo's take a device's
    for the host's, and only exchanges know of it."""
    return tensor.is_cpu or group._get_backend(tensor.device).name() != "gloo"


def _sizes(block, mesh, mesh_dim, shapes):
    """Those of all ranks' blocks; none: they tell each other."""
    check_local(block)
    check_axis(mesh, mesh_dim)
    return [numbers("shapes", shape) for shape in shapes or ()]


def _check_choice(name, value, expected):
    if value not in expected:
        raise ValueError(f"{name}: expected one of {list(expected)}, got {value!r}")
