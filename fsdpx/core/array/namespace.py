"""Find the array module (NumPy, CuPy or shape-only arrays) of a device or an array, and the dtype that a name stands
for."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fsdpx.core.array.devices import (
    as_array_requiring_unmasked,
    get_device_of_array,
    get_device_of_namespace,
    load_device,
)
from fsdpx.core.base.config import normalize_half_name
from fsdpx.core.base.name_hints import suggest_number_format
from fsdpx.errors import ConfigError

__all__ = [
    "DTYPES", "LARGEST_INTEGERS", "as_array_requiring_unmasked", "concatenate_on_device", "from_host", "get_namespace",
    "namespace_of", "parse_dtype", "to_host", "to_numpy_dtype",
]  # fmt: skip

DTYPES = (
    "float64", "float32", "float16", "fp16", "bf16", "bfloat16", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip


def get_namespace(device: str) -> Any:
    """Return the array module of a device: NumPy for "cpu", CuPy for "cuda", and the shape-only module for "shape"."""
    found = load_device(device)
    found.require_usable()
    return found.xp


def concatenate_on_device(xp: Any, arrays: Sequence[Any], axis: int = -1) -> Any:
    """Concatenate arrays of the same dtype so that the operation can be captured in a CUDA graph. `cupy.concatenate` is
    not used, because it reads the addresses of the arrays from host memory, and a graph would read this memory again on
    each replay."""
    axis %= arrays[0].ndim
    ends = list(accumulate(array.shape[axis] for array in arrays))
    out = xp.empty((*arrays[0].shape[:axis], ends[-1], *arrays[0].shape[axis + 1 :]), dtype=arrays[0].dtype)
    for array, end in zip(arrays, ends, strict=True):
        out[(slice(None),) * axis + (slice(end - array.shape[axis], end),)] = array
    return out


def namespace_of(array: Any) -> Any:
    """Return the array module (NumPy, CuPy or shape-only) that `array` belongs to."""
    return get_device_of_array(array).xp


def to_host(array: Any) -> np.ndarray:
    """Return `array` as a NumPy array. A NumPy array is returned unchanged, a GPU array is copied, and a shape-only
    array becomes zeros."""
    return get_device_of_array(array).to_host(array)


def from_host(xp: Any, array: np.ndarray) -> Any:
    """Convert a NumPy array to an array of the module `xp`, without a copy if `xp` is NumPy."""
    return get_device_of_namespace(xp).from_host(array)


def parse_dtype(name: str | np.dtype) -> np.dtype:
    """Convert a name to a dtype. "fp16" means float16; "bf16" and "bfloat16" mean the bfloat16 of ml_dtypes. A dtype
    is returned unchanged. Raise ConfigError for an unknown name."""
    if isinstance(name, np.dtype):
        return name
    if name not in DTYPES:
        hint = suggest_number_format(name, DTYPES) or f": choose one of {', '.join(DTYPES)}"
        raise ConfigError(f"unknown dtype {name!r}{hint}")
    name = normalize_half_name(name)
    return _load_bfloat16() if name == "bf16" else np.dtype(name)


LARGEST_INTEGERS = {np.dtype(np.float16): 65504}
"""Maps a floating-point dtype to its largest finite integer. Larger integers in data would overflow. Only dtypes whose
range is too small for integer data are listed."""


def to_numpy_dtype(call: str, given: Any) -> np.dtype:
    """Convert the argument `dtype` of the function `call` to a NumPy dtype; raise ConfigError if that fails."""
    try:
        if (numpy_type := np.dtype(given)).itemsize:
            return numpy_type
        raise TypeError("of no bytes")
    except TypeError as error:
        raise ConfigError(f"{call}(dtype={given!r}): give a dtype of NumPy, such as 'float32'") from error


def _load_bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ConfigError("bf16 needs the package ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)
