"""What goes wrong on one rank is an error on all of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.device_mesh import device_of, moves_on_host, whole_group

# What other ranks can raise again from its text.
_KINDS = {
    kind.__name__: kind
    for kind in (ImportError, IndexError, OSError, RuntimeError, TypeError, ValueError)
}


def known_everywhere(kind: type[Exception]) -> type[Exception]:
    """A kind that is made of a text alone stays itself on other ranks."""
    _KINDS[kind.__name__] = kind
    return kind


def agree(
    mesh: DeviceMesh,
    error: Exception | None,
    told: object = None,
    title: str = "",
    kind: type[Exception] = ValueError,
) -> None:
    """Raises on every rank of the mesh what `error` is on one of them, the first
    rank's where several have one; and, by this `title` and of this `kind`, where the
    ranks were not `told` the same. Communication: a reduction of three numbers, a
    gather of texts where something is wrong."""
    device = "cpu" if moves_on_host(mesh) else device_of(mesh)
    _agree(whole_group(mesh), device, error, told, "mesh rank", title, kind)


def agree_everywhere(error: Exception | None, told: object = None) -> None:
    """The same on all ranks of the job; without one `error` is raised."""
    if dist.is_initialized():
        _agree(dist.group.WORLD, _device_of(dist.group.WORLD), error, told, "rank", "")
    elif error:
        raise error


def made_everywhere(make: Callable, told: object = None):
    """What make() returns, on all ranks or on none. `told` is compared; a function says
    it of what was made. Communication: that of agree_everywhere."""
    made = error = None
    try:
        made = make()
        told = told(made) if callable(told) else told
    except Exception as problem:  # noqa: BLE001  whatever it is, others wait
        error = problem
    agree_everywhere(error, told)
    return made


def _agree(group, device, error, told, rank, title, kind=ValueError):
    digest = hashlib.blake2b(repr(told).encode(), digest_size=8).digest()
    number = 0 if error else int.from_bytes(digest, "little", signed=True)
    # The largest number is the smallest, too, where the ranks were told the same.
    extremes = torch.tensor([error is not None, number, ~number], device=device)
    with missing_ranks_named(group):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    any_failed, largest, inverse_of_smallest = extremes.tolist()
    if not any_failed and largest == ~inverse_of_smallest:
        return
    told_by: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(told_by, (error is not None, _text(error, told)), group)
    failed, texts = zip(*told_by, strict=True)
    if not any_failed:
        raise kind(_difference(texts, rank, title))
    _raise(texts, failed, error, rank)


def gather(
    mesh: DeviceMesh, error: Exception | None, value: object, title: str = ""
) -> list:
    """Every rank's value, in the order of the mesh's ranks, or on every rank what
    `error` is on one of them; other ranks may `agree` meanwhile, which is an error by
    this `title`. Communication: that of agree, and one of objects."""
    agree(mesh, error, title=title)
    group = whole_group(mesh)
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


@contextlib.contextmanager
def missing_ranks_named(group: dist.ProcessGroup | None = None):
    """What torch.distributed raises, with the ranks that did not come."""
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        name = (group or dist.group.WORLD).group_name
        raise type(error)(f"{error}{_C.who_is_missing(name)}") from error


def agree_on_call(
    group: dist.ProcessGroup,
    text: str,
    error: Exception | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """The same before a collective, of which all ranks must tell the same `text`. `x`
    is a tensor on the device that all have theirs on. Nothing happens in
    torch.compile. Communication: three integers from each rank to each, texts where
    something is wrong."""
    if torch.compiler.is_compiling():
        if error:
            raise error
        return
    kind = kind_of(error) if error else ""
    place = torch.empty(0, device=_device_of(group)) if x is None else x
    _C.agree_on_call(place, text, kind, str(error or ""), group.group_name)


@contextlib.contextmanager
def errors_on_all_ranks(op: str, group: dist.ProcessGroup | None):
    """What Python finds wrong in a call of a collective, before it: an error on all
    ranks of the group (of the job, where it is none), which else agree on the call.
    A rank that is not in the group raises alone: nobody waits for it."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001  whatever it is, others wait
        kind = _KINDS[kind_of(problem)]
        told = kind(f"{op}: {str(problem).removeprefix(op + ': ')}")
        if (
            torch.compiler.is_compiling()
            or not dist.is_initialized()
            or is_foreign(group)
        ):
            raise told from None
        known = isinstance(group, dist.ProcessGroup)
        agree_on_call(group if known else dist.group.WORLD, op, told)


def is_foreign(group: object) -> bool:
    """Whether it is what new_group gives a rank that is not in the group."""
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER


def _device_of(group):
    """One that the group has messages for."""
    kinds = [device.type for device in group._device_types]
    return "cpu" if "cpu" in kinds or not kinds else kinds[0]


def kind_of(error: Exception) -> str:
    """As which other ranks can raise it."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
    return (kinds or ["RuntimeError"])[0]


def _text(error, told):
    if error is None:
        return "RuntimeError", repr(told)
    return kind_of(error), str(error)


def _difference(texts, rank, title):
    calls: dict[str, list[int]] = {}
    for i, (_, text) in enumerate(texts):
        calls.setdefault(text, []).append(i)
    lines = [f"{rank}s {ranks}: {text}" for text, ranks in calls.items()]
    return "\n".join([f"{title}ranks were told different things", *lines])


def _raise(texts, failed, error, rank):
    kind, text = texts[failed.index(True)]
    if not all(failed):
        ranks = [str(i) for i, bad in enumerate(failed) if bad]
        text = f"{text} (on {rank} {', '.join(ranks)})"
    raise _KINDS[kind](text) from error
