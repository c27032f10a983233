"""Convolutions whose windows are read where they lie, against sums over places: offsets, strides, threads."""

import itertools
from typing import Any

import numpy as np
import pytest
from amount import few
from test_window_kernels import demand_same_bits

from fsdpx.core.array import parse_dtype
from fsdpx.core.array.kernels import use_mode
from fsdpx.ext.fields import kernels as windows
from fsdpx.ext.fields.kernels import WindowStrides
from fsdpx.ext.fields.kernels.compiled import direct

TOLERANCE = {"float64": 1e-13, "float32": 1e-5}
CELLS, SIZES = (7, 5, 14), (4, 3, 13)


def noise(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def all_of(dtype: str, strides: WindowStrides, inner: int, outer: int) -> list[np.ndarray]:
    """Forward, into fresh memory and added to what is there, and the gradients."""
    dims, groups = len(strides.kernel), strides.groups
    x, dy = (
        np.moveaxis(noise(dtype, 2, *sizes[3 - dims :], many), -1, 1)
        for sizes, many in ((CELLS, inner), (SIZES, outer))
    )
    weight, bias, sizes = noise(dtype, outer, inner // groups, *strides.kernel), noise(dtype, outer), dy.shape[2:]
    y = windows.correlate(np, x, weight, bias, strides, sizes)
    more = windows.correlate(np, x, weight, None, strides, sizes, np.moveaxis(noise(dtype, 2, *sizes, outer), -1, 1))
    dx = windows.correlate_backward_input(np, weight, dy, strides, x.shape, noise(dtype, inner))
    dweight, dbias = np.ones_like(weight), np.ones_like(bias)
    windows.correlate_backward_params(np, x, dy, strides, (dweight, True), (dbias, False))
    return [y, more, dx, dweight, dbias]


def compare_forms(dtype: str, strides: WindowStrides, inner: int, outer: int) -> None:
    """The compiled kernels give what the plain ones do."""
    with use_mode("plain"):
        want = all_of(dtype, strides, inner, outer)
    with use_mode("numba"):
        got = all_of(dtype, strides, inner, outer)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        most = max(float(np.max(np.abs(other))), 1.0)
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE[dtype] * most, err_msg=str(strides))


CHANNELS = ((3, 5), (8, 16), (4, 20))
FEW = ((8, 1), (2, 8), (16, 3), (16, 4), (8, 19))
"""Few outputs, or few channels of the gradient: the lanes are those of the other side."""


@pytest.mark.parametrize("dtype", few(TOLERANCE, 2))
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_strips_equal_sums_over_places(dims: int, dtype: str) -> None:
    """Each format has half of the cases, in which each three of their numbers meet."""
    for (inner, outer), k, s, d, first in itertools.chain(
        itertools.product(CHANNELS if dims < 3 else ((4, 12),), (1, 2, 3), (1, 2, 3), (1, 2), (-3, -1, 0, 2)),
        itertools.product(FEW, (2, 3), (1, 2), (1,), (-1, 2)),
    ):
        if (inner // 4 + k + s + d + first) % 2 == (dtype == "float32"):
            continue
        strides = WindowStrides((k,) * dims, (s,) * dims, (d,) * dims, (first,) * dims, 2 if inner == 4 else 1)
        compare_forms(dtype, strides, inner, outer)


@pytest.mark.parametrize("dtype", few(TOLERANCE, 2))
@pytest.mark.parametrize(("k", "d"), [(2, 1), (3, 1), (3, 2), (5, 1), (7, 1)])
def test_depthwise_strips_equal_sums_over_places(k: int, d: int, dtype: str) -> None:
    for dims, channels in ((1, 16), (2, 24), (3, 16)):
        first = (-(k // 2) * d,) * dims
        strides = WindowStrides((k,) * dims, (1,) * dims, (d,) * dims, first, channels)
        compare_forms(dtype, strides, channels, channels)


def test_bits_of_strips_do_not_depend_on_the_number_of_threads() -> None:
    strides = WindowStrides((3, 3, 3), (1, 1, 1), (1, 1, 1), (-1, -1, -1), 1)
    demand_same_bits((1, 2, 5), lambda: [a for n in (24, 3) for a in all_of("float32", strides, 8, n)])


def test_outputs_without_a_cell_are_the_bias_or_left_alone() -> None:
    strides = WindowStrides((2,), (1,), (1,), (50,), 1)
    x, weight = np.ones((1, 4, 3)), np.ones((2, 3, 2))
    y: Any = np.full((1, 5, 2), 7.0)
    direct.convolve_direct(x, weight, None, strides, y, True)
    assert (y == 7.0).all()
    direct.convolve_direct(x, weight, np.array([1.0, 2.0]), strides, y, False)
    assert (y == [1.0, 2.0]).all()


@pytest.mark.parametrize("wanted", ["float64", "bf16", "first"])
def test_what_is_added_to_may_be_of_another_format_or_order(wanted: str) -> None:
    strides, x = WindowStrides((3,), (1,), (1,), (-1,), 1), np.ones((1, 8, 16), np.float32)
    weight, dtype = np.ones((8, 8, 3), np.float32), parse_dtype("float32" if wanted == "first" else wanted)
    memory = np.zeros((3, 8, 16), dtype)  # what lies around must stay as it is
    out = memory[1:2] if wanted == "first" else memory.reshape(3, 16, 8)[1:2].transpose(0, 2, 1)
    assert windows.correlate(np, x, weight, None, strides, (16,), out) is out
    assert (np.asarray(out, np.float32)[:, :, 1:-1] == 24.0).all()
    assert not memory[::2].astype(np.float32).any()
