"""Functions beside torch.nn's, of plain tensors and ShardTensors."""

from shardtensor.nn import functional

__all__ = ["functional"]
