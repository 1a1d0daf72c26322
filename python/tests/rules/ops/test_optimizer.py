"""Fused optimizer steps: parameters and states sharded, in place."""

from functools import partial

import pytest
import torch
from layouts import ALL, sweep
from ranks import assert_close, ranks, shard

PRELOAD = ("torch._inductor.compile_fx",)  # torch.optim imports the compiler

OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adam_tensor_lr": lambda p, **o: torch.optim.Adam(p, lr=torch.tensor(0.1), **o),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


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
        for tensors in (expected, parts):
            torch.ops.aten._fused_adam_(
                *([t] for t in tensors), [], [torch.tensor(1.0)],
                lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
                amsgrad=False, maximize=False,
            )  # fmt: skip
        for a, e, spec in zip(parts, expected, specs, strict=True):
            assert_close(a, e)
            assert a._spec == spec
