"""What PyTorch has no module for, of plain tensors and ShardTensors."""

from shardtensor.nn import functional
from shardtensor.nn.sync_batch_norm import serve_sync_batch_norm

__all__ = ["functional"]

serve_sync_batch_norm()
