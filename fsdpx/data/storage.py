"""How the numbers of a field are stored in a file: packed, unsigned, and which of them stand for missing values, by the
conventions of CF, NetCDF and xarray."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["StorageFormat", "find_storage_format"]

NETCDF_FILL = {
    "i2": -(2**15) + 1, "u2": 2**16 - 1, "i4": -(2**31) + 1, "u4": 2**32 - 1, "i8": -(2**63) + 2, "u8": 2**64 - 2,
    "f4": float.fromhex("0x1.ep+122"), "f8": float.fromhex("0x1.ep+122"),
}  # fmt: skip
"""What the NetCDF library writes where nothing was written and no other value is named. Bytes have none when they are
read: each of their few values may be meant (docs.unidata.ucar.edu/nug/current/fill_values.html)."""
_SUFFIXES = (".nc", ".nc4", ".netcdf", ".cdf")
_DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute by which xarray names dims in Zarr of format 2, where it keeps missing values in `fill_value`."""


@dataclass(frozen=True)
class StorageFormat:
    """kind: as which the stored numbers are read. missing: those that stand for none, as do numbers below `low` and
    above `high`. factor, offset: of packed numbers."""

    kind: np.dtype
    missing: tuple[Any, ...]
    low: Any
    high: Any
    factor: float
    offset: float

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """The numbers that are meant, floats, NaN where there is none."""
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


def find_storage_format(path: Path, array: Any) -> StorageFormat | None:
    """How the numbers of an array in a file are stored; None if they are what they seem.

    What stands for a missing value: `_FillValue`, `missing_value` (one or several), in NetCDF the library's own where
    there is no `_FillValue`, in Zarr of format 2 by xarray the `fill_value` of the array, and what is outside
    `valid_range`, or `valid_min` and `valid_max`. All of them are compared with the numbers as they are stored."""
    attributes, stored = getattr(array, "attrs", {}), np.dtype(array.dtype)
    kind = _read_as(stored, _decode_text(attributes.get("_Unsigned")))
    named = [value for name in ("_FillValue", "missing_value") for value in _get_numbers(attributes, name)]
    found = [
        _cast_number(value, stored, kind)
        for value in [*named, *_iterate_default_fill_values(path, array, attributes, stored, kind)]
    ]
    missing = tuple(value for value in found if value is not None and not np.isnan(value))
    limits = _get_numbers(attributes, "valid_range")
    low, high = (
        limits if len(limits) == 2 else (_get_first_number(attributes, name) for name in ("valid_min", "valid_max"))
    )
    factor, offset = (
        _get_first_number(attributes, "scale_factor", 1.0),
        _get_first_number(attributes, "add_offset", 0.0),
    )
    made = StorageFormat(
        kind, missing, _cast_number(low, stored, kind), _cast_number(high, stored, kind), float(factor), float(offset)
    )
    return None if made == StorageFormat(stored, (), None, None, 1.0, 0.0) else made


def _read_as(stored: np.dtype, unsigned: str) -> np.dtype:
    """The type in which stored whole numbers are meant: NetCDF's classic model has signed ones alone."""
    meant = {("i", "true"): "u", ("u", "false"): "i"}.get((stored.kind, unsigned.lower()))
    return stored if meant is None else np.dtype(f"{stored.byteorder}{meant}{stored.itemsize}")


def _iterate_default_fill_values(
    path: Path, array: Any, attributes: Mapping[str, Any], stored: np.dtype, kind: np.dtype
) -> Iterator[int | float]:
    """What stands for missing values though no attribute says so."""
    if getattr(getattr(array, "metadata", None), "zarr_format", None) == 2 and _DIMENSIONS in attributes:
        if array.fill_value is not None:
            yield np.asarray(array.fill_value).item()
    elif hasattr(array, "file") and kind == stored and not _get_numbers(attributes, "_FillValue"):
        of_netcdf = path.suffix.lower() in _SUFFIXES or "_NCProperties" in array.file.attrs
        if of_netcdf and (value := NETCDF_FILL.get(stored.str[1:])) is not None:
            yield value


def _get_numbers(attributes: Mapping[str, Any], name: str) -> list[int | float]:
    """The numbers of an attribute. Text may be a number as well: JSON has no NaN, and xarray writes the eight bytes of
    a number into Zarr of format 3. What is no number stands for none."""
    found = []
    for value in np.ravel(attributes.get(name, ())).tolist():
        if isinstance(value, str | bytes):
            value = _parse_number(_decode_text(value))
        if isinstance(value, int | float):
            found.append(value)
    return found


def _get_first_number(attributes: Mapping[str, Any], name: str, without: float | None = None) -> Any:
    return next(iter(_get_numbers(attributes, name)), without)


def _decode_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _parse_number(text: str) -> float | int | None:
    for read in (int, float, lambda text: np.frombuffer(base64.b64decode(text, validate=True), "<f8").item()):
        with suppress(ValueError):
            return read(text)
    return None


def _cast_number(value: int | float | None, stored: np.dtype, kind: np.dtype) -> Any:
    """A number as the array has it; None where it cannot have it."""
    if value is None or (stored.kind != "f" and (math.isnan(value) or math.isinf(value) or value != int(value))):
        return None
    if stored.kind == "f":
        with np.errstate(over="ignore"):
            found = stored.type(value)
        return None if np.isinf(found) and not math.isinf(value) else found
    for given_as in (stored, kind):  # an unsigned number may be given as the signed one that is stored
        if np.iinfo(given_as).min <= value <= np.iinfo(given_as).max:
            return np.array(int(value), given_as).view(kind)[()]
    return None
