"""parallelize: data x domain is one device, step after step, and stays so."""

import copy
import functools
import itertools

import pytest
import rig
import torch
import torch.distributed as dist
from data_by_domain import MESHES, make, over_data, part, whole
from oracle import WHOLE, every
from ranks import assert_close, ranks, shard
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import conv2d
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import shardtensor
from shardtensor import check_replicas, parallelize

PRELOAD = ("torch._inductor.compile_fx",)


class Net(nn.Module):
    """Convolutions, a norm over the domain, a tensor that is made in forward, a
    parameter on its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.last = nn.Conv2d(6, 3, 3, padding=1, stride=2)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        filled = torch.zeros_like(self.scale).expand(3, 1, 1)
        return self.last(x) * self.scale + filled


def net():
    torch.manual_seed(5)
    return Net().double()


def steps(model, batches, optimizer, loss_of, accumulate=1, no_sync=None):
    for i, x in enumerate(batches):
        last = (i + 1) % accumulate == 0
        with no_sync(not last) if no_sync else torch.enable_grad():
            (loss_of(model(x)) / accumulate).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def mean_square(y):
    return y.square().mean()


def assert_same(model, reference, tolerance=1e-9):
    inner = getattr(model, "module", model)
    for (name, p), q in zip(
        inner.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(
            whole(p),
            q,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@ranks(4)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.tail), 2])
@pytest.mark.parametrize(
    "data", ["ddp", "fsdp", pytest.param("hsdp", marks=pytest.mark.tail)]
)
@pytest.mark.parametrize("name", MESHES)
def test_steps_are_those_of_one_device(mesh, name, data, accumulate):
    check_steps(name, data, accumulate)


@ranks(2)
@pytest.mark.parametrize("name", ["1x2", "2x1"])
def test_steps_of_two_ranks(mesh, name):
    """On a device, too."""
    for data in ("ddp", "fsdp"):
        check_steps(name, data, accumulate=2)


def check_steps(name, data, accumulate):
    mesh, axes, domain = make(name)
    reference, model = net(), net()
    if dist.get_rank() != 0:
        nn.init.zeros_(model.first.weight)  # parallelize makes it equal
    model = parallelize(model, mesh, data, axes)
    batches = [torch.randn(4, 2, 9, 6).double() for _ in range(10 * accumulate)]
    optimizers = [torch.optim.AdamW(m.parameters(), 0.05) for m in (reference, model)]
    steps(reference, batches, optimizers[0], mean_square, accumulate)

    def no_sync(skip):
        if data == "ddp":
            return model.no_sync() if skip else torch.enable_grad()
        model.set_requires_gradient_sync(not skip)
        return torch.enable_grad()

    parts = [part(x, mesh, domain) for x in batches]
    steps(model, parts, optimizers[1], mean_square, accumulate, no_sync)
    assert_same(model, reference)
    check_replicas(model, mesh)


class Tied(nn.Module):
    """The root reads its child's weight, which FSDP has cut then."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(2, 5, 1, bias=False)
        self.middle = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x):
        y = self.middle(self.encode(x)).tanh()
        weight = self.encode.weight
        return conv2d(y, weight.transpose(0, 1) / (1 + weight.square().sum()))


@ranks(4)
@pytest.mark.parametrize("data", ["fsdp", "hsdp"])
def test_parameters_that_fsdp_has_cut_are_gathered(mesh, data):
    """Also those of a penalty, outside of forward."""
    for name in MESHES if WHOLE else ("2x2",):
        mesh, axes, domain = make(name)
        torch.manual_seed(5)
        reference = Tied().double()
        model = parallelize(copy.deepcopy(reference), mesh, data, axes)
        batches = [torch.randn(4, 2, 9, 6).double() for _ in range(4)]
        parts = [part(x, mesh, domain) for x in batches]
        for each, given in ((reference, batches), (model, parts)):
            optimizer = torch.optim.AdamW(each.parameters(), 0.05)

            def penalized(y, each=each):
                squares = [p.square().sum() for p in each.parameters()]
                return y.square().mean() + 0.1 * sum(squares)

            steps(each, given, optimizer, penalized, accumulate=2)
        assert_same(model, reference)
        check_replicas(model, mesh)
        with torch.no_grad():
            mine = batches[0].chunk(mesh.size(0))[mesh.get_local_rank(0)]
            expected = reference(mine)
            assert_close(model(parts[0]), expected, rtol=1e-9, atol=1e-9)


@ranks(1, 2, 3)
def test_a_domain_alone(mesh):
    reference, model = net(), net()
    model = parallelize(model, mesh, None)
    assert model is parallelize(model, mesh, None) and type(model) is Net
    optimizers = [torch.optim.AdamW(m.parameters(), 0.05) for m in (reference, model)]
    batches = [torch.randn(2, 2, 9, 6).double() for _ in range(3)]
    steps(reference, batches, optimizers[0], mean_square)
    parts = [shard(x, mesh, [Shard(2)]) for x in batches]
    steps(model, parts, optimizers[1], mean_square)
    assert_same(model, reference)


