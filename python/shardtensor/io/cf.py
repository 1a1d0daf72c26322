"""The conventions of NetCDF for packed numbers, missing values and times."""

from __future__ import annotations

import dataclasses
import re

import numpy

_UNITS = {
    "microsecond": 1, "millisecond": 1_000, "second": 1_000_000, "sec": 1_000_000,
    "s": 1_000_000, "minute": 60_000_000, "min": 60_000_000, "hour": 3_600_000_000,
    "hr": 3_600_000_000, "h": 3_600_000_000, "day": 86_400_000_000,
    "d": 86_400_000_000,
}  # fmt: skip
_SINCE = re.compile(r"\s*(\w+)\s+since\s+(.+)", re.IGNORECASE)
_DATE = re.compile(r"(\d+)-(\d+)-(\d+)(?:[ T]+(\d+):(\d+)(?::(\d+)(?:\.(\d+))?)?)?")
_STANDARD = ("standard", "gregorian", "proleptic_gregorian")


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How stored numbers become values: value = number * scale + offset, NaN
    where the number stands for a missing value."""

    scale: float | None
    offset: float | None
    missing: tuple[float, ...]
    dtype: numpy.dtype
    unsigned: bool = False

    def __call__(self, stored: numpy.ndarray) -> numpy.ndarray:
        unsigned = self._unsigned(stored)
        if unsigned is stored and not self._changes() and stored.dtype == self.dtype:
            return stored
        values = unsigned.astype(self.dtype)
        if self.scale is not None:
            values *= self.scale
        if self.offset is not None:
            values += self.offset
        for number in self.missing:
            values[unsigned == number] = numpy.nan
        return values

    def encode(self, values: numpy.ndarray, stored: numpy.dtype) -> numpy.ndarray:
        """The numbers to store for values: the inverse, rounded to whole numbers
        where the file has such."""
        if not self._changes() or self.unsigned:
            if self.unsigned or not numpy.can_cast(values.dtype, stored, "same_kind"):
                raise TypeError(f"{values.dtype} cannot be written as {stored}")
            return values.astype(stored, copy=False)
        numbers = (values.astype("float64") - (self.offset or 0)) / (self.scale or 1)
        nothing = numpy.isnan(numbers)
        if nothing.any() and (self.missing or stored.kind in "iu"):
            if not self.missing:
                raise ValueError("a NaN, for which the file has no _FillValue")
            numbers[nothing] = self.missing[0]
        numbers = numpy.rint(numbers) if stored.kind in "iu" else numbers
        if stored.kind in "iu" and numbers.size:
            limits = numpy.iinfo(stored)
            if numbers.min() < limits.min or numbers.max() > limits.max:
                raise ValueError(f"a value beyond what {stored} holds with this scale")
        return numbers.astype(stored)

    def _unsigned(self, stored):
        if self.unsigned and stored.dtype.kind == "i":
            return stored.view(f"u{stored.dtype.itemsize}")
        return stored

    def _changes(self):
        return self.scale is not None or self.offset is not None or bool(self.missing)


def decoding(dtype: numpy.dtype, attributes: dict) -> Decoding:
    """By the attributes of a variable: float32 where it holds what is stored
    (16 bits and less, float32), else float64; as stored where there is nothing
    to do."""
    scale, offset = attributes.get("scale_factor"), attributes.get("add_offset")
    scale = None if scale == 1 else scale
    offset = None if offset == 0 else offset
    missing: list[float] = []
    for key in ("_FillValue", "missing_value"):
        value = attributes.get(key, [])
        missing += value if isinstance(value, list) else [value]
    missing = [number for number in missing if isinstance(number, int | float)]
    unsigned = str(attributes.get("_Unsigned", "")).lower() == "true"
    if unsigned and dtype.kind == "i":
        mask = 256**dtype.itemsize
        missing = [number % mask for number in missing]
    native = dtype.newbyteorder("=")
    if native.kind == "f":
        missing = [float(native.type(number)) for number in missing]
    real = native
    if dtype.kind in "iu" and (scale or offset or missing):
        real = numpy.dtype("float32" if dtype.itemsize <= 2 else "float64")
    elif unsigned and dtype.kind == "i":
        real = numpy.dtype(f"u{dtype.itemsize}")
    return Decoding(scale, offset, tuple(missing), real, unsigned)


def times(stored: numpy.ndarray, attributes: dict) -> numpy.ndarray | None:
    """Numbers "days since ..." as datetime64, in calendars other than ours as
    cftime's objects; None where they are no times."""
    found = _SINCE.fullmatch(str(attributes.get("units", "")))
    if found is None:
        return None
    calendar = str(attributes.get("calendar", "standard")).lower()
    unit, since = found.groups()
    date = _DATE.match(since.strip())
    unit = unit.lower()
    factor = _UNITS.get(unit) or _UNITS.get(unit.removesuffix("s"))
    # Before 1582 "standard" means another calendar, too.
    if calendar in _STANDARD and date and factor and int(date[1]) > 1582:
        year, month, day, hour, minute, second, _ = date.groups()
        start = numpy.datetime64(f"{int(year):04}-{int(month):02}-{int(day):02}", "us")
        start += numpy.timedelta64(
            (int(hour or 0) * 60 + int(minute or 0)) * 60 + int(second or 0), "s"
        )
        passed = numpy.round(stored.astype("float64") * factor).astype("int64")
        return start + passed.astype("timedelta64[us]")
    try:
        import cftime
    except ImportError as error:
        raise ImportError(
            f"times in the calendar {calendar!r} need cftime: "
            "pip install 'shardtensor[io]'"
        ) from error
    return cftime.num2date(stored, str(attributes["units"]), calendar)
