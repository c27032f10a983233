"""Devices are found by name, by namespace and by array."""

import numpy as np
import pytest

from fsdpx.core.array import get_namespace, namespace_of, shapes
from fsdpx.core.array.devices import CPU, get_device_of_array, get_device_of_namespace, load_device
from fsdpx.core.array.shapes.device import SHAPES


def test_a_device_is_found_by_name_namespace_and_array() -> None:
    for device, name, xp, array in ((CPU, "cpu", np, np.zeros(2)), (SHAPES, "shape", shapes, shapes.zeros(2))):
        assert load_device(name) is get_device_of_namespace(xp) is get_device_of_array(array) is device
        assert get_namespace(name) is namespace_of(array) is xp


@pytest.mark.parametrize("value", [None, 1.0, [1.0], np.float32(1), np.ma.zeros(2), np.zeros(2).view(np.recarray)])
def test_what_is_of_no_other_device_is_of_the_processor(value: object) -> None:
    assert get_device_of_array(value) is CPU


def test_what_depends_on_values_goes_well_without_them() -> None:
    arrays = [shapes.empty(3), shapes.empty(4)]
    assert SHAPES.are_finite(arrays)
    assert SHAPES.is_finite(arrays[0])
    assert not SHAPES.is_zero(0.0)
    assert CPU.are_finite([np.ones(3)])
    assert not CPU.are_finite([np.ones(3), np.full(2, np.inf)])
    assert not CPU.are_finite([np.full(3, 1e30, np.float32)])  # squares overflow: look at each element
    assert CPU.is_finite(np.full(3, 1e30, np.float32))