@ranks(2)
def test_new_tensors_follow_the_mesh_in_forward_only(mesh):
    made = {}

    class Making(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            made["inside"] = torch.zeros(3)
            if x is None:
                raise KeyError("fails")
            return x * self.weight

    for data in ("ddp", "fsdp", None):
        for told in ({}, {"new_tensors": True}, {"new_tensors": False}):
            model = nn.Sequential(Making(), nn.Sequential(Making()))
            model = parallelize(model, mesh, data, **told)
            assert shardtensor.get_gradient_policy() == "coalesced"  # the default
            model(shard(torch.ones(4, 3), mesh, [Shard(0)])).sum().backward()
            expected = told.get("new_tensors", True)
            assert shardtensor.is_shard_tensor(made["inside"]) == expected
    models = [parallelize(Making(), mesh, d) for d in ("ddp", "fsdp")]
    for each in (*models, copy.deepcopy(models[0].module)):
        with pytest.raises(KeyError):
            each(None)
        assert not shardtensor.is_shard_tensor(torch.zeros(3))


@ranks(2)
def test_copies_go_their_own_way(mesh):
    """Whichever of them is parallelized anew, in whatever way."""
    pair, _, domain = make("1x2")
    x = torch.randn(2, 2, 9, 6).double()
    cut = part(x, pair, domain)

    def gradients(model, x):
        model(x).square().mean().backward()
        return [whole(p.grad) for p in getattr(model, "module", model).parameters()]

    expected = gradients(net(), x)
    first = net()
    one = parallelize(first, pair, "ddp")
    copied = parallelize(copy.deepcopy(first), pair, None)
    plain = parallelize(net(), pair, None)
    other = copy.deepcopy(plain)
    wrapped = parallelize(plain, pair, "ddp")
    for model in (one, copied, other, wrapped, copy.deepcopy(other)):
        model.zero_grad()
        for mine, grad in zip(gradients(model, cut), expected, strict=True):
            torch.testing.assert_close(mine, grad)


@ranks(2)
def test_the_wrapper_sums_all_gradients(mesh):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    x = shard(torch.randn(2, 2, 9, 6), mesh, [Shard(2)])
    for data, expected in ((None, 1), ("ddp", 0)):
        wrapped = parallelize(model, mesh, data)
        wrapped(x).to_local().square().sum().backward()
        shardtensor.reset_comm_stats()
        wrapped(x).to_local().square().sum().backward()
        assert shardtensor.comm_stats().all_reduces == expected


class Norms(nn.Sequential):
    def __init__(self, affine):
        layers = [nn.GroupNorm(2, 4, affine=affine), nn.ReLU()] * 2
        super().__init__(*layers, nn.GroupNorm(1, 4, affine=affine))


@ranks(2)
def test_a_step_sends_what_ddp_and_the_norms_send(mesh):
    """As many buckets as DDP on pieces that know nothing of each other, and of our
    all-reduces those for the statistics of norms."""
    piece = torch.randn(2, 4, 8, 6)
    x = shard(torch.cat([piece, piece], 2), mesh, [Shard(2)])
    alone = x.detach().requires_grad_()
    Norms(affine=False)(alone).square().mean().backward()  # plans
    shardtensor.reset_comm_stats()
    Norms(affine=False)(alone).square().mean().backward()
    statistics = shardtensor.comm_stats().all_reduces
    assert statistics >= 3

    buckets = {}
    for name, given in (("plain", piece), ("sharded", x)):
        model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Norms(affine=True))
        if name == "plain":
            model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
        else:
            model = parallelize(model, mesh, bucket_cap_mb=1e-4)
        sent = buckets[name] = []
        model.register_comm_hook(sent, counted)
        for _ in range(2):  # DDP makes its buckets anew after the first
            sent.clear()
            shardtensor.reset_comm_stats()
            model(given).square().mean().backward()
    assert buckets["sharded"] == buckets["plain"] and len(buckets["plain"]) > 1
    assert shardtensor.comm_stats().all_reduces == statistics


def counted(sent, bucket):
    sent.append(bucket.buffer().numel())
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


