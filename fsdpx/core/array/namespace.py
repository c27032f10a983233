"""The namespace of an array library (NumPy, CuPy or shape-only arrays), and dtypes by name."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fsdpx.core.array import devices
from fsdpx.core.base.config import half_name
from fsdpx.errors import ConfigError, DataError

__all__ = [
    "DEVICES",
    "DTYPES",
    "dtype",
    "from_host",
    "joined",
    "namespace",
    "namespace_of",
    "numpy_dtype",
    "to_host",
    "unmasked",
]  # fmt: skip

DEVICES = ("cpu", "cuda", "shape")
DTYPES = (
    "float64", "float32", "float16", "fp16", "bf16", "bfloat16", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip


def namespace(device: str) -> Any:
    """The module of array functions for a device: "cpu" NumPy, "cuda" CuPy, "shape" arrays that hold no data."""
    if device == "cpu":
        return np
    if device == "shape":
        from fsdpx.core.array import shapes

        return shapes
    if device == "cuda":
        devices.gpus()
        return devices.cupy()
    hint = "; which GPU is for device_map to say" if str(device).startswith("cuda:") else ""
    raise ConfigError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}{hint}")


def joined(xp: Any, arrays: Sequence[Any], axis: int = -1) -> Any:
    """Arrays of one dtype, concatenated. `cupy.concatenate` takes their addresses from the host, which a CUDA graph
    would read there again."""
    axis %= arrays[0].ndim
    ends = list(accumulate(array.shape[axis] for array in arrays))
    out = xp.empty((*arrays[0].shape[:axis], ends[-1], *arrays[0].shape[axis + 1 :]), dtype=arrays[0].dtype)
    for array, end in zip(arrays, ends, strict=True):
        out[(slice(None),) * axis + (slice(end - array.shape[axis], end),)] = array
    return out


def namespace_of(array: Any) -> Any:
    """The module of array functions that `array` belongs to."""
    if type(array) is np.ndarray:
        return np
    if devices.is_on_gpu(array):
        return devices.cupy()
    return namespace("shape") if getattr(array, "holds_no_data", False) else np


def to_host(array: Any) -> np.ndarray:
    """`array` as a NumPy array: itself if it is one, a copy from the GPU, zeros if there is no data."""
    if type(array) is np.ndarray:
        return array
    if devices.is_on_gpu(array):
        return array.get()
    if getattr(array, "holds_no_data", False):
        return np.zeros(array.shape, array.dtype)
    return unmasked(array)


def unmasked(value: Any) -> np.ndarray:
    """`np.asarray(value)`; DataError where that would make numbers of masked elements, as of netCDF4's fill values."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray) and (count := int(np.ma.getmaskarray(value).sum())):
        raise DataError(f"{count:,} of {value.size:,} elements are masked: give them values, as x.filled(0.0) does")
    return np.asarray(value)


def from_host(xp: Any, array: np.ndarray) -> Any:
    """A NumPy array as an array of `xp`; NumPy's own is not copied."""
    return xp.asarray(array)


def dtype(name: str | np.dtype) -> np.dtype:
    """The dtype of a name; "fp16" is float16, "bf16" and "bfloat16" that of ml_dtypes. A dtype is returned as it is."""
    if isinstance(name, np.dtype):
        return name
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")
    name = half_name(name)
    return _bfloat16() if name == "bf16" else np.dtype(name)


def numpy_dtype(call: str, given: Any) -> np.dtype:
    """The dtype that NumPy makes of an argument `dtype`; ConfigError where it makes none."""
    try:
        if (found := np.dtype(given)).itemsize:
            return found
        raise TypeError("of no bytes")
    except TypeError as error:
        raise ConfigError(f"{call}(dtype={given!r}): give a dtype of NumPy, such as 'float32'") from error


def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ConfigError("bf16 needs the package ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)
