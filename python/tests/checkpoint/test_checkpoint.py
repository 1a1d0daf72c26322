"""Checkpoints: written on some ranks, loaded on others, whole or not there."""

import io
import json
import os
import struct
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracle import Repeated
from ranks import assert_close, from_spec, ranks, run, shard, uneven
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute_dtensor

import shardtensor
from shardtensor import _C, checkpoint
from shardtensor.checkpoint.reading import BLOCK, Item, read_tensor

PRELOAD = ("shardtensor.checkpoint", "torch._inductor.compile_fx")

WHOLE = {
    "rows": torch.arange(33.0).reshape(11, 3),
    "columns": torch.arange(60).reshape(4, 15),
    "repeated": torch.arange(24.0).reshape(12, 2),
    "scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "blank": torch.empty(0, 6),
    "few": torch.arange(2.0).bfloat16(),
}


def tensors(mesh, fill=True, flip=False):
    """Cut in every way; `flip` reverses uneven cuts."""
    first, last = Shard(0), Shard(1)
    if mesh.ndim == 2:
        spread = {"rows": [Shard(0), Shard(1)], "columns": [Shard(1), Shard(1)]}
    else:
        spread = {"rows": [Shard(0)], "columns": [Shard(1)]}
    spread["blank"] = spread["columns"]
    other = [Replicate()] * (mesh.ndim - 1)
    step = -1 if flip else 1
    cuts = {
        "rows": {0: uneven(11, mesh.size(0))[::step]},
        "columns": {1: [0, *uneven(15, mesh.size() - 1)]} if mesh.size() > 1 else {},
        "repeated": {0: Repeated(uneven(4, mesh.size(0))[::step], 3)},
    }
    result = {}
    for name, whole in WHOLE.items():
        placements = spread.get(name) or [first if whole.dim() else Replicate(), *other]
        if name == "few" and flip:
            placements = [*other, first]
        value = whole if fill else torch.zeros_like(whole)
        result[name] = shard(value, mesh, placements, cuts.get(name))
    dtensor = WHOLE["rows"] if fill else torch.zeros(11, 3)
    result["dtensor"] = distribute_dtensor(dtensor, mesh, [last, *other])
    result["plain"] = WHOLE["rows"].clone() if fill else torch.zeros(11, 3)
    return result


def save_tensors(mesh, folder):
    checkpoint.save({"fields": tensors(mesh), "epoch": 7}, folder, 3)
    checkpoint.save({"fields": tensors(mesh), "epoch": 8}, folder, 12)


def load_tensors(mesh, folder):
    for flip in (False, True):
        state = {"fields": tensors(mesh, fill=False, flip=flip), "epoch": 0}
        assert checkpoint.load(state, folder) == 12 and state["epoch"] == 8
        for name, whole in WHOLE.items():
            assert_close(state["fields"][name], whole, what=name)
        assert torch.equal(state["fields"]["dtensor"].full_tensor(), WHOLE["rows"])
        assert torch.equal(state["fields"]["plain"], WHOLE["rows"])


@pytest.mark.parametrize("to", [1, 2, 3, 6, "2x2"])
@pytest.mark.parametrize("saved_on", [4, "2x2"])
def test_any_number_of_ranks_loads_it(tmp_path_factory, saved_on, to):
    folder = _saved(tmp_path_factory, saved_on)
    assert checkpoint.steps(folder) == [3, 12]
    run(to, load_tensors, folder)


_folders = {}


def _saved(factory, on):
    if on not in _folders:
        _folders[on] = factory.mktemp("saved")
        run(on, save_tensors, _folders[on])
    return _folders[on]


@ranks(2)
def test_dcp_itself_saves_and_loads(mesh, tmp_path):
    """No file of ours is needed to read a checkpoint, nor to write one."""
    dcp.save(tensors(mesh), checkpoint_id=tmp_path / "theirs")
    state = tensors(mesh, fill=False, flip=True)
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    assert_close(state["rows"], WHOLE["rows"])
    checkpoint.save(tensors(mesh), tmp_path, 1)
    state = tensors(mesh, fill=False)
    dcp.load(state, checkpoint_id=tmp_path / "step_00000001")
    assert_close(state["columns"], WHOLE["columns"])
    beside, rows = {"checkpoint_id": tmp_path / "beside"}, {"rows": state["rows"] * 0}
    with pytest.raises(NotImplementedError, match=r"checkpoint.Stager\(\) for dcp.asy"):
        dcp.async_save(tensors(mesh), **beside)
    dcp.async_save(tensors(mesh), async_stager=checkpoint.Stager(), **beside).result()
    dcp.load(rows, **beside)
    assert_close(rows["rows"], WHOLE["rows"])
    with pytest.raises(ValueError, match="sum: sum is a sum that is still to be made"):
        term = from_spec(torch.ones(3), shardtensor.make_spec(mesh, (3,), [Partial()]))
        checkpoint.save({"sum: sum": term}, tmp_path, 2)


