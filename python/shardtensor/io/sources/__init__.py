"""Files as arrays of which a box can be read. One module per format; the package
that a format needs is imported when a file of it is opened."""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Sequence

from shardtensor.io.sources.joined import Joined
from shardtensor.io.sources.source import Format, Source

# What the end of a path says, and what package reads it.
_FORMATS = {
    "hdf5": ((".h5", ".hdf5", ".hdf", ".he5"), "h5py"),
    "netcdf": ((".nc", ".nc4", ".cdf"), "netCDF4"),
    "zarr_store": ((".zarr",), "zarr"),
    "npy": ((".npy",), "numpy"),
    "nifti": ((".nii", ".nii.gz"), "nibabel"),
    "mesh": ((".vtu", ".vtk", ".vtp", ".obj", ".stl"), "numpy"),
    "table": ((".csv", ".tsv", ".txt", ".edges"), "numpy"),
}
_COUNTED = ("mesh", "table")  # shapes may be known after counting only
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")

Path = str | os.PathLike | Sequence[str | os.PathLike]


def open_source(path: Path, variable: str | None) -> Source:
    """A file's variable; of several files (a list, or a pattern with * ? [) one
    after the other along the first dim."""
    if not isinstance(variable, str | None):
        raise TypeError(f"expected the name of a variable, got {variable!r}")
    paths = _paths(path)
    sources = [format_of(each).open_source(each, variable) for each in paths]
    is_one = isinstance(path, str | os.PathLike) and paths == [os.fspath(path)]
    return sources[0] if is_one else Joined(sources)


def _paths(path: Path) -> list[str]:
    paths = _listed(path)
    is_list = not isinstance(path, str | os.PathLike)
    if not is_list and not os.path.exists(paths[0]) and glob.has_magic(paths[0]):
        paths = sorted(glob.glob(paths[0]))
    if not paths:
        raise FileNotFoundError("no file has such a name")
    return paths


def _listed(path):
    paths = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(paths, Sequence) or not all(
        isinstance(each, str | os.PathLike) for each in paths
    ):
        raise TypeError(f"expected a path or a list of paths, got {path!r}")
    return [os.fspath(each) for each in paths]


def is_counted_together(path: Path) -> bool:
    """Whether ranks meet to learn shapes; known from the name, for on some ranks
    there may be no such file."""
    lower = next(iter(_listed(path)), "").lower()
    return any(lower.endswith(_FORMATS[name][0]) for name in _COUNTED)


def format_of(path: str) -> Format:
    """The module that reads this path; a WritableFormat where it writes it, too."""
    lower = path.lower().rstrip("/")
    for name, (endings, package) in _FORMATS.items():
        is_zarr = name == "zarr_store" and any(
            os.path.exists(os.path.join(path, file)) for file in _ZARR_FILES
        )
        if lower.endswith(endings) or is_zarr:
            return _load(name, package)
    known = " ".join(ending for endings, _ in _FORMATS.values() for ending in endings)
    raise ValueError(f"unknown kind of file; expected one of {known}")


def _load(name, package):
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{package} is not installed, and this kind of file needs it: "
            "pip install 'shardtensor[io]'"
        ) from error
    return importlib.import_module(f"shardtensor.io.sources.{name}")
