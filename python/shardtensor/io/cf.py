"""The conventions of NetCDF for packed numbers, missing values and times."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re

import numpy

_SINCE = re.compile(r"\s*(\w+)\s+(since\s+.+)", re.IGNORECASE)
_WEEKS = ("week", "weeks")  # which cftime has not, nor these
_NANOSECONDS = ("nanosecond", "nanoseconds", "nanosec", "nanosecs", "ns")
_EPOCH = "microseconds since 1970-01-01"
_GREGORIAN = numpy.datetime64("1582-10-15", "us")  # the first day of this calendar
_STANDARD = ("standard", "gregorian", "proleptic_gregorian")


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How stored numbers become values: value = number * scale + offset, NaN
    where the number stands for a missing value or is below `low` or above `high`."""

    scale: float | None
    offset: float | None
    missing: tuple[float, ...]
    low: float | None
    high: float | None
    dtype: numpy.dtype
    unsigned: bool = False

    def __call__(self, stored: numpy.ndarray) -> numpy.ndarray:
        numbers = self._unsigned(stored)
        if numbers is stored and not self._changes() and stored.dtype == self.dtype:
            return stored
        values = self._unpacked(numbers.astype(self.dtype))
        for chosen in self._missing(numbers):
            values[chosen] = numpy.nan
        return values

    def wide(self) -> Decoding:
        """In float64 at least, where float32 would round what is scaled."""
        if not self._scales():
            return self
        return dataclasses.replace(self, dtype=numpy.result_type(self.dtype, "f8"))

    def exact(self, stored: numpy.ndarray) -> numpy.ma.MaskedArray:
        """Integers of 64 bits where nothing is scaled, else float64."""
        numbers = self._unsigned(stored)
        kind = "float64" if self._scales() or numbers.dtype.kind == "f" else "int64"
        values = self._unpacked(numbers.astype(kind))
        mask = numpy.isnan(values)
        for chosen in self._missing(numbers):
            mask |= chosen
        return numpy.ma.array(values, mask=mask)

    def encode(self, values: numpy.ndarray, stored: numpy.dtype) -> numpy.ndarray:
        """The numbers to store for values: the inverse, rounded to whole numbers
        where the file has such."""
        is_alike = numpy.can_cast(values.dtype, stored, "same_kind")
        becomes_real = values.dtype.kind == "c" and stored.kind != "c"
        if self.unsigned or becomes_real or not (is_alike or self._changes()):
            raise TypeError(f"{values.dtype} cannot be written as {stored}")
        numbers = self._packed(values, stored) if self._changes() else values
        holds_all = numpy.can_cast(numbers.dtype, stored)
        if stored.kind in "iu" and numbers.size and not holds_all:
            limits = numpy.iinfo(stored)
            # As Python's numbers, which compare a float with an integer exactly.
            if numbers.min().item() < limits.min or numbers.max().item() > limits.max:
                how = " with this scale" if self._scales() else ""
                raise ValueError(f"a value beyond what {stored} holds{how}")
        return numbers.astype(stored, copy=False)

    def _packed(self, values, stored):
        """Integers that nothing scales as they are: float64 has not all of them."""
        if values.dtype.kind in "iub" and not self._scales():
            return values
        kind = "complex128" if values.dtype.kind == "c" else "float64"
        numbers = (values.astype(kind) - (self.offset or 0)) / (self.scale or 1)
        nothing = numpy.isnan(numbers)
        if nothing.any() and (self.missing or stored.kind in "iu"):
            if not self.missing:
                raise ValueError("a NaN, for which the file has no _FillValue")
            numbers[nothing] = self.missing[0]
        return numpy.rint(numbers) if stored.kind in "iu" else numbers

    def _unsigned(self, stored):
        if self.unsigned and stored.dtype.kind == "i":
            return stored.view(f"{stored.dtype.byteorder}u{stored.dtype.itemsize}")
        return stored

    def _unpacked(self, values):
        if self.scale is not None:
            values *= self.scale
        if self.offset is not None:
            values += self.offset
        return values

    def _missing(self, numbers):
        """Which numbers stand for no value, reason by reason."""
        yield from (numbers == number for number in self.missing)
        if self.low is not None:
            yield numbers < self.low
        if self.high is not None:
            yield numbers > self.high

    def _scales(self):
        return self.scale is not None or self.offset is not None

    def _changes(self):
        is_bound = self.low is not None or self.high is not None
        return self._scales() or is_bound or bool(self.missing)