def test_tensors_of_any_kind_are_read_into_their_place(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    long = torch.arange(2.0 * 3 * 300_000).reshape(2, 3, 300_000)  # rows beyond a block
    waves = torch.complex(base, base + 1)
    for x in (
        base, base.t(), base[1:3], base.bool(), base.bfloat16(), base[:0], base.int(),
        base.to(torch.complex64), base.to(torch.uint16), base.to(torch.float8_e5m2),
        torch.tensor(2.5), long, long.to(torch.float64),
        base[:1, 0], base[2:3, :1].t(),
        waves.conj(), waves.t().conj(), waves.conj().imag, waves.imag,
        waves[0, 0].conj(),
    ):  # fmt: skip
        for lead in (0, 3):  # an item begins anywhere
            file = io.BytesIO(b"." * lead)
            file.seek(lead)
            torch.save(x, file)
            data = file.getvalue()
            for begins, ends in boxes(x):
                found = read_back(tmp_path, data, lead, begins, ends, x.dtype)
                box = x[tuple(map(slice, begins, ends))]
                wide = torch.complex128 if x.is_complex() else torch.float64
                assert torch.equal(found.to(wide), box.to(wide))
    with pytest.raises(RuntimeError):
        read_back(tmp_path, bytes(len(data)), 0, (0,), (1,), x.dtype)


def boxes(x):
    """All of it, and some of each dim."""
    yield (0,) * x.dim(), tuple(x.shape)
    if x.numel() > 1:
        yield (1,) * x.dim(), tuple(x.shape)
        yield (0, *(1 for _ in x.shape[1:])), (2, *(n - 1 for n in x.shape[1:]))


def read_back(folder, data, lead, begins, ends, dtype):
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    (folder / "file").write_bytes(data)
    with open(folder / "file", "rb", buffering=0) as file:
        found = []
        for target in targets(lengths, dtype):
            read_tensor(Item(file, lead, len(data) - lead), target, begins, lengths)
            found.append(target.clone())
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert all(torch.equal(x.to(wide), found[0].to(wide)) for x in found)
    other = torch.empty(lengths, dtype=torch.float64)
    if not dtype.is_complex:
        with open(folder / "file", "rb", buffering=0) as file:
            read_tensor(Item(file, lead, len(data) - lead), other, begins, lengths)
        assert torch.equal(other, target.double())
    return target


def targets(lengths, dtype):
    """Those whose bytes are not in the file's order, too, or mean other numbers."""
    yield torch.empty(lengths, dtype=dtype)
    yield torch.empty([*lengths, 2], dtype=dtype)[..., 1]
    if dtype.is_complex:
        yield torch.empty(lengths, dtype=dtype).conj()
    if dtype == torch.float64:
        yield torch.empty(lengths, dtype=torch.complex128).conj().imag


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 * BLOCK))
    with open(tmp_path / "file", "rb", buffering=0) as file:
        Item(file, 5, 3 * BLOCK - 5).crc32c()
        os.truncate(tmp_path / "file", BLOCK)
        item = Item(file, 5, 3 * BLOCK - 5)
        with pytest.raises(OSError, match=f"it ends after {BLOCK - 5} of "):
            item.crc32c()
        with pytest.raises(OSError, match="it ends after"):
            item.fill(memoryview(bytearray(9)), BLOCK)


