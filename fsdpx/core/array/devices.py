"""Devices, which hold arrays and compute on them. The class `Device` implements the CPU device. Other devices are
subclasses of `Device`. A device is looked up by its name, by its array module or by one of its arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from fsdpx.core.base.extensions import (
    EXTENSIONS,
    import_declared_extension,
    import_extension_if_declared,
    list_extensions,
)
from fsdpx.errors import ConfigError, DataError

__all__ = [
    "CPU", "Device", "DeviceMap", "as_array_requiring_unmasked", "get_device_of_array", "get_device_of_namespace",
    "load_device",
]  # fmt: skip

DeviceMap = Sequence[int] | Mapping[int, int] | None
"""The index of the device that each local rank (index of a rank on its host) uses, if a host has several devices. None
assigns devices to ranks in order."""


class Device:
    """Interface of a device. This class implements the interface for the CPU, with NumPy arrays. Each class has one
    instance.

    Attributes
    ----------
    name : name that `distribute(device=...)` accepts
    holds_data : whether arrays have values; False for shape-only arrays
    has_sum_kernels : whether the device has its own kernels for sums over rows and channels. These kernels take
        per-channel values in float64
    """

    name, holds_data, has_sum_kernels = "cpu", True, False

    @property
    def xp(self) -> Any:
        """Array module of the device, such as NumPy."""
        return np

    def require_usable(self) -> None:
        """Raise ConfigError if this process cannot compute on the device."""

    def require_valid_map(self, device_map: DeviceMap) -> None:
        """Raise ConfigError if the user assigns devices to local ranks with `device_map`, although each host has only
        one device of this kind."""
        if device_map is not None:
            raise ConfigError(f"device_map={device_map!r}: a host has only one device={self.name!r}; name another")

    def select_for_rank(self, world: Any, device_map: DeviceMap) -> list[str]:
        """Select the device of this rank if the host has several, and return messages for the user. Collective.

        `world` is the communicator of all ranks. `device_map` contains the user's choice of a device for each local
        rank (index of a rank on its host)."""
        return []

    def as_array(self, value: Any) -> Any:
        """Convert a value, such as a list or an array, to an array on this device. Raise DataError, TypeError or
        ValueError if that is not possible."""
        return as_array_requiring_unmasked(value)

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array of this device to a NumPy array. A NumPy array is returned unchanged."""
        return as_array_requiring_unmasked(array)

    def from_host(self, array: np.ndarray) -> Any:
        """Copy a NumPy array to this device. The CPU returns the array unchanged."""
        return self.xp.asarray(array)

    def describe_location(self, array: Any) -> str:
        """Return a description of where an array of this device is stored, for use in messages."""
        return "on the host"

    def require_arrays_on_one_device(self, arrays: Sequence[Any]) -> None:
        """Raise DataError unless all arrays are on the same device. This device must be the host or the rank's own
        device, because a rank cannot compute on other devices."""

    def use_device_of(self, array: Any) -> AbstractContextManager[Any]:
        """Return a context manager inside which this thread computes on the device that holds `array`."""
        return nullcontext()

    def is_zero(self, number: float) -> bool:
        """Return whether `number`, which was computed from arrays of this device, is 0."""
        return number == 0

    def is_finite(self, array: Any) -> bool:
        """Return whether the array contains neither NaN nor Inf."""
        return bool(self.xp.isfinite(array).all())

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        """Return whether none of these 1-D arrays contains NaN or Inf. The result is also False if the sum of squares
        of an array overflows."""
        with np.errstate(all="ignore"):
            return math.isfinite(sum([array.dot(array) for array in arrays]))

    def find_kernel(self, name: str, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the device's own implementation of a kernel for these arguments. Return None if the device has none,
        so that the kernel runs as plain array code or as Numba code."""
        return None

    def try_multiply_matrices(self, a: Any, b: Any) -> Any | None:
        """Return the product of two matrices, or of two stacks of matrices. Return None if this device does not have
        its own implementation."""
        return None

    def try_multiply_matrices_into(self, out: Any, a: Any, b: Any, add: bool) -> bool:
        """Write the product of two matrices to `out`, or add it to `out` if `add` is true. Return False if this device
        does not have its own implementation."""
        return False

    def try_run_optimizer_kernel(self, name: str, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> bool:
        """Run the device's own kernel for an update formula of an optimizer on these arrays and numbers. `name` is the
        name of the formula. Return False if the device has no such kernel."""
        return False

    def run_shard_update(self, run: Callable[[], None], p: Any, g: Any, slots: Mapping[str, Any]) -> bool:
        """Call `run`, which updates the parameter shard p in place. If the arrays have no values, return False without
        calling `run`. g holds the gradients of the shard, and `slots` holds the optimizer's state arrays."""
        run()
        return True

    def synchronize(self) -> None:
        """Wait until the device has completed all work that this thread has issued."""

    def make_copier(self, array: Any) -> Any:
        """Return an object that copies between `array` and pinned host memory. Its method `start_copy(target, source)`
        starts a copy and returns a `Handle`."""
        raise NotImplementedError

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        """Return pinned host memory of `nbytes` bytes, for asynchronous copies to and from the device."""
        raise NotImplementedError


CPU = Device()


def load_device(name: str) -> Device:
    """Return the device with this name, such as "cpu" or "cuda"; raise ConfigError if there is none."""
    if name == "cpu":
        return CPU
    if import_extension_if_declared("device", str(name)) is None:
        hint = "; choose the GPU by device_map" if str(name).startswith("cuda:") else ""
        choices = ", ".join(["cpu", *list_extensions("device")])
        raise ConfigError(f"unknown device {name!r}: choose one of {choices}{hint}")
    found: Device = import_declared_extension("device", name)
    return found


def get_device_of_array(array: Any) -> Device:
    """Return the device that holds an array. For a value that is not an array, return the CPU."""
    kind = type(array)
    return CPU if kind is np.ndarray else _find_device_of_array_module(kind.__module__)


def get_device_of_namespace(xp: Any) -> Device:
    """Return the device whose array module is `xp`."""
    return CPU if xp is np else _find_device_of_array_module(xp.__name__)


@cache
def _find_device_of_array_module(name: str) -> Device:
    package = name.partition(".")[0]
    if package in ("builtins", "numpy"):
        return CPU
    # the array modules of fsdpx itself are all declared in `EXTENSIONS`; reading the declarations of other packages as
    # well would take 10 % of a job's start time
    modules = EXTENSIONS["array"] if package == "fsdpx" else list_extensions("array")
    known = [one for one in modules if f"{name}.".startswith(f"{one}.")]
    found: Device = import_declared_extension("array", known[0]) if known else CPU
    return found


def as_array_requiring_unmasked(value: Any) -> np.ndarray:
    """Return `np.asarray(value)`. Raise DataError if the value has masked elements, such as netCDF4's fill values,
    which would silently become numbers."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray) and (count := int(np.ma.getmaskarray(value).sum())):
        raise DataError(f"{count:,} of {value.size:,} elements are masked: give them values, as x.filled(0.0) does")
    return np.asarray(value)
