"""What attention kernels say of queries without weights: the guarded device's ones
stand for CUDA's, so both are asked (DEVICE=guarded, DEVICE=cuda)."""

import math

import pytest
import rig
import torch
from ranks import ranks

pytestmark = pytest.mark.skipif(
    rig.DEVICE not in ("guarded", "cuda"), reason="for devices with fused kernels"
)
aten = torch.ops.aten
ROWS, KEYS, FEATURES, SCALE = 64, 64, 64, 0.125  # one tile of keys


def forward(kernel, q, k, v, bias=None):
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, scale=SCALE)[:2]
    if kernel == "efficient":
        out = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, scale=SCALE
        )
        return out[0], out[1][..., :ROWS]
    out = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, scale=SCALE)
    return out[0], out[1].squeeze(-1)


def check(kernel, dtype, bias=None, key=None):
    q, k, v = (
        torch.rand(1, 2, rows, FEATURES, dtype=dtype, device=rig.DEVICE)
        for rows in (ROWS, KEYS, KEYS)
    )
    if key is not None:
        k.fill_(key)
    if bias is not None:
        bias = torch.zeros(1, 2, ROWS, KEYS, dtype=dtype, device=rig.DEVICE) + bias
    output, log_sum = forward(kernel, q, k, v, bias)
    says = {"flash": math.inf, "efficient": 0.0, "cudnn": -math.inf}[kernel]
    assert (log_sum == says).all(), log_sum
    if kernel != "cudnn":  # promises no output there
        assert not output.any()


@ranks(1)
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_scores_that_overflow(mesh, kernel):
    check(kernel, torch.bfloat16, key=-3e38)
    if kernel == "efficient":
        check(kernel, torch.float32, key=-3e38)


@ranks(1)
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_masks_that_hide_all_keys(mesh, kernel):
    check(kernel, torch.bfloat16, bias=float("-inf"))
    check(kernel, torch.bfloat16, bias=torch.finfo(torch.bfloat16).min)
    check(kernel, torch.float16, bias=float("-inf"))
    if kernel == "efficient":
        check(kernel, torch.float32, bias=torch.finfo(torch.float32).min)
