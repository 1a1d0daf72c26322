"""Random programs; `make conformance PROGRAMS=20000` tries more of them."""

import pytest
import ranks
from conformance import programs

WRONG = """
def program(x0):
    x1 = x0.sin()
    if type(x0) is not torch.Tensor:
        x1 = x1 * 2
    return x1,

inputs = [sharded(random((3,), 0), [Shard(0)])]
"""


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
def test_random_programs(mesh):
    programs.search(mesh, 120)


def test_a_wrong_program_is_found():
    with pytest.raises(
        ranks.RankError, match=r"(?s)on mesh 2:.*x1 = x1 \* 2.*output 0"
    ):
        programs.check_source(2, WRONG, order=1)


WRONG_ONCE_MORE = """
class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        x = x if type(x) is torch.Tensor else x.detach()
        return gradient * x.cos()

def program(x0):
    return Sine.apply(x0),

inputs = [sharded(random((3,), 0), [Shard(0)])]
"""


def test_a_wrong_second_derivative_is_found():
    assert programs.derivatives(WRONG_ONCE_MORE) == 2
    with pytest.raises(ranks.RankError, match="second-order gradient"):
        programs.check_source(2, WRONG_ONCE_MORE, order=2)
