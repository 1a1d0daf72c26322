"""Data that no rank reads whole: arrays in files, read and written by piece."""

from shardtensor.io.array import Array, open  # noqa: A004
from shardtensor.io.loader import DataLoader, Dataset
from shardtensor.io.moments import Statistics, statistics
from shardtensor.io.writing import create, write

__all__ = [
    "Array",
    "DataLoader",
    "Dataset",
    "Statistics",
    "create",
    "open",
    "statistics",
    "write",
]
