"""Every collective on local tensors, for every cut, beside one process that holds
all ranks' tensors. Under gloo and under MPI."""

import torch
import torch.distributed as dist

from shardtensor import distributed as st

F64 = torch.float64
SIZES = {
    1: ([3], [0]),
    2: ([2, 1], [0, 3], [0, 0]),
    3: ([2, 0, 3], [1, 1, 1], [0, 4, 0]),
    4: ([0, 1, 4, 2], [3, 0, 0, 0]),
}


def table(sizes):
    """How many rows each rank sends to each."""
    return [[(i + 2 * j) % (n + 1) for j in range(len(sizes))]
            for i, n in enumerate(sizes)]  # fmt: skip


def rows_to(sizes, i, j):
    """Which rows rank i sends to rank j, some of them several times."""
    return [(j + k) % max(sizes[i], 1) for k in range(table(sizes)[i][j])]


def cut(x, sizes, dim):
    return x.split(list(sizes), dim)


# Each: the extent of rank r's input, the outputs of all ranks from all inputs,
# and what rank r calls.


def all_gather_v(sizes, dim):
    return (
        lambda r: sizes[r],
        lambda xs: [torch.cat(xs, dim)] * len(xs),
        lambda x, r: st.all_gather_v(x, sizes, dim),
    )


def gather_v(sizes, dim):
    last = len(sizes) - 1

    def outputs(xs):
        whole = torch.cat(xs, dim)
        return [
            whole if r == last else torch.zeros_like(whole) for r, _ in enumerate(xs)
        ]

    return lambda r: sizes[r], outputs, lambda x, r: st.gather_v(x, sizes, dim, last)


def scatter_v(sizes, dim):
    last = len(sizes) - 1
    return (
        lambda r: sum(sizes) if r == last else r,
        lambda xs: list(cut(xs[last], sizes, dim)),
        lambda x, r: st.scatter_v(x, sizes, dim, last),
    )


def reduce_scatter_v(sizes, dim):
    return (
        lambda r: sum(sizes),
        lambda xs: list(cut(sum(xs[1:], xs[0]), sizes, dim)),
        lambda x, r: st.reduce_scatter_v(x, sizes, dim),
    )


def all_to_all_v(sizes, dim):
    sent = table(sizes)
    received = list(zip(*sent, strict=True))

    def outputs(xs):
        parts = [cut(x, row, dim) for x, row in zip(xs, sent, strict=True)]
        return [torch.cat(column, dim) for column in zip(*parts, strict=True)]

    return (
        lambda r: sum(sent[r]),
        outputs,
        lambda x, r: st.all_to_all_v(x, sent[r], received[r], dim),
    )


def indexed_all_to_all_v(sizes, dim):
    count = range(len(sizes))
    index = [[torch.tensor(rows_to(sizes, i, j), dtype=torch.int64) for j in count]
             for i in count]  # fmt: skip

    def outputs(xs):
        return [
            torch.cat([x.index_select(dim, index[i][j]) for i, x in enumerate(xs)], dim)
            for j in count
        ]

    return (
        lambda r: sizes[r],
        outputs,
        lambda x, r: st.indexed_all_to_all_v(x, index[r], table(sizes), dim=dim),
    )


def all_reduce(sizes, dim):
    return (
        lambda r: sizes[0],
        lambda xs: [sum(xs[1:], xs[0])] * len(xs),
        lambda x, r: st.all_reduce(x),
    )


def average(sizes, dim):
    return (
        lambda r: sizes[0],
        lambda xs: [sum(xs[1:], xs[0]) / len(xs)] * len(xs),
        lambda x, r: st.all_reduce(x, "avg"),
    )


def broadcast(sizes, dim):
    last = len(sizes) - 1
    return (
        lambda r: sizes[0],
        lambda xs: [xs[last]] * len(xs),
        lambda x, r: st.broadcast(x, last),
    )


COLLECTIVES = (
    all_gather_v, gather_v, scatter_v, reduce_scatter_v, all_to_all_v,
    indexed_all_to_all_v, all_reduce, average, broadcast,
)  # fmt: skip


def inputs(extent, ranks, dim, dtype=F64):
    made = []
    for rank in range(ranks):
        shape = [2, 2]
        shape[dim] = extent(rank)
        numbers = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=F64) + 100 * rank
        made.append((numbers / 64).reshape(shape).to(dtype).requires_grad_())
    return made


def derivatives(outputs, xs, factors):
    """Of the sum of all these ranks' losses, and of that of their gradients."""
    loss = sum((f * y**3).sum() for f, y in zip(factors, outputs, strict=True))
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    again = sum((g**2).sum() for g in first)
    if not again.requires_grad:
        return first, [torch.zeros_like(x) for x in xs]
    return first, torch.autograd.grad(again, xs, materialize_grads=True)


def check_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    for collective in COLLECTIVES:
        for sizes in SIZES[size]:
            for dim in (0, 1):
                extent, outputs, call = collective(sizes, dim)
                xs = inputs(extent, size, dim)
                x = xs[rank].detach().clone().requires_grad_()
                expected = outputs(xs)
                told = f"{collective.__name__}, sizes {sizes}, dim {dim}"
                y = call(x, rank)
                close(y, expected[rank], told)
                pairs = zip(
                    derivatives([y], [x], [rank + 1]),
                    derivatives(expected, xs, range(1, size + 1)),
                    strict=True,
                )
                for (mine,), everyones in pairs:
                    close(mine, everyones[rank], told)


def close(x, expected, told):
    torch.testing.assert_close(x, expected, msg=lambda text: f"{told}: {text}")