def test_an_item_is_read_and_summed_in_one_pass(tmp_path, monkeypatch):
    """Whatever box of it is wanted."""
    counts, preadv = [], os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda *call: counts.append(preadv(*call)) or counts[-1]
    )
    x = torch.rand(3000, 500)
    torch.save(x, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    for begins, ends in boxes(x):
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        with open(tmp_path / "file", "rb", buffering=0) as file:
            item, target = Item(file, 0, len(data)), torch.empty(lengths)
            counts.clear()
            read_tensor(item, target, begins, lengths)
            assert item.crc32c() == _C.crc32c(data)
            assert len(data) <= sum(counts) < len(data) + 10_000
            assert torch.equal(target, x[tuple(map(slice, begins, ends))])


def test_checksums_are_castagnolis():
    assert _C.crc32c(b"123456789") == 0xE3069283
    data = bytes(range(256)) * 3
    for cut in (0, 1, 7, 8, 500, 768):
        assert _C.crc32c(data[cut:], _C.crc32c(data[:cut])) == _C.crc32c(data)


# ---- nested values ----------------------------------------------------------


class Pair(NamedTuple):
    field: object
    count: object


def nested(mesh, value):
    """What a program may hand over, with this value in all of it."""
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, value)
    optimizer = torch.optim.SGD(layer.parameters(), float(value))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scheduler.last_epoch = value
    field = shard(torch.full((4,), float(value)), mesh, [Shard(0)])
    return {
        "parts": {"nets": [layer], "by": (optimizer, {"scheduler": scheduler})},
        "tuple": (field, value, {"inner": [field.clone()]}),
        "pair": Pair(field.clone(), value),
        "numbers": (value, {"a": value}),
        "keys": {1: field.clone(), 2: value, "list": [value, {3: value}]},
        5: value,
    }


def said(state):
    """The values, and in what they are."""
    if isinstance(state, dict):
        return {key: said(inner) for key, inner in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state).__name__, [said(inner) for inner in state]
    if isinstance(state, nn.Linear):
        return state.weight.tolist()
    if isinstance(state, torch.optim.SGD):
        return state.param_groups[0]["lr"]
    return getattr(state, "last_epoch", None) or str(state)


def objects(state):
    """Those that stay the same ones."""
    by = state["parts"]["by"]
    kept = [*by[:1], by[1]["scheduler"], *state["parts"]["nets"], state["tuple"][0]]
    return [*kept, state["keys"], state["keys"]["list"], state["pair"].field]


@ranks(1, 2)
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save])
def test_nested_values_are_loaded_in_place(mesh, tmp_path, save):
    done = save(nested(mesh, 7), tmp_path, 1)
    if done:
        done.result()
    dist.barrier()
    state = nested(mesh, 2)
    before = objects(state)
    checkpoint.load(state, tmp_path)
    assert said(state) == said(nested(mesh, 7))
    assert all(a is b for a, b in zip(objects(state), before, strict=True))


@ranks(1, 2, 3)
def test_constants_stay_alike_on_all_ranks(mesh, tmp_path):
    """Of what all have one rank writes the file, and all read it."""
    x = torch.arange(8.0).reshape(4, 2)
    part, made = shard(x, mesh, [Shard(0)]), None
    for step in (1, 2):
        made = part.new_zeros(4, 3)
        checkpoint.save({"made": made}, tmp_path, step)
        made[:, :2] = part
        assert made.placements == (Shard(0),)
        assert_close(made, torch.cat([x, torch.zeros(4, 1)], 1))
    checkpoint.save({"made": made}, tmp_path, 3)
    target = part.new_zeros(4, 3)
    checkpoint.load({"made": target}, tmp_path)
    assert_close(target, made.full_tensor())


@ranks(1, 2)
def test_an_empty_dict_gets_what_was_saved(mesh, tmp_path):
    field = shard(torch.arange(4.0), mesh, [Shard(0)])
    log = {"loss": 0.5, "by": {"rank": [1, 2]}, "fields": [field, 3]}
    checkpoint.save({"log": log, "other": 4, "none": {}, "no": {}}, tmp_path, 1)
    state = {"log": {}, "other": {}, "none": defaultdict(list), "no": {}}
    state["log"] = before = defaultdict(list)
    checkpoint.load(state, tmp_path)
    (whole, three) = before.pop("fields")
    assert state["log"] is before == {"loss": 0.5, "by": {"rank": [1, 2]}}
    assert torch.equal(whole, torch.arange(4.0).cpu()) and three == 3
    assert state["other"] == 4 and state["none"] == state["no"] == {}
    assert checkpoint.load({}, tmp_path) == 1


# ---- training ---------------------------------------------------------------


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.PReLU(4))


def train(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def wrapped(mesh, how):
    """A model whose samples are cut over the mesh."""
    model = net()
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp":
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_and_save(mesh, how, folder):
    model, optimizer = wrapped(mesh, how)
    x = shard(torch.randn(2, 3, 8, 5), mesh, [Shard(2)])
    with shardtensor.gradient_policy("coalesced" if how == "plain" else "deferred"):
        train(model, optimizer, x, 2)
        state = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": _schedule(optimizer),
        }
        future = checkpoint.async_save(state, folder, 2, keep=1)
        train(model, optimizer, x, 2)  # beside it: what is saved is a copy
        future.result()
    return full(model)