class Variant(nn.Module):
    """What programs do with parameters."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.one = nn.Conv2d(2, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.three = self.two if kind == "shared" else nn.Conv2d(4, 4, 3, padding=1)
        if kind == "frozen":
            self.two.requires_grad_(False)
        if kind == "tied":
            self.three.weight = self.two.weight
        if kind == "tied to the root":
            self.weight = self.two.weight

    def forward(self, x):
        x = self.one(x).tanh()
        if self.kind == "checkpointed":
            x = checkpoint(self.two, x, use_reentrant=False)
        elif self.kind != "unused":
            x = self.two(x)
        return self.three(x.tanh())


@ranks(4)
@pytest.mark.parametrize(
    "kind, data",
    every(
        2,
        itertools.product(
            ["frozen", "shared", "tied", "tied to the root", "checkpointed", "unused"],
            ["ddp", "fsdp", "hsdp"],
        ),
    ),
)
def test_parameters_of_every_kind(mesh, kind, data):
    torch.manual_seed(2)
    start, reference = Variant(kind).double(), None
    batches = [torch.randn(4, 2, 9, 6).double() for _ in range(5)]
    options = (
        {"find_unused_parameters": True} if (data, kind) == ("ddp", "unused") else {}
    )
    for name in MESHES if WHOLE else ("2x2",):
        mesh, axes, domain = make(name)
        model = parallelize(copy.deepcopy(start), mesh, data, axes, **options)
        parts = [part(x, mesh, domain) for x in batches]
        if reference is None:
            reference = trained(copy.deepcopy(start), batches)
        assert_same(trained(model, parts), reference)
        check_replicas(getattr(model, "module", model), mesh)


def trained(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, foreach=True)
    steps(model, batches, optimizer, mean_square)
    return model


class Listed(nn.Module):
    """Layers in containers that have no forward."""

    def __init__(self):
        super().__init__()
        layers = {"first": nn.Conv2d(2, 4, 3, padding=1), "none": nn.ModuleList()}
        self.layers = nn.ModuleList([nn.ModuleDict(layers), nn.Conv2d(4, 1, 1)])

    def forward(self, x):
        return self.layers[1](self.layers[0]["first"](x).tanh())


@ranks(2)
def test_layers_in_lists(mesh):
    torch.manual_seed(2)
    reference = Listed().double()
    model = parallelize(copy.deepcopy(reference), mesh, "fsdp")
    assert isinstance(model.layers[0]["first"], FSDPModule)
    batches = [torch.randn(2, 2, 9, 6).double() for _ in range(2)]
    parts = [shard(x, mesh, [Shard(2)]) for x in batches]
    for m, given in ((reference, batches), (model, parts)):
        steps(m, given, torch.optim.AdamW(m.parameters(), 0.05), mean_square)
    assert_same(model, reference)


@ranks("2x2")
@pytest.mark.parametrize("optimizer", ["lbfgs", "fused", "zero"])
def test_optimizers_and_averages(mesh, optimizer):
    mesh, axes, domain = make("2x2")
    reference, model = net(), parallelize(net(), mesh, "ddp", axes)
    averages = [AveragedModel(m) for m in (reference, model.module)]
    batches = [torch.randn(4, 2, 9, 6).double() for _ in range(3)]
    makers = {
        "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
        "fused": lambda p: torch.optim.AdamW(p, 0.05, fused=True),
        "zero": lambda p: torch.optim.AdamW(p, 0.05),
    }
    optimizers = [makers[optimizer](m.parameters()) for m in (reference, model)]
    if optimizer == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        options = {"optimizer_class": torch.optim.AdamW, "lr": 0.05}
        optimizers[1] = ZeroRedundancyOptimizer(model.parameters(), **options)
    for x in batches:
        for m, each, data in zip(
            (reference, model), optimizers, (x, part(x, mesh, domain)), strict=True
        ):

            def closure(m=m, each=each, data=data):
                each.zero_grad()
                loss = mean_square(m(data))
                loss.backward()
                # LBFGS looks at the value: that of all samples, on all ranks.
                return over_data(loss, mesh)

            each.step(closure)
        for average, m in zip(averages, (reference, model.module), strict=True):
            average.update_parameters(m)
    assert_same(model, reference)
    assert_same(averages[1].module, averages[0].module)


@ranks(4)
@pytest.mark.parametrize("data", ["ddp", pytest.param("hsdp", marks=pytest.mark.tail)])
def test_replicas_stay_equal_for_200_steps(mesh, data):
    mesh = init_device_mesh(rig.DEVICE, (2, 2), mesh_dim_names=("data", "domain"))
    kept = []
    for count in (200, 40):
        model = parallelize(net().float(), mesh, data)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        torch.manual_seed(dist.get_rank() // 2)
        for i in range(count):
            x = shard(torch.randn(1, 2, 9, 6), mesh["domain"], [Shard(2)])
            steps(model, [x], optimizer, mean_square)
            if i == 39:
                kept.append([whole(p).detach().clone() for p in model.parameters()])
        check_replicas(model, mesh)
    for p, q in zip(*kept, strict=True):
        assert torch.equal(p, q)  # the same run gives the same bits


@ranks("2x2")
def test_replicas_that_differ_are_named(mesh):
    model = net()
    cut = distribute_tensor(torch.arange(8.0), mesh["domain_w"], [Shard(0)])
    model.cut = nn.Parameter(cut)
    check_replicas(model, mesh)
    with torch.no_grad():
        if dist.get_rank() == 2:
            model.scale[0] = torch.nextafter(model.scale[0], torch.tensor(2.0).double())
        if dist.get_rank() == 3:
            model.cut.to_local()[1] = 0
    with pytest.raises(RuntimeError) as caught:
        check_replicas(model, mesh)
    lines = str(caught.value).splitlines()
    assert lines == [
        "check_replicas: replicas differ",
        "scale: mesh ranks 0 and 2",
        "cut: mesh ranks 1 and 3",
    ]
    if dist.get_rank() == 1:
        model.register_buffer("more", torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"the ranks have \[8, 9, 8, 8\] parameters"):
        check_replicas(model, mesh)


class WithPieces(nn.Module):
    """y = conv(x + here) + there, in pieces of the domain."""

    def __init__(self, here, there):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.here = nn.Parameter(here, requires_grad=False)
        self.register_buffer("there", there)

    def forward(self, x):
        return self.conv(x + self.here) + self.there


@ranks("2x2")
def test_pieces_that_are_not_trained(mesh):
    domain = mesh["domain_w"]
    here, there, x = torch.randn(4, 7), torch.randn(4, 7), torch.randn(2, 2, 4, 7)
    cut = [shard(t, domain, [Shard(1)], {1: [5, 2]}) for t in (here, there)]
    model = parallelize(WithPieces(*cut), mesh, "ddp", domain=("domain_w",))
    own = shard(x[mesh.get_coordinate()[0]], domain, [Shard(2)], {2: [5, 2]})
    model(own).square().mean().backward()
    whole = WithPieces(here, there)
    whole(x.flatten(0, 1)).square().mean().backward()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        if b.grad is not None:
            assert_close(a.grad, b.grad)
    for data in ("ddp", "fsdp", "hsdp"):
        module = WithPieces(*cut)
        module.here.requires_grad_()
        with pytest.raises(ValueError, match=f'here is a ShardTensor, .* "{data}"'):
            parallelize(module, mesh, data, domain=("domain_w",))


@ranks("2x2")
def test_axes_and_wrappers_that_are_not_there(mesh):
    with pytest.raises(ValueError, match="domain: expected axes of .* got \\('x',\\)"):
        parallelize(net(), mesh, domain=("x",))
    with pytest.raises(
        ValueError, match='expected "ddp", "fsdp", "hsdp" or None, got \'zero\''
    ):
        parallelize(net(), mesh, "zero", ("domain_w",))
    with pytest.raises(
        ValueError, match=r"the axes \['domain_h'\] .* or \"hsdp\", got"
    ):
        parallelize(net(), mesh, None, ("domain_w",))
    with pytest.raises(ValueError, match=r"units: expected modules of Net.*got Linear"):
        parallelize(net(), mesh, "fsdp", ("domain_w",), units=[nn.Linear(1, 1)])
    for data in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match="module: .* is on meta, without values"):
            parallelize(net().to("meta"), mesh, data, ("domain_w",))


@ranks("2x2")
def test_what_one_rank_is_told_otherwise(mesh):
    last = dist.get_rank() == 3
    axes = ("domain_w",)
    other = nn.Linear(2, 3 if last else 2)
    model = net()
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)]
    fsdp = functools.partial(parallelize, model, mesh, "fsdp", axes)
    for call, text in (
        (
            lambda: parallelize(net(), mesh, "zero" if last else "ddp", axes),
            "'zero' .on",
        ),
        (
            lambda: parallelize(net(), mesh, "ddp", ("x",) if last else axes),
            "'x',. .on",
        ),
        (
            lambda: parallelize(net(), mesh, "fsdp" if last else "ddp", axes),
            "ranks .3.:",
        ),
        (lambda: parallelize(other, mesh, "ddp", axes), r"weight torch.float32 .3, 2."),
        (
            lambda: parallelize(other, mesh, "fsdp", axes),
            r"weight torch.float32 .3, 2.",
        ),
        (lambda: fsdp(units=[] if last else None), "ranks .3.:"),
        (lambda: fsdp(units=[model.last] if last else [model.first]), "'last'"),
        (lambda: fsdp(new_tensors=last), "ranks .3.:"),
        (lambda: fsdp(reshard_after_forward=last), "'reshard_after_forward': 'True'"),
        (lambda: fsdp(mp_policy=policies[last]), "torch.bfloat16"),
        (lambda: fsdp(**{"mp_policy": policies[0]} if last else {}), "'mp_policy'"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
