"""The library's own loops on PyTorch's threads: the numbers of one thread."""

import time
from contextlib import contextmanager

import rig
import torch
from ranks import ranks, shard
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.nn.functional import (
    farthest_point_sampling,
    knn,
    neighborhood_attention,
    partition_points,
    radius_search,
    signed_distance_field,
)


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cloud(points):
    return torch.rand(points, 3, generator=rig.generator(1))


def normal(*sizes):
    return torch.randn(*sizes, generator=rig.generator(2))


def neighbours(mesh):
    x = cloud(3000)
    return [*knn(x, x, 5), *radius_search(x, x, 0.1, return_dists=True)]


def farthest_points(mesh):
    """Many are equally far."""
    return [farthest_point_sampling(cloud(50_000).mul(20).floor(), 9, start=49_999)]


def a_hilbert_curve(mesh):
    x = shard(cloud(20_000), mesh, [Shard(0)])
    return [partition_points(x, mesh, method="hilbert")[1].to_local()]


def distances_of_a_surface(mesh):
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    faces = torch.tensor([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]])
    return list(signed_distance_field(corners, faces.flatten(), cloud(1000)))


def windows(heads):
    q, k, v = (normal(3, 1, 40, 30, heads, 16)[i].requires_grad_() for i in range(3))
    y = neighborhood_attention(q, k, v, (7, 5))
    return [y, *torch.autograd.grad(y.square().sum(), (q, k, v))]


def windows_of_many_heads(mesh):
    return windows(8)


def windows_of_fewer_heads_than_threads(mesh):
    return windows(2)


def counted_numbers(mesh):
    with shardtensor.random_policy("counter"):
        torch.manual_seed(3)
        x = shard(normal(300, 400), mesh, [Shard(0)])
        drawn = [torch.randn_like(x), torch.dropout(x, 0.3, True)]
        return [t.to_local() for t in (*drawn, torch._standard_gamma(x.abs() + 0.5))]


def norms(mesh):
    x = shard(normal(4, 8, 40, 50), mesh, [Shard(2)]).requires_grad_()
    y = torch.nn.functional.group_norm(x, 4)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    return [y.to_local(), grad.to_local()]


@ranks(1)
def test_threads_change_no_number(mesh):
    for loop in (
        neighbours,
        farthest_points,
        a_hilbert_curve,
        distances_of_a_surface,
        windows_of_many_heads,
        windows_of_fewer_heads_than_threads,
        counted_numbers,
        norms,
    ):
        with threads(1):
            expected = loop(mesh)
        with threads(3):
            found = loop(mesh)
        for got, one in zip(found, expected, strict=True):
            torch.testing.assert_close(got, one, rtol=0, atol=0, msg=loop.__name__)


def of_this_thread(call):
    """The part of the work that the calling thread does."""
    all_threads, this_thread = time.process_time(), time.thread_time()
    call()
    return (time.thread_time() - this_thread) / (time.process_time() - all_threads)


@ranks(1)
def test_threads_share_the_work(mesh):
    x = cloud(100_000)
    q = normal(1, 128, 128, 4, 32).requires_grad_()

    def search():
        knn(x, x, 16)

    def sample():
        farthest_point_sampling(x, 50)

    def attend():
        neighborhood_attention(q, q, q, 7).sum().backward()

    def draw():
        with shardtensor.random_policy("counter"):
            shard(normal(2000, 500), mesh, [Shard(0)]).normal_()

    for call in (search, sample, attend, draw):
        with threads(2):
            call()
            assert of_this_thread(call) < 0.8, call.__name__
