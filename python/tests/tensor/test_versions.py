"""What was saved for backward and then written: PyTorch's error, on every rank."""

import pytest
import torch
import torch.nn.functional as F
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor


def values(*shape):
    return torch.rand(shape, dtype=torch.float64)


# Operators that save a plain operand: as it is, in a promoted tensor, as a weight.
SAVES = {
    "mul": lambda x, w: x * w,
    "pow": lambda x, w: x**w,
    "maximum": torch.maximum,
    "lerp": lambda x, w: torch.lerp(x, 2 * x, w),
    "addcmul": lambda x, w: torch.addcmul(x, x, w),
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "linear": F.linear,
    "mse_loss": F.mse_loss,
    "cross entropy with logits": F.binary_cross_entropy_with_logits,
    "cdist": torch.cdist,
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "convolution": lambda x, w: F.conv1d(x[None], w[..., None]),
    "layer norm": lambda x, w: F.layer_norm(x, (4,), w[0]),
}


@ranks(1, 2, "2x2")
def test_a_plain_operand_that_is_written_before_backward(mesh):
    for name, saves in SAVES.items():
        for placement in Shard(0), Shard(1), Replicate(), Partial():
            for is_parameter in False, True:
                x = shard(values(4, 4), mesh, [placement] * mesh.ndim).requires_grad_()
                w = values(4, 4).requires_grad_(is_parameter)
                results = [saves(x, w), saves(x, w)]
                results[0].sum().backward()
                with torch.no_grad():
                    w.add_(1)
                with pytest.raises(RuntimeError, match="modified by an inplace"):
                    results[1].sum().backward()
                    raise AssertionError(f"{name}, {placement}, {is_parameter}")


# Operators that save their result.
RESULTS = {
    "exp": lambda x: x.exp(),
    "softmax": lambda x: x.softmax(0),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "sigmoid": lambda x: x.sigmoid(),
    "cumprod": lambda x: x.cumprod(0),
    "logsumexp": lambda x: x.logsumexp(0),
}


@ranks(1, 2, "2x2")
def test_a_saved_result_that_is_written(mesh):
    for name, saves in RESULTS.items():
        for placement in Shard(0), Shard(1), Replicate():
            x = shard(values(4, 4), mesh, [placement] * mesh.ndim).requires_grad_()
            y = saves(x)
            y.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                y.sum().backward()
                raise AssertionError(f"{name}, {placement}")


@ranks(1, 2)
def test_a_piece_and_its_shard_tensor_share_a_version(mesh):
    piece = values(3, 4)
    x = ShardTensor.from_local(piece, mesh, [Shard(0)]).requires_grad_()
    y = x * x
    piece.add_(1)
    assert x._version == piece._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()
    weight = values(3, 4).requires_grad_()
    z = weight * piece
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.sum().backward()
    with torch.inference_mode():
        x = ShardTensor.from_local(values(3, 4), mesh, [Shard(0)])
        assert_close(x + values(1, 4) * 0, x.full_tensor())


@ranks(1, 2)
def test_gradients_that_were_summed_together_are_written_one_by_one(mesh):
    def penalty(x):
        weight = torch.ones(4, 3, 3, dtype=torch.float64, requires_grad=True)
        bias = torch.ones(4, dtype=torch.float64, requires_grad=True)
        loss = F.conv1d(x, weight, bias, padding=1).pow(2).sum()
        of_weight, of_bias = torch.autograd.grad(
            loss, (weight, bias), create_graph=True
        )
        squares = of_weight.pow(2).sum()  # saves it
        of_bias.mul_(2)
        return torch.autograd.grad(squares, weight)[0]

    x = values(2, 3, 8)
    assert_close(penalty(shard(x, mesh, [Shard(2)])), penalty(x))