def decoding(dtype: numpy.dtype, attributes: dict) -> Decoding:
    """By the attributes of a variable: float32 where it holds what is stored
    (16 bits and less, float32), else float64; as stored where there is nothing
    to do, or of floating-point numbers some are missing."""
    native = dtype.newbyteorder("=")
    unsigned = str(attributes.get("_Unsigned", "")).lower() == "true"
    unsigned = unsigned and native.kind == "i"
    stored = numpy.dtype(f"u{native.itemsize}") if unsigned else native
    if native.kind not in "iufc":
        return Decoding(None, None, (), None, None, native)
    scale = _number(attributes, "scale_factor", 1)
    offset = _number(attributes, "add_offset", 0)
    missing = tuple(
        number
        for key in ("_FillValue", "missing_value")
        for number in _as_stored(attributes.get(key), stored, unsigned)
        if number is not None
    )
    low, high = _valid(attributes, stored, unsigned)
    found = Decoding(scale, offset, missing, low, high, stored, unsigned)
    is_real = found._changes() if stored.kind in "iu" else found._scales()
    if stored.kind == "c" or not is_real:
        return found
    is_short = dtype.itemsize <= 2 or stored == "float32"
    real = numpy.dtype("float32" if is_short else "float64")
    return dataclasses.replace(found, dtype=real)


def _number(attributes, key, neutral):
    """None where it changes nothing."""
    value = attributes.get(key, neutral)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: expected a number, got {value!r}") from None
    return None if number == neutral else number


def _numbers(value):
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int | float)]


def _as_stored(value, stored, unsigned):
    """The numbers of an attribute as the file has them: rounded to its floating-point
    ones; None for what such a number cannot be."""
    return [_one_as_stored(number, stored, unsigned) for number in _numbers(value)]


def _one_as_stored(number, stored, unsigned):
    if stored.kind == "f":
        largest = float(numpy.finfo(stored).max)
        is_beyond = largest < abs(number) != math.inf
        return None if is_beyond else float(stored.type(number))
    if stored.kind not in "iu":
        return number
    if number != number // 1:
        return None
    limits, number = numpy.iinfo(stored), int(number)
    if unsigned and -(limits.max // 2) - 1 <= number < 0:
        number += limits.max + 1  # as signed numbers are written there
    return number if limits.min <= number <= limits.max else None


def _valid(attributes, stored, unsigned):
    """The bounds of what is valid, of stored numbers. A bound that such a number
    cannot be is none, as in netCDF4."""
    if stored.kind == "c":
        return None, None
    told = _as_stored(attributes.get("valid_range"), stored, unsigned)
    if len(told) == 2 and None not in told:
        return tuple(told)
    return tuple(
        next(iter(_as_stored(attributes.get(key), stored, unsigned)), None)
        for key in ("valid_min", "valid_max")
    )


def times(
    stored: numpy.ndarray, attributes: dict, decoding: Decoding, objects: bool = False
) -> numpy.ndarray | None:
    """Numbers "days since ..." as datetime64 (NaT where one is missing or too far
    off); in calendars that NumPy does not know, before 1582 too, or where `objects`
    are wanted, as cftime's (None where one is missing). None where they are no
    times that can be known: months have no length, and some dates are none."""
    told = _SINCE.fullmatch(str(attributes.get("units", "")))
    if not told or stored.dtype.kind not in "iuf":
        return None
    calendar = str(attributes.get("calendar") or "standard").lower()
    try:
        import cftime
    except ImportError as error:
        raise ImportError("times need cftime: pip install 'shardtensor[io]'") from error
    numbers, units = _in_units_of_cftime(decoding.exact(stored), *told.groups())
    try:
        first_two = cftime.num2date([0, 1], units, calendar)
    except (TypeError, ValueError):
        return None
    if calendar in _STANDARD and not objects:
        found = _datetimes(numbers, first_two, calendar, cftime)
        if calendar == "proleptic_gregorian" or not (found < _GREGORIAN).any():
            return found
    found = numpy.ma.getdata(cftime.num2date(numbers, units, calendar)).astype("O")
    found[numpy.ma.getmaskarray(numbers)] = None
    return found


def _in_units_of_cftime(numbers, unit, since):
    if unit.lower() in _WEEKS:
        return numbers * 7, f"days {since}"
    if unit.lower() in _NANOSECONDS:
        whole = numbers.dtype.kind == "i"
        numbers = numbers // 1000 if whole else numbers / 1000
        return numbers, f"microseconds {since}"
    return numbers, f"{unit} {since}"


def _datetimes(numbers, first_two, calendar, cftime):
    first, second = first_two
    step = (second - first) // datetime.timedelta(microseconds=1)
    start = int(cftime.date2num(first, _EPOCH, calendar))
    values = numbers.filled(0)
    passed = values.astype("longdouble") * step
    beyond = abs(passed + start) >= numpy.longdouble(2**63 - 1)
    if values.dtype.kind == "f":
        values, step = numpy.rint(numpy.where(beyond, 0, passed)).astype("int64"), 1
    found = (numpy.where(beyond, 0, values) * step + start).astype("datetime64[us]")
    found[beyond | numbers.mask] = numpy.datetime64("NaT")
    return found
