"""What PyTorch has no module for, of plain tensors and ShardTensors."""

from shardtensor.nn import functional

__all__ = ["functional"]
