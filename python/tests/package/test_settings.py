"""A with-block of a setting is its thread's, a setter the process's."""

import threading

import pytest
import torch
from ranks import ranks, shard
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import _C, ShardTensor, TensorPromotionMode

# Name: another value than the default.
SETTINGS = {
    "fallback_mode": "error",
    "gradient_policy": "deferred",
    "gradient_bucket_bytes": 7,
    "attention_transport": "ring",
    "point_transport": "boxes",
    "conv_overlap_bytes": 0,
    "random_policy": "counter",
    "check_mode": True,
    "promotion_mode": TensorPromotionMode.WARN,
}


def functions(name):
    """The getter, the setter and the with-block."""
    of = ShardTensor if name == "promotion_mode" else shardtensor
    return [getattr(of, prefix + name) for prefix in ("get_", "set_", "")]


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_block_is_its_threads_and_a_setter_the_processs(name):
    get, put, block = functions(name)
    default, other = get(), SETTINGS[name]
    with block(other):
        assert get() == other and in_a_thread(get) == default
        in_a_thread(lambda: put(other))
        with block(default):
            assert get() == default and in_a_thread(get) == other
        put(default)  # this thread's, until the block ends
        assert get() == default and in_a_thread(get) == other
    assert get() == other
    put(default)
    assert get() == default


@pytest.mark.parametrize("name", SETTINGS)
def test_blocks_of_two_threads_that_overlap_leave_nothing(name):
    get, _, block = functions(name)
    default, other = get(), SETTINGS[name]
    inside, go = threading.Event(), threading.Event()
    seen = []

    def enter():
        with block(other):
            inside.set()
            go.wait(30)
            seen.append(get())

    thread = threading.Thread(target=enter)
    thread.start()
    inside.wait(30)
    with block(default):
        go.set()
        thread.join()
        assert get() == default
    assert seen == [other] and get() == default


def test_what_a_block_refuses_leaves_nothing():
    with (
        pytest.raises(ValueError, match="gradient policy"),
        shardtensor.gradient_policy("never"),
    ):
        pass
    shardtensor.set_gradient_policy("immediate")
    assert in_a_thread(shardtensor.get_gradient_policy) == "immediate"
    shardtensor.set_gradient_policy("coalesced")


def test_settings_have_names():
    with pytest.raises(ValueError, match="expected the name of a setting, got 'speed'"):
        _C.hold_setting("speed")


@ranks(1, 2, 3, "2x2")
def test_a_model_trains_while_another_is_in_a_forward(mesh):
    """parallelize's forward is under another policy than the model beside it."""
    inside, go = threading.Event(), threading.Event()

    class Slow(torch.nn.Module):
        def forward(self, x):
            inside.set()
            go.wait(30)
            return x

    model = shardtensor.parallelize(
        torch.nn.Sequential(Slow(), torch.nn.Linear(3, 3)),
        mesh,
        "ddp",
        mesh.mesh_dim_names,
        new_tensors=False,
    )
    cut = [Shard(0)] * mesh.ndim
    x = shard(torch.arange(21.0).reshape(7, 3), mesh, cut)
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    inside.wait(30)
    weight = torch.ones(3, requires_grad=True)
    (x * weight).sum().backward()
    go.set()
    thread.join()
    assert torch.equal(weight.grad, x.full_tensor().sum(0))
    assert shardtensor.get_gradient_policy() == "coalesced"
