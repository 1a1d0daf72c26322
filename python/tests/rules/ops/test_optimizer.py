"""Fused optimizer steps: parameters and states sharded, in place."""

from functools import partial

import pytest
import rig
import torch
from layouts import ALL, sweep
from ranks import assert_close, ranks, shard
from torch.distributed.tensor import Replicate, Shard

import shardtensor

PRELOAD = ("torch._inductor.compile_fx",)  # torch.optim imports the compiler

OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adam_tensor_lr": lambda p, **o: torch.optim.Adam(p, lr=torch.tensor(0.1), **o),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}
if rig.DEVICE == "cuda":
    del OPTIMIZERS["adagrad"]  # it has no such kernel


def trained(make, parameters, gradients):
    """Parameters and states after three steps."""
    parameters = [p.detach().clone().requires_grad_() for p in parameters]
    optimizer = make(parameters, fused=True)
    for _ in range(3):
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient * parameter.detach().cos()
        optimizer.step()
    states = [optimizer.state[p] for p in parameters]
    return parameters, [t for state in states for t in state.values()]


@ranks(*ALL)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps(mesh, name):
    make = OPTIMIZERS[name]
    weight, bias = torch.randn(5, 4), torch.randn(4)
    slopes = torch.randn(5, 4), torch.randn(4)
    expected = trained(make, [weight, bias], slopes)
    for placements, sizes in sweep(mesh, weight.shape):
        part, slope = (shard(t, mesh, placements, sizes) for t in (weight, slopes[0]))
        actual = trained(make, [part, bias], [slope, slopes[1]])
        for whole, mine in zip(expected, actual, strict=True):
            for e, a in zip(whole, mine, strict=True):
                assert_close(a, e)
        assert actual[0][0]._spec == part._spec


@ranks(2)
def test_compiled_steps_gather_nothing(mesh):
    """What they are made of in a graph has rules."""
    shardtensor.set_fallback_mode("silent")
    whole = torch.randn(5, 4)
    results = []
    for x in (whole.clone(), shard(whole, mesh, [Shard(0)], {0: [4, 1]})):
        torch._dynamo.reset()
        x.requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.1, amsgrad=True)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for _ in range(2):
            x.grad = x.detach().cos()
            step()
        results.append([x, *optimizer.state[x].values()])
    assert shardtensor.fallback_counts() == {}
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected)


def fused_adam(parameter, *others):
    """A gradient and two states."""
    torch.ops.aten._fused_adam_(
        [parameter], *([t] for t in others), [], [torch.tensor(1.0)],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


@ranks(2, 3, "2x2")
def test_fused_adam_with_gradient_and_states_in_other_layouts(mesh):
    """Each keeps its layout; the step is taken in the parameter's."""
    whole = [torch.rand(5, 4) for _ in range(4)]
    layouts = list(sweep(mesh, whole[0].shape))
    for first in range(len(layouts)):
        parts = [
            shard(t, mesh, *layouts[(first + 2 * i) % len(layouts)])
            for i, t in enumerate(whole)
        ]
        specs = [t._spec for t in parts]
        expected = [t.clone() for t in whole]
        fused_adam(*expected)
        fused_adam(*parts)
        for a, e, spec in zip(parts, expected, specs, strict=True):
            assert_close(a, e)
            assert a._spec == spec


@ranks(2, 3)
def test_fused_steps_go_through_pieces_that_lie_differently(mesh):
    """Kernels take them for one stretch of memory each."""
    whole = [torch.rand(6, 4) for _ in range(4)]
    for turned in range(4):
        parts = [shard(t, mesh, [Shard(0)]) for t in whole]
        local = parts[turned].to_local().t().contiguous().t()
        parts[turned] = shardtensor.ShardTensor.from_spec(local, parts[turned]._spec)
        expected = [t.clone() for t in whole]
        fused_adam(*expected)
        fused_adam(*parts)
        for a, e in zip(parts, expected, strict=True):
            assert_close(a, e)


@ranks(2, 3, "2x2")
def test_a_scaler_sees_what_any_rank_has(mesh):
    """Pieces are unscaled where they are; all ranks leave out a step with an
    infinity."""
    with shardtensor.fallback_mode("error"):
        for place in (None, 0, 4):
            gradients = torch.randn(5, 4), torch.randn(3)
            if place is not None:
                gradients[0][place, 1] = torch.inf
            states = []
            for weight in (
                torch.ones(5, 4), shard(torch.ones(5, 4), mesh, [Shard(0)] * mesh.ndim)
            ):  # fmt: skip
                scaler = torch.amp.GradScaler(rig.DEVICE, init_scale=8.0)
                parameters = [weight.requires_grad_(), torch.ones(3).requires_grad_()]
                optimizer = torch.optim.SGD(parameters, 0.1)
                loss = sum((p * g).sum() for p, g in zip(parameters, gradients))
                scaler.scale(loss).backward()
                shardtensor.reset_comm_stats()
                scaler.unscale_(optimizer)
                reduced = shardtensor.comm_stats().all_reduces
                assert reduced == len(states)  # none of the plain tensors'
                grads = [p.grad.clone() for p in parameters]
                scaler.step(optimizer)
                scaler.update()
                states.append([*grads, *parameters, scaler.get_scale()])
            for one, other in zip(*states, strict=True):
                assert_close(torch.as_tensor(other), torch.as_tensor(one))


@ranks(2, 3)
def test_a_scaler_writes_what_it_found_into_any_layout(mesh):
    for place in (None, 0, 4):
        gradient = torch.ones(5, 4)
        if place is not None:
            gradient[place, 1] = torch.inf
        for placement in (Shard(0), Replicate()):
            found = shard(torch.zeros(1), mesh, [placement])
            torch._amp_foreach_non_finite_check_and_unscale_(
                [shard(gradient, mesh, [Shard(0)])], found, torch.tensor(0.5)
            )
            assert_close(found, torch.tensor([float(place is not None)]))


@ranks(2, 3)
@pytest.mark.parametrize("name", ["addcdiv", "addcmul"])
def test_factors_of_a_list_in_a_tensor(mesh, name):
    fn = getattr(torch, f"_foreach_{name}")
    write = getattr(torch, f"_foreach_{name}_")
    lists = [[torch.randn(5, 3), torch.randn(4)] for _ in range(3)]
    factors = torch.tensor([2.0, 3.0], device="cpu")
    expected = fn(*lists, factors)
    part = partial(shard, mesh=mesh, placements=[Shard(0)])
    cuts = [lambda x: x, part, lambda x: shard(x, mesh, [Replicate()])]
    for cut in cuts if rig.DEVICE == "cpu" else cuts[:1]:  # the host reads them
        parts = [[part(x) for x in one] for one in lists]
        for found, e in zip(fn(*parts, cut(factors)), expected, strict=True):
            assert_close(found, e)
        write(*parts, cut(factors))
        for found, e in zip(parts[0], expected, strict=True):
            assert_close(found, e)
    with pytest.raises(RuntimeError, match="to match input of length 2 but got 3"):
        fn(*parts, torch.ones(3, device="cpu"))
