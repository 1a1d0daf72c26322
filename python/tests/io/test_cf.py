"""CF's scale, offset, missing values and times, as netCDF4 and cftime read them."""

import warnings

import cftime
import h5py
import netCDF4
import numpy as np
import pytest
import torch

import shardtensor


def packed(path):
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", 3)
        file.createDimension("x", 4)
        time = file.createVariable("time", "f8", ("time",))
        time[:] = [0, 1.5, 31]
        time.units = "days since 2015-01-30 12:00:00"
        t = file.createVariable("t", "i2", ("time", "x"), fill_value=-999)
        t.set_auto_maskandscale(False)
        t[:] = np.arange(12).reshape(3, 4)
        t[1, 1] = -999
        t.scale_factor, t.add_offset = 0.5, 270.0
    expected = np.arange(12, dtype="float32").reshape(3, 4) * 0.5 + 270
    expected[1, 1] = np.nan
    return path, torch.tensor(expected)


def test_scale_offset_missing_values_and_times(tmp_path):
    path, expected = packed(tmp_path / "a.nc")
    array = shardtensor.io.open(path)
    assert array.dims == ("time", "x")
    torch.testing.assert_close(array[...], expected, equal_nan=True)
    stored = shardtensor.io.open(path, "t", decode=False)[...]
    assert stored.dtype == torch.int16 and stored[1, 1] == -999
    doubled = shardtensor.io.open(path, "t", dtype=torch.float64)[...]
    torch.testing.assert_close(doubled, expected.double(), equal_nan=True)
    assert list(array.coordinates["time"].astype(str)) == [
        "2015-01-30T12:00:00.000000",
        "2015-02-01T00:00:00.000000",
        "2015-03-02T12:00:00.000000",
    ]


def test_packed_numbers_are_as_exact_as_what_is_asked_for(tmp_path):
    """A float32 has no seconds of this century."""
    stored = np.array([0, 1, 2, 100, 250], "i2")
    told = {"scale_factor": 1.0, "add_offset": 1577836800.0}
    for name in ("a.nc", "b.nc"):
        with netCDF4.Dataset(tmp_path / name, "w") as file:
            file.createDimension("x", 5)
            for variable, kind in (("packed", "i2"), ("real", "f4")):
                made = file.createVariable(variable, kind, ("x",))
                made.set_auto_maskandscale(False)
                made[:] = stored
                made.setncatts(told)
    expected = torch.from_numpy(stored + told["add_offset"])
    for path, times in ((tmp_path / "a.nc", 1), (tmp_path / "?.nc", 2)):
        for variable in ("packed", "real"):
            assert shardtensor.io.open(path, variable).dtype == torch.float32
            for dtype in (torch.float64, torch.int64, torch.complex128):
                found = shardtensor.io.open(path, variable, dtype=dtype)[...]
                assert torch.equal(found, expected.repeat(times).to(dtype)), dtype
    alone = shardtensor.io.open(tmp_path / "a.nc", "packed")[...]
    assert torch.equal(alone, expected.float())


def test_packed_float16_is_decoded_as_float32(tmp_path):
    stored = np.array([1, 2, 1000, -9], "f2")
    for told, dtype in (
        ({"scale_factor": 1e3, "add_offset": 0.5}, torch.float32),
        ({"_FillValue": -9.0}, torch.float16),
    ):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["t"] = stored
            file["t"].attrs.update(told)
        found = shardtensor.io.open(tmp_path / "a.h5")
        assert found.dtype == found[...].dtype == dtype
        scale, offset = told.get("scale_factor", 1), told.get("add_offset", 0)
        expected = torch.from_numpy(stored).to(dtype) * scale + offset
        expected[3] = expected[3] if scale != 1 else torch.nan
        torch.testing.assert_close(found[...], expected, equal_nan=True)
        found.close()


