"""Samples x domain: which samples a group of ranks trains on, and when each rank
reads its piece of them."""

from __future__ import annotations

import concurrent.futures
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler, get_worker_info

from shardtensor.agree import agree
from shardtensor.device_mesh import core_mesh, device_of
from shardtensor.io import boxes
from shardtensor.io.array import Array
from shardtensor.placements import check_placements
from shardtensor.shard_tensor import ShardTensor
from shardtensor.spec import ShardTensorSpec, Sizes, make_spec

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class Dataset:
    """Samples along the first dim of several arrays, cut over the ranks of `mesh`.

        data = Dataset({"x": t2m, "y": (t2m, 1)}, mesh["domain"], [Shard(1)])
        data[3]["x"]       # sample 3, a ShardTensor of t2m[3:4]
        data.batch([3, 5]) # two samples

    `arrays` by name, each alone or as (array, shift): sample i is its row
    i + shift, for the next step of a forecast. `placements` and `sizes` speak of a
    batch, whose dim 0 are samples; sizes="chunks" cuts at the borders of chunks.
    `transform` gets a batch, a dict of ShardTensors.

    Thread safety / ordering: all ranks of the mesh ask for the same samples."""

    def __init__(
        self,
        arrays: Mapping[str, Array | tuple[Array, int]],
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        sizes: Sizes | str | None = None,
        transform: Callable[[dict], object] | None = None,
    ):
        core_mesh(mesh)
        self.mesh = mesh
        self._sizes = sizes
        self._transform = transform
        try:
            self._placements = check_placements(placements, mesh.ndim)
            self._arrays = _with_shifts(arrays)
        except Exception as error:  # noqa: BLE001  whatever it is, all must know
            agree(mesh, error)
        for array, _ in self._arrays.values():
            array._count_together(mesh)
        self._length = self._count()

    def _count(self):
        length = told = problem = None
        try:
            cut = {p.dim for p in self._placements if p.is_shard()}
            if any(cut & {0, -array.ndim} for array, _ in self._arrays.values()):
                raise ValueError(
                    f"a batch is not cut along its samples: {self._placements}"
                )
            length = min(len(array) - shift for array, shift in self._arrays.values())
            if min(shift for _, shift in self._arrays.values()) < 0 or length < 1:
                raise ValueError("expected shifts of 0 or more that leave a sample")
            told = (
                self._placements,
                self._sizes,
                [
                    (name, array.shape, array.dtype, shift)
                    for name, (array, shift) in self._arrays.items()
                ],
            )
        except Exception as error:  # noqa: BLE001  whatever it is, all must know
            problem = error
        agree(self.mesh, problem, told, "Dataset: ")
        return length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> object:
        return self.batch([sample])

    def batch(self, samples: Sequence[int]) -> object:
        """These samples, one after the other along dim 0. Communication: one small
        gather, so that what one rank cannot read is an error on all."""
        if get_worker_info() is not None:
            raise RuntimeError(
                "Dataset: processes of torch's DataLoader are no ranks of the mesh; "
                "expected num_workers=0, or shardtensor.io.DataLoader, whose thread "
                "reads ahead"
            )
        return self.finish(samples, self.load(samples))

    def load(
        self, samples: Sequence[int], pin_memory: bool = False
    ) -> dict | Exception:
        """This rank's pieces. No communication: a thread may do it."""
        try:
            samples = self._rows_of(samples)
            begun = {
                name: self._begin(array, [sample + shift for sample in samples])
                for name, (array, shift) in self._arrays.items()
            }
            loaded = {}
            for name, (spec, wait) in begun.items():
                rows = wait()
                loaded[name] = spec, rows.pin_memory() if pin_memory else rows
            return loaded
        except Exception as error:  # noqa: BLE001  raised on all ranks by finish
            return error

    def finish(self, samples: Sequence[int], loaded: dict | Exception) -> object:
        """What `load` has given, on all ranks or on none."""
        problem = loaded if isinstance(loaded, Exception) else None
        told = None if problem else tuple(samples)
        agree(self.mesh, problem, told, "Dataset: ")
        device = device_of(self.mesh)
        batch = {
            name: ShardTensor.from_spec(local.to(device, non_blocking=True), spec)
            for name, (spec, local) in loaded.items()
        }
        return self._transform(batch) if self._transform else batch

    def _rows_of(self, samples):
        if not len(samples):
            raise ValueError("Dataset: a batch of no samples")
        for sample in samples:
            if not -len(self) <= operator.index(sample) < len(self):
                raise IndexError(f"sample {sample} of {len(self)}")
        return [operator.index(sample) % len(self) for sample in samples]

    def _spec(self, array, samples) -> ShardTensorSpec:
        sizes = self._sizes
        if sizes == "chunks":
            dims = {p.dim % array.ndim for p in self._placements if p.is_shard()}
            sizes = {
                dim: array.chunk_sizes(dim, self._pieces(dim, array)) for dim in dims
            }
        shape = (samples, *array.shape[1:])
        return make_spec(self.mesh, shape, self._placements, sizes)

    def _pieces(self, dim, array):
        count = 1
        for axis, placement in enumerate(self._placements):
            if placement.is_shard() and placement.dim % array.ndim == dim:
                count *= self.mesh.size(axis)
        return count

    def _begin(self, array, samples):
        """Asks for this rank's rows of the samples: their spec, and what waits."""
        spec = self._spec(array, len(samples))
        box = tuple(map(boxes.as_slice, boxes.own_rows(spec)[1:]))
        step = samples[1] - samples[0] if len(samples) > 1 else 1
        if step > 0 and samples == list(range(samples[0], samples[-1] + 1, step)):
            index = slice(samples[0], samples[-1] + 1, step), *box
            return spec, array._begin(index)
        parts = [array._begin((slice(i, i + 1), *box)) for i in samples]
        return spec, lambda: torch.cat([part() for part in parts])


