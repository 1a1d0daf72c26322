"""Nested values as torch.distributed.checkpoint walks them: through dicts, and through
lists that hold tensors or dicts. A tuple that holds tensors becomes such a list: as one
value it would be pickled with what one rank has of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Where a value is: keys as text, positions in lists.
Path = tuple[str | int, ...]


def is_part(value: object) -> bool:
    """Whether it saves and loads itself: modules, optimizers, schedulers."""
    own = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return own and not isinstance(value, type)


def find_parts(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    if path and is_part(value):
        yield path, value
        return
    for step, inner in _inside(value, path):
        yield from find_parts(inner, (*path, step))


def opened(value, made: Mapping[Path, object], stored: Mapping, path: Path = ()):
    """A copy in dicts and lists, with what was `made` of the parts. An empty dict gets
    places for all that is `stored` below it."""
    if path in made:
        value, made = made[path], {}
    if isinstance(value, Mapping):
        if path and not value:
            return _places_below(path, stored)
        inside = _inside(value, path)
        return {k: opened(inner, made, stored, (*path, k)) for k, inner in inside}
    if _is_walked(value):
        inside = _inside(value, path)
        return [opened(inner, made, stored, (*path, i)) for i, inner in inside]
    return value


def closed(value, filled, parts: Collection[Path] = (), path: Path = ()):
    """`value` with what its copy was filled with: dicts and lists in place, tuples
    anew, parts as they are."""
    if path in parts:
        return value
    if isinstance(value, MutableMapping) and isinstance(filled, Mapping):
        keys = {str(key): key for key in value}
        for name, inner in filled.items():
            key = keys.get(name, name)
            value[key] = closed(value.get(key), inner, parts, (*path, name))
        return value
    if not _is_walked(value):
        return filled
    pairs = enumerate(zip(value, filled, strict=True))
    inside = [closed(old, new, parts, (*path, i)) for i, (old, new) in pairs]
    if isinstance(value, list):
        value[:] = inside
        return value
    return value._make(inside) if hasattr(value, "_make") else type(value)(inside)


def at(values, path: Path):
    for step in path:
        values = values[step]
    return values


def put(values: dict, path: Path, value: object) -> None:
    for step in path[:-1]:
        values = values.setdefault(step, {})
    values[path[-1]] = value


def with_lists(values):
    """Dicts by position become lists."""
    if not isinstance(values, Mapping):
        return values
    made = {key: with_lists(inner) for key, inner in values.items()}
    positions = made and all(isinstance(key, int) for key in made)
    return [made[i] for i in sorted(made)] if positions else made


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _inside(value, path):
    if isinstance(value, Mapping):
        named = {str(key): inner for key, inner in value.items()}
        if len(named) < len(value):
            raise ValueError(
                f"checkpoint: keys in {dotted(path)!r} must differ as text, got "
                f"{list(value)}"
            )
        return named.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _is_walked(value):
    """Of lists DCP says it; other tuples come back as they were."""
    if isinstance(value, tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, list) and any(
        isinstance(inner, Mapping) or _holds_tensors(inner) or _is_walked(inner)
        for inner in value
    )


def _holds_tensors(value):
    if isinstance(value, torch.Tensor) or is_part(value):
        return True
    inside = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, (Mapping, list, tuple)) and any(
        map(_holds_tensors, inside)
    )


def _places_below(path, stored):
    found: dict = {}
    for where, told in stored.items():
        if where[: len(path)] == path:
            place = None  # of a value, which another one replaces
            if isinstance(told, TensorStorageMetadata):
                dtype = told.properties.dtype
                place = torch.empty(told.size, dtype=dtype, device="cpu")
            put(found, ("", *where[len(path) :]), place)
    return with_lists(found.get("", {}))