def rotated(path, days):
    """A field on a rotated grid: what its dims have not, other variables tell."""
    begin, end = days
    with netCDF4.Dataset(path, "w") as file:
        for name, extent in {"time": None, "y": 2, "x": 3, "letters": 4}.items():
            file.createDimension(name, extent)
        for name, kind, dims, values in (
            ("time", "f8", "time", np.arange(begin, end)),
            ("lat", "f4", "y x", np.arange(6).reshape(2, 3)),
            ("lon", "i2", "y x", np.arange(6).reshape(2, 3)),
            ("height", "f8", "", 2.0),
            ("started", "f8", "", 1.5),
            ("week", "i4", "time", np.arange(begin, end) // 7),
            ("place", "S1", "letters", np.array(list("Bonn"), "S1")),
        ):
            made = file.createVariable(name, kind, tuple(dims.split()))
            made[...] = values
        file["time"].units = file["started"].units = "days since 2015-01-30"
        file["lon"].scale_factor = 0.5
        file["lon"].set_auto_maskandscale(False)
        t = file.createVariable("t", "f4", ("time", "y", "x"))
        t[...] = np.zeros((end - begin, 2, 3))
        t.coordinates = "lat lon height started week place nowhere"


def test_coordinates_that_a_variable_names(tmp_path):
    rotated(tmp_path / "a.nc", (5, 8))
    rotated(tmp_path / "b.nc", (8, 10))
    days = np.datetime64("2015-01-30") + np.arange(5, 10)
    for path, rows in ((tmp_path / "a.nc", 3), (tmp_path / "?.nc", 5)):
        found = shardtensor.io.open(path).coordinates
        names = ["time", "lat", "lon", "height", "started", "week", "place"]
        assert list(found) == names
        assert (found["time"] == days[:rows]).all() and len(found["time"]) == rows
        assert (found["lat"] == np.arange(6).reshape(2, 3)).all()
        assert (found["lon"] % 0.5 == 0).all() and found["lon"].shape == (2, 3)
        assert found["height"] == 2 and found["height"].shape == ()
        assert found["started"] == np.datetime64("2015-01-31T12:00")
        assert found["week"].tolist() == [0, 0, 1, 1, 1][:rows]
        assert b"".join(found["place"].tolist()) == b"Bonn"


def test_one_dim_of_two_has_a_name(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        t = file.create_dataset("t", data=np.ones((3, 4), "f4"))
        time = file.create_dataset("time", data=np.arange(1, 4))
        time.attrs["units"] = "days since 2015-01-30"
        time.make_scale("time")
        t.dims[0].attach_scale(time)
    array = shardtensor.io.open(path, "t")
    days = np.datetime64("2015-01-30") + np.arange(1, 4)
    assert array.dims == ("time", None) and list(array.coordinates) == ["time"]
    assert (array.coordinates["time"] == days).all()
    for name in "bc":
        (tmp_path / f"{name}.h5").write_bytes(path.read_bytes())
    times = shardtensor.io.open(tmp_path / "?.h5", "t").coordinates["time"]
    assert (times == np.tile(days, 3)).all()


def test_a_dim_has_the_coordinates_of_its_scale(tmp_path):
    """Whatever the scale is called and wherever it lies; dims without one have no
    name."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, scale, label in (
            ("first/t", "first/x", None),
            ("labelled/t", "labelled/x", "east"),
            ("around/t", "axes/x", None),
        ):
            t = file.create_dataset(name, data=np.ones((3, 4), "f4"))
            file[scale] = np.arange(4) / 2
            file[scale].make_scale()
            t.dims[1].attach_scale(file[scale])
            t.dims[1].label = label or ""
        file["labelled/east"] = np.arange(4)  # another variable, no scale
    for name, dim in ("first", "x"), ("labelled", "east"), ("around", "x"):
        array = shardtensor.io.open(path, f"{name}/t")
        assert array.dims == (None, dim) and list(array.coordinates) == [dim]
        assert array.coordinates[dim].tolist() == [0, 0.5, 1, 1.5]


def test_times_of_other_calendars(tmp_path):
    path, _ = packed(tmp_path / "a.nc")
    with netCDF4.Dataset(path, "a") as file:
        file["time"].calendar = "360_day"
    times = shardtensor.io.open(path).coordinates["time"]
    assert [t.isoformat() for t in times][1:] == [
        "2015-02-02T00:00:00",
        "2015-03-01T12:00:00",
    ]


NUMBERS = np.array([0, 1, -1, 100, -100, 20, -20])


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "f4", "f8"])
def test_what_is_missing_is_what_netcdf4_masks(tmp_path, kind):
    dtype = np.dtype(kind)
    numbers = abs(NUMBERS) if dtype.kind == "u" else NUMBERS

    def told(value):
        return np.array(value, dtype)

    cases = [
        {},
        {"_FillValue": told(100)},
        {"missing_value": told([20, 1])},
        {"valid_range": told([0, 20])},
        {"valid_min": told(1)},
        {"valid_max": told(20), "_FillValue": told(0)},
        {"valid_min": told(0), "valid_max": told(20), "missing_value": told(1)},
        {"valid_range": told([1, 20]), "valid_min": told(100)},
        {"valid_range": [0.5, 2.5], "scale_factor": 0.5},
        {"valid_range": told([1, 2, 3])},
        {"valid_max": 20.0, "scale_factor": 0.5, "add_offset": 10},
        {"valid_min": "none", "missing_value": "none"},
        {"scale_factor": 0.0, "add_offset": 5.0},
    ]
    if dtype.kind in "iu":
        cases += [
            {"missing_value": 1e20, "valid_max": 20},
            {"missing_value": np.nan, "scale_factor": 0.5},
            {"valid_min": -1e20, "valid_max": 20.0},
            {"valid_min": 1e20},
            {"valid_range": [0.0, 1e20], "valid_max": 20.0},
        ]
    if dtype.kind == "u":
        below = np.array([-1, 20], f"i{dtype.itemsize}")
        cases += [
            {"missing_value": below[0], "valid_max": below[1]},
            {"valid_range": below},
            {"valid_min": below[0], "valid_max": below[1]},
        ]
    if dtype == "f4":
        cases += [{"missing_value": 1e39}, {"valid_min": 1e39}, {"valid_max": -1e39}]
    if dtype.kind == "i":
        cases += [
            {"_Unsigned": "true"},
            {"_Unsigned": "true", "_FillValue": told(-1)},
            {"_Unsigned": "true", "_FillValue": told(1), "valid_range": told([0, -20])},
        ]
    for case in cases:
        attributes = dict(case)
        with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
            file.createDimension("x", len(numbers))
            fill = attributes.pop("_FillValue", None)
            t = file.createVariable("t", dtype, ("x",), fill_value=fill)
            t.set_auto_maskandscale(False)
            t[:] = numbers.astype(dtype)
            t.setncatts(attributes)
        with netCDF4.Dataset(tmp_path / "a.nc") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = file["t"][:]
        found = shardtensor.io.open(tmp_path / "a.nc", "t")
        assert found.dtype == found[...].dtype
        if np.ma.is_masked(expected):
            expected = np.ma.filled(expected.astype("f8"), np.nan)
        close = torch.testing.assert_close
        expected = torch.tensor(np.asarray(expected)).to(found.dtype)
        close(found[...], expected, equal_nan=True, msg=lambda m, c=case: f"{c} {m}")
        found.close()


def test_a_scale_as_text(tmp_path):
    path, expected = packed(tmp_path / "a.nc")
    with netCDF4.Dataset(path, "a") as file:
        file["t"].scale_factor = "0.5"
    torch.testing.assert_close(shardtensor.io.open(path)[...], expected, equal_nan=True)
    with netCDF4.Dataset(path, "a") as file:
        file["t"].scale_factor = "half"
    with pytest.raises(ValueError, match="a.nc.*scale_factor: expected a number, got"):
        len(shardtensor.io.open(path))


def time_file(path, units, calendar, numbers, kind, attributes):
    told = dict(attributes)
    fill = told.pop("_FillValue", None)
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", len(numbers))
        time = file.createVariable("time", kind, ("time",), fill_value=fill)
        time.set_auto_maskandscale(False)
        time.units = units
        if calendar:
            time.calendar = calendar
        time.setncatts(told)
        time[:] = np.array(numbers, kind)
        file.createVariable("x", "f4", ("time",))[:] = 0
    with netCDF4.Dataset(path) as file:
        return file["time"][:]


def same_times(path, units, calendar="", numbers=(0, 1.25, 400.5), kind="f8", **told):
    stored = time_file(path, units, calendar, numbers, kind, told)
    expected = cftime.num2date(stored, units, calendar or "standard")
    found = shardtensor.io.open(path, "x").coordinates["time"]
    missing = np.ma.getmaskarray(stored)
    for mine, theirs, is_missing in zip(found, expected, missing, strict=True):
        if is_missing:
            assert mine is None or np.isnat(mine), (units, calendar, found)
        else:
            text = str(mine).replace("T", " ")
            assert text.startswith(str(theirs)), (units, calendar, mine, theirs)
    return found.dtype.kind


def test_times_are_those_of_cftime(tmp_path):
    path, kinds = tmp_path / "a.nc", set()
    for since in (
        "2000-01-01", "1900-01-01 00:00:0.0", "1970-01-01T00:00:00Z", "1-1-1 00:00:00",
        "2000-01-01 00:00:00 +2:00", "2000-01-01 00:00:00+02:00", "2000-1-1 12",
        "2000-01-01 00:00:00 -0330", "2000-01-01 12:30:15.5", "1850-01-01",
        "2000-01-01 06:00", "2000-01-01 00:00:00 UTC", "1583-01-01", "1582-10-04",
        "1582-10-15",
    ):  # fmt: skip
        for unit in ("days", "Hours", "hr", "min", "secs", "milliseconds", "microsecs"):
            for calendar in ("", "gregorian", "proleptic_gregorian", "julian"):
                numbers = (0, 1.25, 400.5, 800000)
                if not since.startswith("1-1-1"):
                    numbers += (-200, -200000)
                kind = same_times(path, f"{unit} since {since}", calendar, numbers)
                kinds.add((calendar, kind))
    assert ("", "M") in kinds and ("", "O") in kinds
    assert ("proleptic_gregorian", "O") not in kinds
    for calendar in ("noleap", "360_day", "all_leap", "366_day"):
        same_times(path, "days since 2000-01-01", calendar, (0, 59, 60, 366.5))
    same_times(path, "months since 2000-01-01", "360_day", (0, 1, 2))
    same_times(path, "microseconds since 1970-01-01", "", (2**60 + 1, 5), "i8")


def test_times_are_unpacked_and_missing_ones_are_none(tmp_path):
    path, days = tmp_path / "a.nc", "days since 2000-01-01"
    for calendar in ("", "noleap"):
        same_times(path, days, calendar, (0, -1, 2), "i4", _FillValue=-1)
        same_times(path, days, calendar, (0, -1, 2), "i1", _Unsigned="true")
        same_times(path, days, calendar, (0, np.nan, 2), _FillValue=np.nan)
        same_times(path, days, calendar, (0, 7, 2), missing_value=7.0)
        packed = {"scale_factor": 0.5, "add_offset": 100.0}
        same_times(path, days, calendar, (0, 10, 2), "i2", _FillValue=2, **packed)
    time_file(path, days, "", (0, 1e30), "f8", {})
    far = shardtensor.io.open(path, "x").coordinates["time"]
    assert not np.isnat(far[0]) and np.isnat(far[1])


def test_units_that_cftime_has_not(tmp_path):
    """Weeks and nanoseconds are times; what is no time, or is missing a date, stays
    the numbers that are stored, and other coordinates are read."""
    path = tmp_path / "a.nc"

    def found(units, numbers, kind, calendar="", **told):
        time_file(path, f"{units} since 2000-01-01", calendar, numbers, kind, told)
        return shardtensor.io.open(path, "x").coordinates["time"]

    def since(*microseconds):
        return np.datetime64("2000-01-01", "us") + np.array(microseconds)

    week, second = 7 * 24 * 3600 * 10**6, 10**9
    for kind in ("i4", "f8"):
        assert (found("Weeks", (0, 1, -2), kind) == since(0, week, -2 * week)).all()
    assert (found("week", (0.5, 2), "f8") == since(week // 2, 2 * week)).all()
    for units in ("nanoseconds", "ns"):
        for kind in ("i8", "f8"):
            numbers = (second, -5 * second, 10**18)
            expected = since(10**6, -5 * 10**6, 10**15)
            assert (found(units, numbers, kind) == expected).all()
        missing = found(units, (second, 7, 1999), "i8", _FillValue=7)
        assert (missing[::2] == since(10**6, 1)).all() and np.isnat(missing[1])
    assert [t.day for t in found("weeks", (1, 2), "i4", "noleap")] == [8, 15]
    for units in ("months", "years", "fortnights"):
        assert found(units, (0, 1.5), "f8").tolist() == [0, 1.5]
    assert found("days", (0, 1), "f8", "lunar").tolist() == [0, 1]
    for date in ("forever", "2000-13-01", "20000101"):
        time_file(path, f"days since {date}", "", (3, 4), "i2", {"scale_factor": 0.5})
        times = shardtensor.io.open(path, "x").coordinates["time"]
        assert times.tolist() == [1.5, 2]
    time_file(tmp_path / "b.nc", "days since 2000-01-01", "", (5,), "f8", {})
    both = shardtensor.io.open(str(tmp_path / "?.nc"), "x").coordinates["time"]
    assert both.tolist() == [1.5, 2, 5]


def test_times_of_several_files_are_of_one_kind(tmp_path):
    for name, since in (("a", "1500-01-01"), ("b", "1900-01-01")):
        time_file(tmp_path / f"{name}.nc", f"days since {since}", "", (0, 1), "f8", {})
    times = shardtensor.io.open(str(tmp_path / "?.nc"), "x").coordinates["time"]
    assert [t.year for t in times] == [1500, 1500, 1900, 1900]
    assert all(isinstance(t, cftime.datetime) for t in times)
