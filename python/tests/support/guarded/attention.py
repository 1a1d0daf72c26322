"""Attention kernels of the device, with the contracts of CUDA's: which sizes, strides
and dtypes they take, how their log-sum-exps lie. `taken(name)` chooses one of them,
as PyTorch does on a GPU; without it no fused kernel is chosen."""

import contextlib
import math

import torch

BACKENDS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
_taken = "math"
_calls = []
_library = torch.library.Library("aten", "IMPL")


@contextlib.contextmanager
def taken(name):
    """Yields the list of the kernels that are called."""
    global _taken
    _calls.clear()
    _taken, before = name, _taken
    try:
        yield _calls
    finally:
        _taken = before


def _kernel(name):
    def register(fn):
        _library.impl(name, fn, "PrivateUse1")
        return fn

    return register


@_kernel("_fused_sdp_choice")
def choice(
    q, k, v, mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    alike = q.shape[3] == v.shape[3]
    takes = {
        "math": True,
        "flash": mask is None
        and alike
        and not (is_causal and q.shape[2] != k.shape[2]),
        "efficient": not enable_gqa,
        "cudnn": not enable_gqa and alike,
    }
    return BACKENDS[_taken if takes[_taken] else "math"]


def scores_of(q, k, bias, causal, scale):
    scores = q.float() @ k.float().mT * scale
    if bias is not None:
        scores = scores + bias
        # Kernels count in powers of 2, where the lowest number overflows.
        scores = scores * math.log2(math.e) / math.log2(math.e)
    if causal:
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~sees, float("-inf"))
    return scores


# What kernels say of a query all of whose scores are -inf: its output and its
# log-sum-exp. PyTorch 2.11: flash_fwd's normalize_softmax_lse, step 7 of the memory-
# efficient kernel_forward.h. cuDNN promises a log-sum-exp alone.
UNSEEN = {
    "flash": (0.0, math.inf),
    "efficient": (0.0, 0.0),
    "cudnn": (math.nan, -math.inf),
}


def forward(kernel, q, k, v, bias, causal, scale):
    scores = scores_of(q, k, bias, causal, scale)
    log_sum = scores.logsumexp(-1)
    unseen, (output, says) = log_sum.isneginf(), UNSEEN[kernel]
    out = (scores.softmax(-1) @ v.float()).masked_fill(unseen.unsqueeze(-1), output)
    return out.to(q.dtype), log_sum.masked_fill(unseen, says)


def backward(grad, q, k, v, bias, out, log_sum, causal, scale):
    assert grad.dtype == out.dtype == q.dtype
    assert log_sum.dtype == torch.float32
    assert log_sum.isfinite().all()
    weights = (scores_of(q, k, bias, causal, scale) - log_sum.unsqueeze(-1)).exp()
    grad, out = grad.float(), out.float()
    mean = (grad * out).sum(-1, keepdim=True)
    dscores = weights * (grad @ v.float().mT - mean)
    dq, dk = dscores @ k.float() * scale, dscores.mT @ q.float() * scale
    return [x.to(q.dtype) for x in (dq, dk, weights.mT @ grad)]


def repeated(q, *keys):
    """A kernel of shared heads; heads of the keys must divide the query's."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys]


def summed(grad, key):
    return grad.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype)


def empty(x, *shape, dtype=torch.long):
    return torch.empty(shape, dtype=dtype, device=x.device)


def check_seed(seed, offset, dtype):
    assert seed.device == offset.device
    assert seed.dtype == offset.dtype == dtype


# ---- flash ------------------------------------------------------------------


def check_flash(causal, *operands):
    q, k, v = operands[:3]
    assert q.shape[3] == k.shape[3] == v.shape[3]
    assert q.shape[3] % 8 == 0
    assert not causal or q.shape[2] == k.shape[2]
    assert all(x.stride(3) == 1 for x in operands)


@_kernel("_scaled_dot_product_flash_attention")
def flash(
    q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    _calls.append("flash")
    check_flash(is_causal, q, k, v)
    assert dropout_p == 0
    out, log_sum = forward("flash", q, *repeated(q, k, v), None, is_causal, scale)
    none = empty(q, 0)
    return out, log_sum, none, none, q.shape[2], k.shape[2], none, none, none


@_kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(
    grad,
    q,
    k,
    v,
    out,
    log_sum,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    seed,
    offset,
    *,
    scale=None,
):
    _calls.append("flash_backward")
    check_flash(is_causal, q, k, v, out)
    check_seed(seed, offset, torch.uint64)
    assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    assert log_sum.shape == q.shape[:3]
    assert log_sum.is_contiguous()
    given = q, *repeated(q, k, v), None, out, log_sum
    dq, dk, dv = backward(grad, *given, is_causal, scale)
    return dq, summed(dk, k), summed(dv, v)


# ---- memory-efficient -------------------------------------------------------


def check_bias(bias, q, k):
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.dtype == q.dtype
        assert bias.stride(3) == 1
        assert all(bias.stride(dim) % 8 == 0 for dim in range(3))


@_kernel("_scaled_dot_product_efficient_attention")
def efficient(
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    _calls.append("efficient")
    assert compute_log_sumexp
    assert q.shape[1] == k.shape[1] == v.shape[1]
    check_bias(bias, q, k)
    out, log_sum = forward("efficient", q, k, v, bias, is_causal, scale)
    missing = -q.shape[2] % 32
    log_sum = torch.nn.functional.pad(log_sum, (0, missing), value=float("inf"))
    return out, log_sum, empty(q), empty(q)


@_kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    grad,
    q,
    k,
    v,
    bias,
    out,
    log_sum,
    seed,
    offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    _calls.append("efficient_backward")
    assert list(grad_input_mask) == [True, True, True, False]
    assert q.shape[1] == k.shape[1] == v.shape[1]
    check_bias(bias, q, k)
    check_seed(seed, offset, torch.long)
    rows = q.shape[2]
    assert log_sum.shape == (*q.shape[:2], -(-rows // 32) * 32)
    assert log_sum.is_contiguous()
    assert log_sum[..., rows:].isposinf().all()
    given = q, k, v, bias, out, log_sum[..., :rows]
    return *backward(grad, *given, is_causal, scale), empty(q, 0, dtype=q.dtype)


# ---- cuDNN ------------------------------------------------------------------


@_kernel("_scaled_dot_product_cudnn_attention")
def cudnn(
    q,
    k,
    v,
    bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    _calls.append("cudnn")
    assert compute_log_sumexp
    assert q.shape[1] == k.shape[1] == v.shape[1]
    out, log_sum = forward("cudnn", q, k, v, bias, is_causal, scale)
    none = empty(q, 0)
    sizes = q.shape[2], k.shape[2]
    return out, log_sum.unsqueeze(-1), none, none, *sizes, empty(q), empty(q), none


@_kernel("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(
    grad,
    q,
    k,
    v,
    out,
    log_sum,
    seed,
    offset,
    bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    _calls.append("cudnn_backward")
    check_seed(seed, offset, torch.long)
    assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
    assert log_sum.shape == (*q.shape[:3], 1)
    given = q, k, v, bias, out, log_sum.squeeze(-1)
    return tuple(backward(grad, *given, is_causal, scale))
