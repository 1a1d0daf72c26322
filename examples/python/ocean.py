"""Real sea-surface temperatures: 54 monthly means of the tropical oceans, 5 S to
5 N all around the globe, from the files that the iris-sample-data package
carries. Nothing is downloaded."""

from importlib.util import find_spec
from pathlib import Path

import netCDF4
import numpy as np
import torch

# Found without importing it, as the package does nothing but say where it is.
FOLDER = Path(find_spec("iris_sample_data").origin).parent / "sample_data"
MONTHS, LATITUDES, LONGITUDES = 54, 18, 432
SHAPE = (MONTHS, 8, LATITUDES, LONGITUDES)
UNSEEN = 12  # the last months, which nobody learns from
MEAN, DEVIATION = 300.0, 2.5  # kelvin


def load():
    """What the model sees of each month, SHAPE float32: the temperature (as
    deviations; 0 on land), where the sea is, the place on the globe and the time
    of the year."""
    with netCDF4.Dataset(FOLDER / "ostia_monthly.nc") as file:
        kelvin = file["surface_temperature"][:]
        latitude = np.deg2rad(file["latitude"][:].filled())
        longitude = np.deg2rad(file["longitude"][:].filled())
    sea = ~np.ma.getmaskarray(kelvin)
    month = 2 * np.pi * np.arange(MONTHS)[:, None, None] / 12
    channels = [
        np.where(sea, (kelvin.filled(MEAN) - MEAN) / DEVIATION, 0),
        sea.all(0),
        latitude[:, None] * 10,
        np.sin(longitude),
        np.cos(longitude),
        np.sin(month),
        np.cos(month),
        np.sin(2 * month),
    ]
    whole = (MONTHS, LATITUDES, LONGITUDES)
    fields = np.stack([np.broadcast_to(channel, whole) for channel in channels], 1)
    return torch.from_numpy(fields.astype(np.float32))


def temperature(fields):
    return fields[:, :1]


def sea(fields):
    return fields[:, 1:2]


def error(prediction, truth):
    """The mean square over the sea, of deviations; `truth` is a month's fields."""
    wet = sea(truth)
    return ((prediction - temperature(truth)) * wet).square().sum() / wet.sum()
