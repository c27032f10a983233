"""Missing and packed numbers are read as xarray and netCDF4 read them: files that these write, file by file."""

import warnings

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.data import FieldDataset

T, Y, X = 3, 4, 5


def read(path, name="u"):
    """All states of a field, as float64."""
    return np.concatenate(FieldDataset(path, fields=name, dims="tyx", inputs=1, targets=T - 1, dtype=np.float64)[0])


def demand_same(found, expected):
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@st.composite
def fields(draw):
    """Numbers as they are stored, some of which the attributes say to be missing, packed or unsigned."""
    dtype = np.dtype(draw(st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8"])))
    fills = [-999.0, -9999.5, 1e20, np.nan]
    if dtype.kind != "f":
        fills = [int(np.iinfo(dtype).max) - 3, int(np.iinfo(dtype).min), 7]  # none of which is NetCDF's own
    chosen = draw(st.lists(st.sampled_from(fills), min_size=1, max_size=3, unique_by=str))
    stored = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 90, (T, Y, X)).astype(dtype)
    for n, value in enumerate(chosen):
        stored.reshape(-1)[n :: len(chosen) + 3] = value
    kind, attributes = draw(st.sampled_from(["_FillValue", "missing_value", "both", "none"])), {}
    if kind in ("_FillValue", "both"):
        attributes["_FillValue"] = dtype.type(chosen[0])
    if kind in ("missing_value", "both"):
        attributes["missing_value"] = np.array(chosen, dtype) if draw(st.booleans()) else dtype.type(chosen[-1])
    if dtype.kind == "i" and draw(st.booleans()):
        attributes["_Unsigned"] = "true"
        attributes.pop("missing_value", None)  # which xarray compares without reading it as unsigned
    if draw(st.booleans()):
        attributes["scale_factor"] = draw(st.sampled_from([0.5, 0.01, 2.0]))
    if draw(st.booleans()):
        attributes["add_offset"] = draw(st.sampled_from([280.0, -3.5]))
    return stored, attributes


FORMS = {"h5netcdf": "h5netcdf", "netcdf4": "netCDF4", "zarr2": "zarr", "zarr3": "zarr"}
"""What xarray writes, and the library with which it does."""


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=examples(25))
@given(field=fields())
def test_files_of_xarray(form, tmp_path_factory, field):
    xarray = pytest.importorskip("xarray")
    for library in ("h5py", FORMS[form]):
        pytest.importorskip(library)
    stored, attributes = field
    path, dims = tmp_path_factory.mktemp("written") / ("u.zarr" if "zarr" in form else "u.nc"), ("time", "y", "x")
    encoding = {} if "_FillValue" in attributes else {"_FillValue": None}
    dataset = xarray.Dataset({"u": xarray.Variable(dims, stored, attributes, encoding)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of xarray, on what it thinks of the attributes
        if "zarr" in form:
            dataset.to_zarr(path, zarr_format=int(form[-1]), consolidated=False)
            expected = xarray.open_zarr(path, consolidated=False)
        else:
            dataset.to_netcdf(path, engine=form)
            expected = xarray.open_dataset(path, engine=form)
        with expected:
            demand_same(read(path), expected["u"].values)


@settings(deadline=None, max_examples=examples(60))
@given(field=fields(), limits=st.sampled_from([{}, {"valid_min": 5}, {"valid_max": 60}, {"valid_range": [5, 60]}]))
def test_files_of_netcdf4(tmp_path_factory, field, limits):
    """With valid ranges, which xarray leaves to others, and with cells that were never written."""
    netcdf4 = pytest.importorskip("netCDF4")
    pytest.importorskip("h5py")
    stored, attributes = field
    path = tmp_path_factory.mktemp("written") / "u.nc"
    with netcdf4.Dataset(path, "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, n in zip("tyx", (T, Y, X), strict=True):
            file.createDimension(name, n)
        fill = attributes.pop("_FillValue", False if stored.dtype.itemsize == 1 else None)
        variable = file.createVariable("u", stored.dtype, tuple("tyx"), fill_value=fill)
        variable.set_auto_maskandscale(False)
        variable.setncatts(attributes | {name: np.array(value, stored.dtype) for name, value in limits.items()})
        variable[:-1] = stored[:-1]
        variable[-1, 1:] = stored[-1, 1:]
    with netcdf4.Dataset(path) as file:
        file.set_always_mask(True)
        expected = np.ma.filled(file["u"][...].astype(np.float64), np.nan)
    demand_same(read(path), expected)


def test_what_netcdf_writes_by_itself_is_missing_in_its_files_alone(tmp_path):
    """Not in bytes, whose few values may all be meant; and not where an attribute names another."""
    netcdf4, h5py = pytest.importorskip("netCDF4"), pytest.importorskip("h5py")
    kinds = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
    with netcdf4.Dataset(tmp_path / "u.nc", "w") as file:
        for name, n in zip("tyx", (T, Y, X), strict=True):
            file.createDimension(name, n)
        for kind in kinds:
            file.createVariable(kind, kind, tuple("tyx"))[1:] = 3
            file.createVariable(f"named-{kind}", kind, tuple("tyx"), fill_value=7)[1:] = netcdf4.default_fillvals[kind]
    (tmp_path / "u.nc").rename(tmp_path / "without-suffix")
    with h5py.File(tmp_path / "without-suffix") as file, h5py.File(tmp_path / "plain.h5", "w") as plain:
        for kind in kinds:
            plain[kind] = file[kind][...]
    for kind in kinds:
        found = read(tmp_path / "without-suffix", kind)
        assert (found[1:] == 3).all()
        assert np.isnan(found[0]).all() == (kind[1] != "1")
        found = read(tmp_path / "without-suffix", f"named-{kind}")
        assert np.isnan(found[0]).all()
        np.testing.assert_allclose(found[1:], netcdf4.default_fillvals[kind], rtol=1e-15)
        assert np.isfinite(read(tmp_path / "plain.h5", kind)).all()


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", ">i2", ">f4"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"missing_value": -999.0},
        {"missing_value": "-999"},
        {"missing_value": b"-999"},
        {"_FillValue": [-999]},
        {"_FillValue": 1e300, "missing_value": [1.0e30, -999.0, np.nan]},
        {"_FillValue": "AAAAAAA4j8A="},
        {"valid_range": [-998, 30000]},
        {"valid_min": -998.0, "valid_max": "none"},
        {"_FillValue": "nothing", "missing_value": -999, "scale_factor": 1, "add_offset": 0},
    ],
)
def test_attributes_of_any_type(attributes, dtype, tmp_path, h5py):
    """HDF5 by others, whose attributes have other types than the field."""
    stored = np.arange(T * Y * X).reshape(T, Y, X).astype(dtype)
    stored[1, 2, 3] = -999
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file["u"] = stored
        file["u"].attrs.update(attributes)
    demand_same(read(tmp_path / "u.h5"), np.where(stored == -999, np.nan, stored.astype(float)))


def test_numbers_that_an_array_cannot_have_stand_for_none_of_its_own(tmp_path, h5py):
    stored = np.arange(T * Y * X, dtype=np.uint8).reshape(T, Y, X)
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file["u"] = stored
        file["u"].attrs.update(missing_value=[256.0 + 5, -251, 5.5, np.inf, -1e300], valid_max=1e9, valid_min=-5)
    demand_same(read(tmp_path / "u.h5"), stored.astype(float))


def test_text_in_zarr(tmp_path, zarr):
    """JSON has no NaN; and a `fill_value` that xarray has not written is a value."""
    stored = np.arange(T * Y * X, dtype=np.float32).reshape(T, Y, X)
    stored[0, 1, 2] = np.inf
    for form in (2, 3):
        group = zarr.open_group(tmp_path / f"{form}.zarr", mode="w", zarr_format=form)
        for name, text, value in (("nan", "NaN", np.nan), ("infinity", "Infinity", np.inf), ("number", "3.0", 3.0)):
            group.create_array(name, data=stored, fill_value=0.0).attrs["_FillValue"] = text
            demand_same(read(tmp_path / f"{form}.zarr", name), np.where(stored == value, np.nan, stored))
