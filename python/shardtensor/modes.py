"""Settings and counters, the same on every rank. A setter is for the process, a
with-block for the thread that enters it, as those of PyTorch are: another thread, which
may run another model meanwhile, keeps what it had."""

import contextlib
import enum

from shardtensor import _C

CommStats = _C.CommStats
comm_stats = _C.comm_stats
reset_comm_stats = _C.reset_comm_stats


def get_fallback_mode() -> str:
    """What happens where an operator has no rule for a layout: "error",
    "warn" (gather it, say so once: the default) or "silent"."""
    return _C.fallback_mode()


def set_fallback_mode(mode: str) -> None:
    """ "error", "warn" or "silent", see get_fallback_mode; else a ValueError."""
    _C.set_fallback_mode(mode)


@contextlib.contextmanager
def fallback_mode(mode: str):
    """set_fallback_mode within a with-block."""
    with _held("fallback_mode", _C.set_fallback_mode, mode):
        yield


def fallback_counts() -> dict[str, tuple[int, int]]:
    """Operator -> (calls that fell back, elements moved for them)."""
    return _C.fallback_counts()


def reset_fallback_counts() -> None:
    """Counts from nothing again, and warns again."""
    _C.reset_fallback_counts()


class TensorPromotionMode(enum.Enum):
    """What happens to a plain tensor that meets a ShardTensor, which must be
    equal on all ranks: it counts as Replicate, silently (the default) or with a
    warning, or it is an error."""

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


def get_promotion_mode() -> TensorPromotionMode:
    """What happens to a plain tensor that meets a ShardTensor; SILENT at first."""
    return TensorPromotionMode(_C.promotion_mode())


def set_promotion_mode(mode: TensorPromotionMode | str) -> None:
    """`mode` is a member or its value, "disabled", "warn" or "silent"."""
    _C.set_promotion_mode(TensorPromotionMode(mode).value)


@contextlib.contextmanager
def promotion_mode(mode: TensorPromotionMode | str):
    """set_promotion_mode within a with-block."""
    with _held("promotion_mode", set_promotion_mode, mode):
        yield


def get_gradient_policy() -> str:
    """How gradients of plain parameters become complete: "immediate",
    "coalesced" (in buckets beside backward, see gradient_bucket_bytes) or
    "deferred" (left to DDP or FSDP over the whole mesh)."""
    return _C.gradient_policy()


def set_gradient_policy(policy: str) -> None:
    """ "immediate", "coalesced" (the default) or "deferred", see
    get_gradient_policy; else a ValueError. Forward passes alone run under it. Set
    alike on all ranks: it decides which messages a backward sends."""
    _C.set_gradient_policy(policy)


@contextlib.contextmanager
def gradient_policy(policy: str):
    """set_gradient_policy within a with-block around forward, whose backward goes
    by the same policy wherever it runs."""
    with _held("gradient_policy", _C.set_gradient_policy, policy):
        yield


def get_gradient_bucket_bytes() -> int:
    """From how many bytes of one dtype and group on gradients of the policy
    "coalesced" are summed while backward goes on. 25 MiB by default, as DDP's."""
    return _C.gradient_bucket_bytes()


def set_gradient_bucket_bytes(bytes: int) -> None:
    """The same on all ranks. Raises ValueError where it isn't positive."""
    _C.set_gradient_bucket_bytes(bytes)


@contextlib.contextmanager
def gradient_bucket_bytes(bytes: int):
    """set_gradient_bucket_bytes within a with-block around backward. Communication
    of a backward: an all-reduce per bucket; larger ones are fewer, smaller ones start
    earlier."""
    with _held("gradient_bucket_bytes", _C.set_gradient_bucket_bytes, bytes):
        yield


def get_attention_transport() -> str:
    """How attention meets keys of other ranks: "auto", "ring", "all_gather",
    "all_to_all" or "grid"."""
    return _C.attention_transport()


def set_attention_transport(transport: str) -> None:
    """One of get_attention_transport's, "auto" by default; else a ValueError. Set
    alike on all ranks: it decides which messages attention sends."""
    _C.set_attention_transport(transport)


