"""nn.TransformerEncoder on ShardTensors."""

import copy

from torch import nn

from shardtensor.shard_tensor import ShardTensor


def encode(original, encoder: nn.TransformerEncoder, src: ShardTensor,
           mask=None, src_key_padding_mask=None, is_causal=None):  # fmt: skip
    """Its forward. In eval mode it may go on with a nested tensor of the rows that are
    no padding, in whose place come zeros before the last norm. Pieces cannot be nested:
    here padding is computed, too, and then cleared."""
    try:
        return original(encoder, src, mask, src_key_padding_mask, is_causal)
    except NotImplementedError as error:
        if "aten::_nested_tensor_from_mask" not in str(error):
            raise
    layers = copy.copy(encoder)
    layers.use_nested_tensor = False
    layers._modules = {**encoder._modules, "norm": None}
    rows = original(layers, src, mask, src_key_padding_mask, is_causal)
    rows = rows.masked_fill((src_key_padding_mask != 0).unsqueeze(-1), 0)
    return rows if encoder.norm is None else encoder.norm(rows)
