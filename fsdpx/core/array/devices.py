"""Devices, which hold arrays and compute on them. The CPU is implemented here. Other devices are subclasses, which are
found by their name, their namespace or their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from fsdpx.core.base.extensions import find_extension, list_extensions, load_extension
from fsdpx.errors import ConfigError, DataError

__all__ = [
    "CPU", "Device", "DeviceMap", "as_unmasked_array", "get_device_of_array", "get_device_of_namespace", "load_device",
]  # fmt: skip

DeviceMap = Sequence[int] | Mapping[int, int] | None
"""Device number of each local rank if a host has several devices. None assigns the devices in order."""


class Device:
    """Interface of a device, implemented here for the CPU with NumPy arrays. Each class has one instance.

    `name`: the name that `distribute(device=...)` accepts. `holds_data`: whether arrays have values. `sums_by_kernel`:
    whether the device has kernels for sums over rows and channels, which take the numbers per channel in float64.
    """

    name, holds_data, sums_by_kernel = "cpu", True, False

    @property
    def xp(self) -> Any:
        """Namespace of the device's arrays."""
        return np

    def require_usable(self) -> None:
        """Raise ConfigError if this process cannot compute on the device."""

    def select_for_rank(self, world: Any, device_map: DeviceMap) -> list[str]:
        """Select one of several devices for this rank, and return messages for the user. Collective."""
        return []

    # -- arrays --------------------------------------------------------------------------------------------------------

    def as_array(self, value: Any) -> Any:
        """Return a value on this device as an array. Raise DataError, TypeError or ValueError if that is not
        possible."""
        return as_unmasked_array(value)

    def to_host(self, array: Any) -> np.ndarray:
        """Return an array of this device as a NumPy array. A NumPy array is returned unchanged."""
        return as_unmasked_array(array)

    def from_host(self, array: np.ndarray) -> Any:
        """Return a NumPy array as an array of this device. The CPU returns the NumPy array unchanged."""
        return self.xp.asarray(array)

    def describe_location(self, array: Any) -> str:
        """Return the location of an array of this device as text."""
        return "on the host"

    def require_arrays_on_one_device(self, arrays: Sequence[Any]) -> None:
        """Raise DataError unless this rank can compute with all of these arrays. They may be on any devices."""

    def use_device_of(self, array: Any) -> AbstractContextManager[Any]:
        """Return a context in which this thread computes on the device that holds the array."""
        return nullcontext()

    # -- values --------------------------------------------------------------------------------------------------------

    def is_zero(self, number: float) -> bool:
        """Return whether a number that was computed from arrays is 0."""
        return number == 0

    def is_finite(self, array: Any) -> bool:
        """Return whether no element is NaN or Inf."""
        return bool(self.xp.isfinite(array).all())

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        """Return whether no element of these 1-D arrays is NaN or Inf. Return False as well if a sum of squares
        overflows."""
        with np.errstate(all="ignore"):
            return bool(np.isfinite(float(sum([array.dot(array) for array in arrays]))))

    # -- computing -----------------------------------------------------------------------------------------------------

    def find_kernel(self, name: str, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the device's own implementation of a kernel for these arguments. Return None if array code or Numba's
        code is to run."""
        return None

    def multiply_matrices(self, a: Any, b: Any) -> Any | None:
        """Return the product of two matrices or of two stacks of matrices. Return None if the device has no
        implementation of its own for them."""
        return None

    def multiply_matrices_into(self, out: Any, a: Any, b: Any, add: bool) -> bool:
        """Write the product of two matrices to `out`, or add it to `out`. Return False if the device has no
        implementation of its own for them."""
        return False

    def run_optimizer_kernel(self, name: str, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> bool:
        """Run an optimizer's update formula, given by name. Return False if the device has no implementation of its own
        for it."""
        return False

    def update_shard(self, run: Callable[[], None], p: Any, g: Any, slots: Mapping[str, Any]) -> bool:
        """Run the update of a shard. Return False if the arrays have no values, so that nothing was run."""
        run()
        return True

    # -- copies that overlap with compute ------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all work that this thread has issued is complete."""

    def make_copier(self, array: Any) -> Any:
        """Return a copier between an array and pinned memory, whose `start_copy(target, source)` returns a `Handle`."""
        raise NotImplementedError

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        """Return pinned host memory of `nbytes` bytes, for asynchronous copies to and from the device."""
        raise NotImplementedError


CPU = Device()


def load_device(name: str) -> Device:
    """Return the device of this name; raise ConfigError if there is none."""
    if name == "cpu":
        return CPU
    if find_extension("device", str(name)) is None:
        hint = "; choose the GPU by device_map" if str(name).startswith("cuda:") else ""
        choices = ", ".join(["cpu", *list_extensions("device")])
        raise ConfigError(f"unknown device {name!r}: choose one of {choices}{hint}")
    found: Device = load_extension("device", name)
    return found


def get_device_of_array(array: Any) -> Device:
    """Return the device of an array, or the CPU for any other value."""
    kind = type(array)
    return CPU if kind is np.ndarray else _find_device_of_module(kind.__module__)


def get_device_of_namespace(xp: Any) -> Device:
    """Return the device whose arrays have this namespace."""
    return CPU if xp is np else _find_device_of_module(xp.__name__)


@cache
def _find_device_of_module(name: str) -> Device:
    if name.partition(".")[0] in ("builtins", "numpy"):
        return CPU
    known = [one for one in list_extensions("array") if f"{name}.".startswith(f"{one}.")]
    found: Device = load_extension("array", known[0]) if known else CPU
    return found


def as_unmasked_array(value: Any) -> np.ndarray:
    """Return `np.asarray(value)`. Raise DataError if that would turn masked elements, such as netCDF4's fill values,
    into numbers."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray) and (count := int(np.ma.getmaskarray(value).sum())):
        raise DataError(f"{count:,} of {value.size:,} elements are masked: give them values, as x.filled(0.0) does")
    return np.asarray(value)
