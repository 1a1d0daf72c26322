"""What of PyTorch this package replaces at its import: functions that look first, and
leave every call that is not ours to the one whose place they take.

Later, with what needs them, come those of
- DTensor.from_local, with the first DTensor (nested.py): parallel styles call it with
  what enters a module, which may be a ShardTensor;
- torch.utils.checkpoint's _CheckpointFrame and CheckpointFunction (constants.py), by
  new_tensors_on and parallelize: backward runs without the modes of forward;
- torch.distributed.ProcessGroup.__deepcopy__ (parallelize.py): copies of a module keep
  the group of their norms;
- defaults of torch.distributed.nn.functional (device_mesh.py), when groups are
  forgotten: PyTorch keeps the first default group there;
- lists and hooks of torch._functorch and torch._inductor, in the first graph that has a
  ShardTensor (compile.py, graph_order.py, join_sums.py): messages are calls that no
  compiler may join, drop or move.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn

from shardtensor import _C
from shardtensor.nn.sync_batch_norm import normalize
from shardtensor.nn.transformer_encoder import encode
from shardtensor.shard_tensor import ShardTensor


@functools.cache
def install() -> None:
    """Once, also where the package is reloaded."""
    _note_what_ddp_reads()
    _serve_sync_batch_norm()
    _serve_transformer_encoder()
    _refuse_flex_attention()
    _keep_pieces_on_cpu()


def _note_what_ddp_reads():
    """DDP reads gradients inside backward, of which autograd says nothing: of its
    parameters it says from now on over which ranks it averages."""
    original = nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(original)
    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs)
        ranks = dist.get_process_group_ranks(self.process_group)
        for parameter in self._module_parameters:
            _C.note_reader(parameter, ranks)

    nn.parallel.DistributedDataParallel.__init__ = begin


def _serve_sync_batch_norm():
    """nn.SyncBatchNorm would take a ShardTensor, the same samples on every rank of its
    mesh, for as many samples; its own collectives never come to the dispatcher."""
    original = nn.SyncBatchNorm.forward

    @functools.wraps(original)
    def forward(self, input):
        if self.training and isinstance(input, ShardTensor):
            return normalize(self, input)
        return original(self, input)

    nn.SyncBatchNorm.forward = forward


def _serve_transformer_encoder():
    """nn.TransformerEncoder would make a ShardTensor a nested tensor in eval mode."""
    original = nn.TransformerEncoder.forward

    @functools.wraps(original)
    def forward(self, src, *args, **kwargs):
        if isinstance(src, ShardTensor):
            return encode(original, self, src, *args, **kwargs)
        return original(self, src, *args, **kwargs)

    nn.TransformerEncoder.forward = forward


def _refuse_flex_attention():
    """Its block mask, any program, would be asked about the rows of a piece. At the
    function level, see tensor/keys.h; other tensors have no such key."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(
            "flex_attention: its block mask speaks of the rows of one device, expected "
            "plain tensors, got ShardTensors; where the mask is a neighbourhood call "
            "shardtensor.nn.functional.neighborhood_attention, else "
            "torch.nn.functional.scaled_dot_product_attention"
        )

    level = torch._C._dispatch_key_parse("DeferredInit")
    operator = torch.ops.higher_order.flex_attention
    operator.py_kernels.pop(level, None)  # of a package that was imported before
    operator.py_impl(level)(refuse)


def _keep_pieces_on_cpu():
    """save_on_cpu with pinned memory copies what is saved into a plain tensor, which
    would take the whole value: of a ShardTensor it gets the piece."""
    original = torch.autograd.graph.save_on_cpu.__init__

    @functools.wraps(original)
    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs)
        pack, unpack = self.pack_hook, self.unpack_hook

        def pack_piece(tensor):
            if not isinstance(tensor, ShardTensor):
                return None, pack(tensor)
            return tensor._spec, pack(tensor.to_local())

        def unpack_piece(packed):
            layout, held = packed
            local = unpack(held)
            return local if layout is None else ShardTensor.from_spec(local, layout)

        self.pack_hook, self.unpack_hook = pack_piece, unpack_piece

    torch.autograd.graph.save_on_cpu.__init__ = begin