def load_and_train(mesh, how, folder):
    model, optimizer = wrapped(mesh, how)
    scheduler = _schedule(optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    assert checkpoint.load(state, folder) == 2 and state["model"] is model
    assert scheduler.last_epoch == 5
    x = shard(torch.randn(2, 3, 8, 5), mesh, [Shard(2)])
    with shardtensor.gradient_policy("coalesced" if how == "plain" else "deferred"):
        train(model, optimizer, x, 2)
    return full(model)


def _schedule(optimizer):
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scheduler.last_epoch = 5
    return scheduler


def full(model):
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).tolist()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("to", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("how", ["plain", "ddp", "fsdp"])
def test_training_goes_on_in_another_wrapper_on_other_ranks(tmp_path, how, to):
    expected = run(2, train_and_save, how, tmp_path)[0]
    for found in run(3, load_and_train, to, tmp_path):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q))


# ---- one file -----------------------------------------------------------------


@ranks(1, 2, "2x2")
def test_whole_tensors_stream_into_one_file(mesh, tmp_path):
    state = {"fields": tensors(mesh), "model": net().state_dict(), "epoch": 3}
    for name, whole in checkpoint.full_tensors(state["fields"]):
        assert torch.equal(whole, WHOLE.get(name, WHOLE["rows"]).cpu()), name
    path = tmp_path / "all.safetensors"
    checkpoint.export(state, path)
    dist.barrier()
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    assert size % 8 == 0 and "model.1.running_mean" in header
    for name, whole in WHOLE.items():
        told = header[f"fields.{name}"]
        begin, end = told["data_offsets"]
        assert told["shape"] == list(whole.shape)
        found = torch.frombuffer(bytearray(body[begin:end] or b" "), dtype=torch.uint8)
        expected = whole.cpu().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(found[: expected.numel()], expected), name
    assert max(told["data_offsets"][1] for told in header.values()) == len(body)
    with pytest.raises(OSError, match="cannot write .*no/a: .*No such file"):
        checkpoint.export(state["fields"], tmp_path / "no" / "a")
    odd = {"one": torch.ones(5, 5)[:1, 0], "negative": torch.ones(2) * 1j}
    odd["negative"] = odd["negative"].conj().imag
    checkpoint.export(odd, path)
    dist.barrier()
    assert path.read_bytes()[-12:] == struct.pack("fff", 1, -1, -1)


@ranks(1, 2, 3)
def test_what_fsdp_has_cut_is_exported_whole(mesh, tmp_path):
    whole, cut = net(), net()
    fully_shard(cut[0], mesh=mesh)
    fully_shard(cut, mesh=mesh)
    expected = whole.state_dict()
    found = dict(checkpoint.full_tensors(cut))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value.cpu())
        assert type(found[name]) is torch.Tensor
    checkpoint.export(whole, tmp_path / f"whole{dist.get_rank()}")
    checkpoint.export(cut, tmp_path / "cut")
    dist.barrier()
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole0").read_bytes()


@ranks(2)
def test_a_rank_holds_one_whole_tensor_at_a_time(mesh, tmp_path):
    def export(rows):
        whole = torch.ones(rows, 1 << 20)
        fields = {str(i): shard(whole, mesh, [Shard(0)]) for i in range(4)}
        del whole
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        checkpoint.export(fields, tmp_path / "a.safetensors")
        return resident("VmHWM") - before

    export(2)
    assert 30 < export(8) < 60  # MiB; a tensor has 32


def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


# ---- torch.save -------------------------------------------------------------


def save_pieces(mesh, folder):
    x = shard(torch.arange(8.0), mesh, [Shard(0)])
    torch.save(x, folder / f"{dist.get_rank()}.pt")


def load_piece_of(mesh, folder, shift):
    rank = (dist.get_rank() + shift) % 2
    with pytest.raises(RuntimeError) as caught:
        torch.load(folder / f"{rank}.pt")
    return str(caught.value)


def test_torch_load_elsewhere_says_what_to_use(tmp_path):
    run(2, save_pieces, tmp_path)
    for ranks_there, shift in ((1, 0), (1, 1), (2, 1)):
        for text in run(ranks_there, load_piece_of, tmp_path, shift):
            assert "use shardtensor.checkpoint" in text, text
