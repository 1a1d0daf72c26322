"""torch.compile of what writes into tensors that the program makes."""

import torch
from compiled import Compiled
from ranks import assert_close, check_op, ranks, shard, sharded, uneven
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import new_tensors_on

PRELOAD = ("torch._inductor.compile_fx",)


class Filled(torch.nn.Module):
    def forward(self, x):
        out = torch.zeros(7, 6, dtype=x.dtype)
        out[:, :4] = x.sin()
        out[2:].add_(x[0, 0])
        return out * out


class FilledByNew(torch.nn.Module):
    def forward(self, x):
        out = x.new_zeros(7, 6)
        out[:, :4] = x.sin()
        return out.exp()


@ranks(2)
def test_writes_compile_whole(mesh):
    shardtensor.set_fallback_mode("silent")
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    given = sharded(x, [Shard(0)], {0: uneven(7, mesh.size())})
    for module in (Filled(), FilledByNew()):
        torch._dynamo.reset()
        check_op(
            Compiled(module, backend="aot_eager", fullgraph=True), given, mesh=mesh
        )


def larger(x, y):
    y.mul_(2)
    x.copy_(torch.maximum(x, y))
    return x.sqrt()


@ranks(2)
def test_inputs_are_written_in_place(mesh):
    """As an optimizer's states are."""
    whole = torch.rand(7, 4), torch.rand(7, 4)
    parts = [shard(x, mesh, [Shard(0)], {0: uneven(7, mesh.size())}) for x in whole]
    torch._dynamo.reset()
    compiled = torch.compile(larger, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_close(compiled(*parts), larger(*whole))
        for actual, expected in zip(parts, whole, strict=True):
            assert_close(actual, expected)


@ranks(2)
def test_a_compiled_function_makes_plain_tensors_within_the_mode(mesh):
    shardtensor.set_fallback_mode("silent")
    x = torch.randn(7, 4, dtype=torch.float64)
    part = shard(x, mesh, [Shard(0)], {0: uneven(7, mesh.size())})
    expected = Filled()(x)
    torch._dynamo.reset()
    with new_tensors_on(mesh):
        result = torch.compile(Filled(), backend="aot_eager")(part)
    assert_close(result, expected)
