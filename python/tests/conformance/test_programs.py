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
        programs.check_source(2, WRONG)
