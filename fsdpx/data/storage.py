"""How files of fields encode values as stored numbers: packing, unsigned integers and missing values, following the
conventions of CF, NetCDF and xarray."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.base.dataclass import dataclass

__all__ = ["NumberEncoding", "find_encoding_of_stored_numbers"]

NETCDF_FILL = {
    "i2": -(2**15) + 1, "u2": 2**16 - 1, "i4": -(2**31) + 1, "u4": 2**32 - 1, "i8": -(2**63) + 2, "u8": 2**64 - 2,
    "f4": float.fromhex("0x1.ep+122"), "f8": float.fromhex("0x1.ep+122"),
}  # fmt: skip
"""Default fill values of the NetCDF library, by dtype. For 8-bit integers, readers assume no default fill value, since
each of the few possible values may be valid data (docs.unidata.ucar.edu/nug/current/fill_values.html)."""
_SUFFIXES = (".nc", ".nc4", ".netcdf", ".cdf")
_DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute that xarray uses to store dim names in Zarr format 2. In arrays that have this attribute, `fill_value`
marks missing values."""


@dataclass(frozen=True)
class NumberEncoding:
    """How the stored numbers of an array are converted to values.

    Parameters
    ----------
    kind : dtype used to interpret the stored bytes
    missing : stored numbers that mark missing data
    low, high : stored numbers below `low` or above `high` mark missing data; None means no limit
    factor, offset : value = stored * factor + offset, for packed data
    """

    kind: np.dtype
    missing: tuple[Any, ...]
    low: Any
    high: Any
    factor: float
    offset: float

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Convert stored numbers to floating-point values, with NaN where data are missing."""
        stored = stored.view(self.kind)
        absent = np.zeros(stored.shape, bool)
        for value in self.missing:
            absent |= stored == value
        if self.low is not None:
            absent |= stored < self.low
        if self.high is not None:
            absent |= stored > self.high
        values = stored if self.kind.kind == "f" else stored.astype(np.float64)
        if (self.factor, self.offset) != (1.0, 0.0):
            values = values * self.factor + self.offset
        return np.where(absent, np.nan, values)


def find_encoding_of_stored_numbers(path: Path, array: Any) -> NumberEncoding | None:
    """Return how the values of an array in a file are encoded; None if the stored numbers are the values themselves.

    A stored number marks missing data if it equals `_FillValue` or one of `missing_value`, or if it is outside of
    `valid_range`, or outside of the range from `valid_min` to `valid_max`. In NetCDF files without `_FillValue`, the
    library's default fill value also marks missing data. In a Zarr array of format 2 that xarray has written,
    `fill_value` also marks missing data."""
    attributes, stored = getattr(array, "attrs", {}), np.dtype(array.dtype)
    kind = _apply_unsigned_attribute_to_dtype(stored, _decode_text(attributes.get("_Unsigned")))
    named = [value for name in ("_FillValue", "missing_value") for value in _parse_attribute_numbers(attributes, name)]
    found = [
        _cast_number_to_interpreted_dtype(value, stored, kind)
        for value in [*named, *_iterate_conventional_missing_values(path, array, attributes, stored, kind)]
    ]
    missing = tuple(value for value in found if value is not None and not np.isnan(value))
    limits = _parse_attribute_numbers(attributes, "valid_range")
    low, high = (
        limits if len(limits) == 2 else (_parse_first_number(attributes, name) for name in ("valid_min", "valid_max"))
    )
    factor, offset = (
        _parse_first_number(attributes, "scale_factor", 1.0),
        _parse_first_number(attributes, "add_offset", 0.0),
    )
    made = NumberEncoding(
        kind,
        missing,
        _cast_number_to_interpreted_dtype(low, stored, kind),
        _cast_number_to_interpreted_dtype(high, stored, kind),
        float(factor),
        float(offset),
    )
    return None if made == NumberEncoding(stored, (), None, None, 1.0, 0.0) else made


def _apply_unsigned_attribute_to_dtype(stored: np.dtype, unsigned: str) -> np.dtype:
    """Return the dtype for interpreting stored integers. `unsigned` is the value of their attribute `_Unsigned`. In
    NetCDF's classic model, all integers are stored as signed, and this attribute marks the integers that should be read
    as unsigned."""
    meant = {("i", "true"): "u", ("u", "false"): "i"}.get((stored.kind, unsigned.lower()))
    return stored if meant is None else np.dtype(f"{stored.byteorder}{meant}{stored.itemsize}")


def _iterate_conventional_missing_values(
    path: Path, array: Any, attributes: Mapping[str, Any], stored: np.dtype, kind: np.dtype
) -> Iterator[int | float]:
    """Yield the numbers that mark missing data by convention, even if no attribute declares them."""
    if getattr(getattr(array, "metadata", None), "zarr_format", None) == 2 and _DIMENSIONS in attributes:
        if array.fill_value is not None:
            yield np.asarray(array.fill_value).item()
    elif hasattr(array, "file") and kind == stored and not _parse_attribute_numbers(attributes, "_FillValue"):
        of_netcdf = path.suffix.lower() in _SUFFIXES or "_NCProperties" in array.file.attrs
        if of_netcdf and (value := NETCDF_FILL.get(stored.str[1:])) is not None:
            yield value


def _parse_attribute_numbers(attributes: Mapping[str, Any], name: str) -> list[int | float]:
    """Return the numbers in an attribute. Values that neither are numbers nor can be parsed as numbers are skipped.

    Text is parsed because JSON has no NaN, and because xarray stores a number in Zarr format 3 as text that encodes
    its eight bytes."""
    found = []
    for value in np.ravel(attributes.get(name, ())).tolist():
        if isinstance(value, str | bytes):
            value = _parse_number(_decode_text(value))
        if isinstance(value, int | float):
            found.append(value)
    return found


def _parse_first_number(attributes: Mapping[str, Any], name: str, without: float | None = None) -> Any:
    return next(iter(_parse_attribute_numbers(attributes, name)), without)


def _decode_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _parse_number(text: str) -> float | int | None:
    for read in (int, float, lambda text: np.frombuffer(base64.b64decode(text, validate=True), "<f8").item()):
        with suppress(ValueError):
            return read(text)
    return None


def _cast_number_to_interpreted_dtype(value: int | float | None, stored: np.dtype, kind: np.dtype) -> Any:
    """Convert a number to `kind`, the dtype for interpreting stored numbers. Return None if this dtype cannot represent
    the number. `stored` is the dtype of the array in the file, which may be signed although `kind` is unsigned."""
    if value is None or (stored.kind != "f" and (math.isnan(value) or math.isinf(value) or value != int(value))):
        return None
    if stored.kind == "f":
        with np.errstate(over="ignore"):
            found = stored.type(value)
        return None if np.isinf(found) and not math.isinf(value) else found
    # an attribute may give an unsigned number as the signed number with the same bits, so try both dtypes
    for given_as in (stored, kind):
        if np.iinfo(given_as).min <= value <= np.iinfo(given_as).max:
            return np.array(int(value), given_as).view(kind)[()]
    return None
