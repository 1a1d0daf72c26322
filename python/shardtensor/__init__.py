"""Tensors sharded over ranks."""
