"""Names that function handlers written for PhysicsNeMo import."""

from collections.abc import Iterable


class MissingShardPatch(NotImplementedError):
    """For a handler to raise: it does not serve these arguments."""


class UndeterminedShardingError(Exception):
    """For a handler to raise: the layout of its result is not known."""


def promote_to_iterable(value, like: Iterable):
    """`value`, a number, as often as `like` has entries and in its type; an
    iterable of that length, and a string, as it is."""
    if isinstance(value, str):
        return value
    length = len(like)
    if not isinstance(value, Iterable):
        return type(like)([value] * length)
    if len(value) != length:
        raise ValueError(
            f"promote_to_iterable: expected {length} values, got {len(value)}"
        )
    return value