@contextlib.contextmanager
def attention_transport(transport: str):
    """set_attention_transport within a with-block: "ring" passes blocks of keys
    and values around while ranks compute, "all_gather" gathers them first,
    "all_to_all" cuts heads in the place of the sequence, "grid" does so along
    the last of two mesh axes and passes blocks along the other ("ring" where three
    cut the sequence); "auto" chooses by sizes and mesh."""
    with _held("attention_transport", _C.set_attention_transport, transport):
        yield


def get_point_transport() -> str:
    """How queries meet points of other ranks: "auto", "ring" or "boxes"."""
    return _C.point_transport()


def set_point_transport(transport: str) -> None:
    """ "auto" (the default), "ring" or "boxes"; else a ValueError. Set alike on all
    ranks: it decides which messages a search sends."""
    _C.set_point_transport(transport)


@contextlib.contextmanager
def point_transport(transport: str):
    """set_point_transport within a with-block: "ring" passes pieces of points
    around while ranks search, "boxes" sends queries to the ranks whose points are
    near them; "auto" chooses by the boxes of the ranks' pieces."""
    with _held("point_transport", _C.set_point_transport, transport):
        yield


def get_conv_overlap_bytes() -> int | None:
    """From how many bytes of a rank's input on a convolution computes while its
    neighbours' rows travel. None, the default: what the device and the dtype ask
    for."""
    return _C.conv_overlap_bytes()


def set_conv_overlap_bytes(bytes: int | None) -> None:
    """The same on all ranks. 0: always, where only one dim needs such rows."""
    _C.set_conv_overlap_bytes(bytes)


@contextlib.contextmanager
def conv_overlap_bytes(bytes: int | None):
    """set_conv_overlap_bytes within a with-block. A convolution of a smaller input
    joins its neighbours' rows to its own, which takes fewer calls and a copy."""
    with _held("conv_overlap_bytes", _C.set_conv_overlap_bytes, bytes):
        yield


def get_random_policy() -> str:
    """Which numbers dropout, rand_like, normal_ and the like draw: "one_device"
    (those of one device with the same seed, at the price of drawing for the whole
    tensor on every rank: the default) or "counter" (numbers of the element's place
    in the whole tensor, drawn for the own piece alone)."""
    return _C.random_policy()


def set_random_policy(policy: str) -> None:
    """ "one_device" (the default) or "counter"; else a ValueError. Set alike on all
    ranks, whose numbers would not fit together. No communication in either."""
    _C.set_random_policy(policy)


@contextlib.contextmanager
def random_policy(policy: str):
    """set_random_policy within a with-block; around backward, too, where that
    draws again."""
    with _held("random_policy", _C.set_random_policy, policy):
        yield


def get_check_mode() -> bool:
    """Whether ranks compare what they are about to do before each collective,
    and promoted tensors' values."""
    return _C.check_mode()


def set_check_mode(on: bool) -> None:
    """Off by default. Set alike on all ranks: it adds small collectives."""
    _C.set_check_mode(on)


@contextlib.contextmanager
def check_mode(on: bool = True):
    """set_check_mode within a with-block."""
    with _held("check_mode", _C.set_check_mode, on):
        yield


def kept_by_graphs() -> tuple[str | bool | int | None, ...]:
    """The settings that operators which a compiler has traced do not ask for again."""
    return (
        *(_C.gradient_policy(), _C.random_policy(), _C.promotion_mode()),
        *(_C.attention_transport(), _C.point_transport(), _C.check_mode()),
        _C.conv_overlap_bytes(),
    )


def set_communication_timeout(seconds: float) -> None:
    """Bounds every wait for other ranks; 0 leaves the group's own limit."""
    _C.set_communication_timeout(seconds)


@contextlib.contextmanager
def _held(name, put, value):
    """This thread's own value of a setting."""
    before = _C.hold_setting(name)
    try:
        put(value)
        yield
    finally:
        _C.release_setting(name, before)
