"""Arguments that do not fit are the same error on every rank, whatever its piece, and
nothing is broadcast that one device does not broadcast."""

import pytest
import torch
import torch.nn.functional as F
from conformance import mutations
from conformance.sweep import described, sweep
from ranks import ranks, shard
from torch.distributed.tensor import Shard

SUBJECTS = (
    "addmm", "bmm", "einsum", "index_put", "index_reduce.mean",
    "nn.functional.binary_cross_entropy_with_logits", "nn.functional.grid_sample",
    "nn.functional.linear", "nn.functional.max_unpool1d",
    "nn.functional.soft_margin_loss", "nn.functional.softmin", "select_scatter",
)  # fmt: skip


def test_changed_arguments():
    """`python -m conformance --wrong` tries all subjects."""
    for name in SUBJECTS:
        records = sweep(3, name, 1, source=mutations.__name__)
        failures = described(records, mutations.FAILED)
        assert not failures, failures


def long(x):
    return x.long()


CALLS = {
    "select_scatter": lambda x: torch.select_scatter(x, x[0, :1], 0, 1),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:1], 0, 1, 4),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[0, :1]),
    "mm": lambda x: x @ torch.ones(3, 2).long(),
    "addbmm": lambda x: torch.addbmm(long(x), x[None, :, :1], x[None, :1]),
    "pad": lambda x: F.pad(x, (0, 0, -6, 3)),
    "bias": lambda x: F.linear(x, torch.ones(2, 3), torch.ones(3)),
    "addend": lambda x: torch.addmm(torch.ones(4, 2), x, torch.ones(3, 2)),
    "nll_loss": lambda x: F.nll_loss(long(x), x[:, 0].long()),
    "softmax": lambda x: long(x).softmax(0),
    "max_unpool1d": lambda x: F.max_unpool1d(long(x)[:, None], long(x)[:, None], 2),
    "no outputs": lambda x: F.conv_transpose1d(
        x.t()[None], torch.ones(3, 1, 2), padding=3
    ),
    "output_padding": lambda x: F.conv_transpose1d(
        x.t()[None], torch.ones(3, 1, 2), stride=2, output_padding=2
    ),
}


@ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
def test_they_are_refused(mesh, name):
    if name == "max_unpool1d" and mesh.device_type == "cuda":
        pytest.skip("CUDA unpools integers")
    x = torch.ones(5, 3)
    with pytest.raises((RuntimeError, NotImplementedError)) as of_one:
        CALLS[name](x)
    for sizes in [5, 0, 0], [1, 4, 0], [3, 2, 0]:
        cut = shard(x, mesh, [Shard(0)], {0: sizes[: mesh.size()]})
        with pytest.raises(type(of_one.value)):
            CALLS[name](cut)


@ranks(2, 3)
def test_what_one_type_takes_another_does_not(mesh):
    """Plans of one are not those of the other."""
    x, weight = torch.ones(1, 1, 5), torch.ones(1, 1, 2)
    cut = shard(x, mesh, [Shard(2)])
    taken = F.conv_transpose1d(cut.bfloat16(), weight.bfloat16(), padding=3)
    assert taken.shape == (1, 1, 0)
    for given in x, cut:
        with pytest.raises(RuntimeError):
            F.conv_transpose1d(given, weight, padding=3)