def _with_shifts(arrays):
    found = {
        name: value if isinstance(value, tuple) else (value, 0)
        for name, value in arrays.items()
    }
    for name, value in found.items():
        if len(value) != 2 or not isinstance(value[0], Array):
            raise TypeError(
                f"Dataset: {name!r}: expected an Array or (Array, shift), got {value!r}"
            )
    if not found:
        raise ValueError("Dataset: expected one array or more")
    return found


class DataLoader:
    """Batches of a Dataset, in the same order in every run; a thread reads the next
    ones meanwhile.

        loader = DataLoader(data, 2, mesh["data"], shuffle=True)
        for epoch in range(10):
            for batch in loader:
                ...

    `data_mesh`, one axis: its ranks get different samples, as a DistributedSampler
    deals them; the ranks of the dataset's mesh get the same. Each pass is an epoch
    and has its own order. `prefetch` batches are read ahead, by `pin_memory` into
    pinned memory, if there is an accelerator. A state that state_dict() gave in the
    middle of an epoch goes on with the batch after; on another number of ranks, too, if
    the batches of all ranks together have as many samples. Communication: one small
    gather along each of the two meshes when it is made and when a state is loaded, and
    what the dataset does."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        data_mesh: DeviceMesh | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ):
        replicas, place = 1, 0
        if data_mesh is not None:
            replicas, place = data_mesh.size(), data_mesh.get_local_rank()
        self._dataset = dataset
        self._data_mesh = data_mesh
        self._batch_size = batch_size
        self._prefetch = prefetch
        self._pin_memory = pin_memory and torch.accelerator.is_available()
        self._agree(lambda: self._checked(replicas, shuffle, seed))
        self._together = batch_size * replicas
        self._sampler = DistributedSampler(
            dataset, replicas, place, shuffle=shuffle, seed=seed, drop_last=True
        )
        self._epoch = 0
        self._done = 0  # batches of this epoch that the program has seen
        self._first = 0  # batch of the next pass, where a state goes on

    def _agree(self, checked):
        """All ranks of both meshes: along the data axis first, for what is wrong there
        each rank then tells its domain."""
        problem = told = None
        try:
            told = checked()
        except Exception as error:  # noqa: BLE001  whatever it is, all must know
            problem = error
        try:
            if self._data_mesh is not None:
                agree(self._data_mesh, problem, told, "DataLoader: ")
        except Exception as error:  # noqa: BLE001
            problem = error
        agree(self._dataset.mesh, problem, told, "DataLoader: ")

    def _checked(self, replicas, shuffle, seed):
        """What all ranks must be told alike."""
        size, prefetch = self._batch_size, self._prefetch
        if size < 1 or prefetch < 0:
            raise ValueError(
                f"expected a batch_size of 1 or more and a prefetch of 0 or more, "
                f"got {size} and {prefetch}"
            )
        if len(self._dataset) < size * replicas:
            raise ValueError(
                f"{len(self._dataset)} samples are no batch of {size} for each of "
                f"{replicas} ranks"
            )
        return size, replicas, shuffle, seed, len(self._dataset)

    def __len__(self) -> int:
        """Batches of a whole epoch, also where a state goes on in its middle; samples
        that make no batch for every rank are left out, others in each epoch if
        shuffled."""
        return len(self._sampler) // self._batch_size

    @property
    def epoch(self) -> int:
        """Of the batches under way, or to come."""
        return self._epoch

    def state_dict(self) -> dict:
        return {
            "epoch": self._epoch,
            "samples": self._done * self._together,
            "seed": self._sampler.seed,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """All ranks load the same."""
        self._agree(lambda: self._checked_state(state))
        self._epoch = state["epoch"]
        self._done = self._first = state["samples"] // self._together
        self._sampler.seed = state["seed"]

    def _checked_state(self, state):
        if state["samples"] % self._together:
            raise ValueError(
                f"the loader stopped after {state['samples']} samples, which are no "
                f"whole number of batches of {self._together} samples on all ranks"
            )
        return state["epoch"], state["samples"], state["seed"]

    def __iter__(self) -> Iterator:
        self._sampler.set_epoch(self._epoch)
        with torch.device("cpu"):  # the sampler draws there, whatever the default
            samples, size = list(self._sampler), self._batch_size
        batches = [samples[i * size : (i + 1) * size] for i in range(len(self))]
        self._done, self._first = self._first, 0
        for batch, loaded in self._ahead(batches[self._done :]):
            result = self._dataset.finish(batch, loaded)
            self._done += 1
            yield result
        self._epoch, self._done = self._epoch + 1, 0

    def _ahead(self, batches):
        """Each batch with what was loaded for it, up to `prefetch` ahead."""
        if not self._prefetch:
            yield from ((batch, self._load(batch)) for batch in batches)
            return
        under_way: deque = deque()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            try:
                for batch in batches:
                    under_way.append((batch, thread.submit(self._load, batch)))
                    if len(under_way) > self._prefetch:
                        first, loaded = under_way.popleft()
                        yield first, loaded.result()
                while under_way:
                    first, loaded = under_way.popleft()
                    yield first, loaded.result()
            finally:
                for _, loaded in under_way:
                    loaded.cancel()

    def _load(self, samples):
        return self._dataset.load(samples, self._pin_memory)
