"""The device of shape-only arrays. It computes nothing, but counts what other devices would compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fsdpx.core.array import shapes
from fsdpx.core.array.devices import Device, DeviceMap
from fsdpx.core.array.shapes.flop_counter import record_traffic

__all__ = ["SHAPES"]


class ShapeDevice(Device):
    """The device of shape-only arrays, which have no values. Methods that would check values (for example, whether they
    are finite) return the result for valid values."""

    name, holds_data = "shape", False

    @property
    def xp(self) -> Any:
        return shapes

    def require_valid_map(self, device_map: DeviceMap) -> None:
        """Accept any device map, because shape-only arrays may stand for arrays on any device."""

    def as_array(self, value: Any) -> Any:
        return value

    def to_host(self, array: Any) -> np.ndarray:
        return np.zeros(array.shape, array.dtype)

    def is_zero(self, number: float) -> bool:
        return False

    def is_finite(self, array: Any) -> bool:
        return True

    def are_finite(self, arrays: Sequence[Any]) -> bool:
        record_traffic(*arrays)
        return True

    def try_run_optimizer_kernel(self, name: str, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> bool:
        return True

    def run_shard_update(self, run: Callable[[], None], p: Any, g: Any, slots: Mapping[str, Any]) -> bool:
        record_traffic(
            p, g, *slots.values(), p, *slots.values(), kernel="update"
        )  # an update reads all arrays and writes all except the gradient
        return False


SHAPES = ShapeDevice()
