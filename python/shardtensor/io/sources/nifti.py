"""NIfTI volumes by nibabel, which reads the slices that are asked for."""

from __future__ import annotations

import nibabel
import numpy
from nibabel.arrayproxy import ArrayProxy

from shardtensor.io.sources.source import Box, Source


class NiftiSource(Source):
    def __init__(self, path: str):
        image = nibabel.load(path)
        stored = image.dataobj
        scale, offset = float(stored.slope), float(stored.inter)
        told = {"affine": image.affine, "zooms": list(image.header.get_zooms())}
        if (scale, offset) != (1, 0):
            told.update(scale_factor=scale, add_offset=offset)
        super().__init__(told)
        self._numbers = ArrayProxy(
            stored.file_like, (stored.shape, stored.dtype, stored.offset, 1, 0)
        )
        self.shape, self.dtype = tuple(stored.shape), numpy.dtype(stored.dtype)

    def read(self, box: Box) -> numpy.ndarray:
        try:
            return numpy.asarray(self._numbers[box])
        except ValueError as error:  # of a box that is there
            raise OSError(f"the file is cut short or damaged: {error}") from error


def open_source(path: str, variable: str | None) -> Source:
    if variable is not None:
        raise ValueError("a NIfTI file has one volume and no variables")
    return NiftiSource(path)
