"""Compiled kernels of images against the plain ones: every way a convolution can go, both orders in memory, threads."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from amount import few

from fsdpx.core.array import blas, kernels, parallel
from fsdpx.core.array.kernels import use_mode
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.ext.fields import kernels as windows
from fsdpx.ext.fields.kernels import WindowStrides
from fsdpx.ext.fields.kernels.compiled import convolution
from fsdpx.ext.fields.kernels.group_norm import has_rows_of_channels

WINDOWS = [
    ((3, 3), (1, 1), (1, 1)),  # Winograd's way where channels allow it
    ((3, 3), (1, 1), (0, 0)),
    ((3, 3), (1, 1), (2, 2)),
    ((3, 3), (1, 1), (1, 0)),
    ((3, 3), (2, 2), (1, 1)),
    ((1, 1), (1, 1), (0, 0)),
    ((1, 1), (2, 2), (0, 0)),
    ((2, 5), (1, 3), (1, 2)),
]
SHAPES = [
    (4, 16, 12, 12, 32), (3, 16, 7, 19, 16), (2, 3, 8, 8, 5), (0, 16, 8, 8, 16), (1, 32, 4, 4, 16), (2, 80, 4, 3, 64),
]  # fmt: skip
TOLERANCE = {"float32": 6e-6, "float64": 1e-13}


def far(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.max(np.abs(got - want), initial=0.0)) / max(float(np.max(np.abs(want), initial=0.0)), 1.0)


def sliding(kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> WindowStrides:
    return WindowStrides(kernel, stride, (1,) * len(kernel), tuple(-p for p in padding), 1)


def sizes(x: np.ndarray, window: WindowStrides) -> tuple[int, ...]:
    """Of the result, with as much padding behind as before."""
    rows = zip(x.shape[2:], window.kernel, window.stride, window.first, strict=True)
    return tuple((n - 2 * first - k) // s + 1 for n, k, s, first in rows)


def all_of(x: Any, weight: Any, bias: Any, dy: Any, window: WindowStrides) -> list[np.ndarray]:
    """Forward and all gradients; those of parameters are added to ones."""
    dweight, dbias = np.ones_like(weight), np.ones_like(bias)
    y = windows.correlate(np, x, weight, bias, window, sizes(x, window))
    dx = windows.correlate_backward_input(np, weight, dy, window, x.shape)
    windows.correlate_backward_params(np, x, dy, window, (dweight, True), (dbias, True))
    return [y, dx, dweight, dbias]


def setting(dtype: str, shape: tuple[int, ...], window: WindowStrides) -> tuple[np.ndarray, ...]:
    rng, (n, inner, *cells, outer) = np.random.default_rng(0), shape
    x, weight = rng.normal(size=(n, inner, *cells)), rng.normal(size=(outer, inner, *window.kernel))
    dy = rng.normal(size=(n, outer, *sizes(x, window)))
    scale = 1.0 / np.sqrt(inner * np.prod(window.kernel))
    return tuple(a.astype(dtype) for a in (x, weight * scale, rng.normal(size=outer), dy))


def demand_like_plain(arrays: tuple[np.ndarray, ...], window: WindowStrides, tolerance: float) -> None:
    """Compiled kernels give what the plain ones do in float64."""
    with use_mode("plain"):
        want = all_of(*(a.astype(np.float64) for a in arrays), window)
    with use_mode("numba"):
        got = all_of(*arrays, window)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == arrays[0].dtype
        assert far(one, other) < tolerance


@pytest.mark.parametrize("dtype", few(TOLERANCE, 2))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [sliding(*w) for w in WINDOWS], ids=str)
def test_convolutions_equal_the_plain_ones(window: WindowStrides, shape: tuple[int, ...], dtype: str) -> None:
    demand_like_plain(setting(dtype, shape, window), window, TOLERANCE[dtype])


CUBES = [
    ((3, 3, 3), (1, 1, 1)), ((3, 3, 3), (0, 2, 2)), ((1, 3, 3), (0, 1, 1)), ((1, 3, 3), (1, 0, 0)),
    ((5, 3, 3), (1, 1, 1)), ((2, 3, 3), (1, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", few(TOLERANCE, 2))
@pytest.mark.parametrize(
    "shape", [(2, 16, 5, 12, 18, 32), (1, 32, 9, 9, 19, 16), (3, 16, 2, 8, 16, 16), (0, 16, 4, 12, 12, 16)], ids=str
)
@pytest.mark.parametrize("kernel", CUBES, ids=str)
def test_convolutions_of_three_dims_equal_the_plain_ones(kernel: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Winograd's way along the last two dims, and sums along the first, also where windows are deeper than fields."""
    window = sliding(kernel[0], (1, 1, 1), kernel[1])
    if window.kernel[0] > shape[2] + 2 * kernel[1][0]:
        return
    x, weight, *others = setting(dtype, shape, window)
    assert not len(x) or convolution.suits_winograd(x.shape, weight.shape, window, sizes(x, window))
    demand_like_plain((x, weight, *others), window, 2 * TOLERANCE[dtype])


def test_winograd_is_taken_where_it_pays() -> None:
    def suits(shape: tuple[int, ...], weight: tuple[int, ...], stride: int = 1, first: int = -1) -> bool:
        strides = WindowStrides((3, 3), (stride,) * 2, (1, 1), (first,) * 2, 1)
        return convolution.suits_winograd(shape, weight, strides, tuple(n // stride for n in shape[2:]))

    assert suits((2, 16, 32, 32), (16, 16, 3, 3))
    assert suits((8, 16, 7, 7), (32, 16, 3, 3))
    assert not suits((2, 3, 32, 32), (16, 3, 3, 3))  # channels
    assert not suits((2, 16, 5, 5), (16, 16, 3, 3))  # most of its tiles would be empty
    assert not suits((1, 512, 8, 16), (512, 512, 3, 3))  # few tiles for many weights
    assert not suits((2, 16, 32, 32), (16, 16, 3, 3), stride=2)
    assert not suits((2, 16, 32, 32), (16, 16, 3, 3), first=0)  # cells at one side only
    cube, cells = sliding((3, 3, 3), (1, 1, 1), (1, 1, 1)), (8, 16, 16)
    assert convolution.suits_winograd((1, 16, *cells), (16, 16, 3, 3, 3), cube, cells)
    assert not convolution.suits_winograd((1, 16, *cells), (16, 16, 3, 3, 3), cube._replace(stride=(2, 1, 1)), cells)
    assert not convolution.suits_winograd((1, 16, *cells), (16, 16, 3, 3, 3), cube._replace(dilation=(2, 1, 1)), cells)
    assert not convolution.suits_winograd((1, 16, 16, 4, 2), (16, 16, 3, 3, 3), cube, (16, 4, 2))  # empty tiles


def test_errors_of_winograd_in_float32_are_within_what_the_documentation_says() -> None:
    window = sliding((3, 3), (1, 1), (1, 1))
    for inner in (64, 512):
        demand_like_plain(setting("float32", (8, inner, 8, 8, 64), window), window, 8e-6)


def turned(x: np.ndarray) -> np.ndarray:
    """The same numbers with the channels last in memory."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("window", [sliding(*w) for w in WINDOWS[:1] + WINDOWS[4:6]], ids=str)
def test_bits_do_not_depend_on_the_order_in_memory(window: WindowStrides) -> None:
    x, weight, bias, dy = setting("float32", SHAPES[0], window)
    want = all_of(x, weight, bias, dy, window)
    for given in ((turned(x), dy), (x, turned(dy)), (turned(x), turned(dy))):
        for a, b in zip(all_of(given[0], weight, bias, given[1], window), want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [2, 4])
def test_small_groups_have_the_bits_of_a_convolution_without_groups(size: int, monkeypatch: Any) -> None:
    """Its weights between groups are 0, so only values that are not finite differ: these stay in their group."""
    window = sliding((3, 3), (1, 1), (1, 1))._replace(groups=32 // size)
    x, _, bias, dy = setting("float32", (2, 32, 7, 19, 32), window._replace(groups=1))
    weight = np.random.default_rng(7).normal(size=(32, size, 3, 3)).astype(np.float32)
    found = all_of(x, weight, bias, dy, window)
    with monkeypatch.context() as patch:
        patch.setattr(convolution, "_has_small_groups", lambda *_: False)
        for a, b in zip(found, all_of(x, weight, bias, dy, window), strict=True):
            np.testing.assert_array_equal(a, b)
    x[:, size] = np.inf
    y = windows.correlate(np, x, weight, bias, window, sizes(x, window))
    np.testing.assert_array_equal(np.delete(y, range(size, 2 * size), 1), np.delete(found[0], range(size, 2 * size), 1))


@pytest.mark.parametrize("shape", [(9, 16, 32, 32, 32), (4, 64, 16, 16, 64), (3, 32, 7, 20, 24, 16)], ids=str)
def test_bits_of_winograd_do_not_depend_on_the_number_of_threads(shape: tuple[int, ...]) -> None:
    dims = len(shape) - 3
    window = sliding((3,) * dims, (1,) * dims, (1,) * dims)
    arrays = setting("float32", shape, window)
    demand_same_bits((1, 2, 3), lambda: all_of(*arrays, window))


def demand_same_bits(numbers: Sequence[int], call: Callable[[], list[np.ndarray]]) -> None:
    """Results on each number of threads are those on the first one."""
    before, found = parallel.get_threads(), []
    try:
        for threads in numbers:
            parallel.set_threads(threads)
            blas.set_product_threads(1)
            found.append([a.tobytes() for a in call()])
    finally:
        parallel.set_threads(before)
    for other in found[1:]:
        assert [a == b for a, b in zip(other, found[0], strict=True)] == [True] * len(other)


@pytest.mark.parametrize("shape", [(1, 40, 9, 5), (2, 6, 5, 7), (5, 8, 12, 4)], ids=str)
def test_bits_of_group_norm_do_not_depend_on_the_number_of_threads(shape: tuple[int, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(parallel, "MIN_PARALLEL_SIZE", 1)
    monkeypatch.setattr(parallel, "MIN_PIECE_ELEMENTS", 1)
    x, dy = np.random.default_rng(6).normal(size=(2, *shape)).astype(np.float32) + 1
    weight = x[0, :, 0, 0].copy()
    demand_same_bits((1, 2, 4), lambda: group_norm(x, dy, weight, weight, 2))


def group_norm(x: Any, dy: Any, weight: Any, bias: Any, groups: int) -> list[np.ndarray]:
    """Forward and backward."""
    y, mean, rstd = windows.group_norm(np, x, weight, bias, groups, 1e-5)
    return [y, mean, rstd, *windows.group_norm_backward_input(np, dy, x, mean, rstd, weight, groups)]


@pytest.mark.parametrize("orders", [*itertools.product([np.asarray, turned], repeat=2)])
@pytest.mark.parametrize("shape", [(2, 6, 8, 8), (3, 8, 4, 12), (1, 4, 4, 4), (2, 6, 5, 7), (2, 1, 4, 4)], ids=str)
def test_group_norm_equals_the_plain_one_in_any_order_in_memory(shape: tuple[int, ...], orders: Any) -> None:
    """Channels stay first in memory if their cells fill whole rows."""
    rng = np.random.default_rng(8)
    x, dy = rng.normal(3, 2, size=(2, *shape)).astype(np.float32)
    weight, bias = rng.normal(size=(2, shape[1])).astype(np.float32)
    groups = max(shape[1] // 2, 1)

    found = group_norm(orders[0](x), orders[1](dy), weight, bias, groups)
    with use_mode("plain"):
        want = group_norm(*(a.astype(np.float64) for a in (x, dy, weight, bias)), groups)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    if shape[1] > 1 and has_rows_of_channels(orders[0](x)):
        assert found[0].flags.c_contiguous
        assert found[3].flags.c_contiguous


@pytest.mark.parametrize("order", [np.asarray, turned])
@pytest.mark.parametrize(
    "window",
    [((2, 2), (2, 2), (0, 0), (1, 1)), ((3, 3), (2, 2), (1, 1), (2, 1)), ((3, 2), (1, 2), (1, 1), (1, 3))],
    ids=str,
)
def test_pools_equal_the_plain_ones(window: Any, order: Any) -> None:
    window, rng = sliding(*window[:3])._replace(dilation=window[3]), np.random.default_rng(1)
    x = rng.integers(0, 5, (2, 6, 9, 8)).astype(np.float64)  # equals among them
    x[0, 2, 3, 4] = np.nan
    x[1, 1, :3, :3] = -np.inf
    out = sizes(x, window)
    dy = rng.normal(size=(2, 6, *out))

    def run() -> list[np.ndarray]:
        given, slope = order(x), order(dy)
        y, winner = windows.max_pool(np, given, window, out)
        back = windows.max_pool_backward(np, slope, winner, window, x.shape)
        return [y, winner, back, windows.avg_pool(np, np.nan_to_num(given, neginf=0), window, out, 5),
                windows.avg_pool_backward(np, slope, window, x.shape, 5)]  # fmt: skip

    with use_mode("plain"):
        want = run()
    with use_mode("numba"):
        for a, b in zip(run(), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(70, 5), (6, 5, 7), (6, 32, 5, 7), (0, 4, 3, 3), (2, 3, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", few(["float32", "float64"], 2))
def test_batch_norm_equals_the_plain_one(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, dy = (rng.normal(3, 2, size=shape).astype(dtype) for _ in range(2))
    a, b, c, d = rng.normal(size=(4, shape[1])).astype(dtype)

    def run() -> list[np.ndarray]:
        return [
            kernels.channel_sums(np, x), kernels.channel_squares(np, x, a), kernels.channel_affine(np, x, a, b, c),
            kernels.channel_gradient_sums(np, dy, x, a, b), kernels.channel_norm_backward_input(np, dy, x, a, b, c, d),
        ]  # fmt: skip

    rtol, atol = (1e-12, 1e-12) if dtype == "float64" else (2e-5, 1e-4)
    with use_mode("plain"):
        want = run()
    with use_mode("numba"):
        for one, other in zip(run(), want, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def test_sums_of_images_stay_in_their_order_in_memory() -> None:
    x = turned(np.random.default_rng(3).normal(size=(2, 4, 3, 5)))
    y = kernels.add(np, x, x)
    np.testing.assert_array_equal(y, x + x)
    assert y.strides == x.strides
    mixed = kernels.add(np, x, np.ascontiguousarray(x))
    np.testing.assert_array_equal(mixed, x + x)


@pytest.mark.parametrize("shape", [(2, 35, 9, 15), (3, 70, 4, 5), (1, 3, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_sum_of_fields_in_several_orders_has_the_channels_last(shape: tuple[int, ...], dtype: str) -> None:
    x = np.random.default_rng(4).integers(-9, 9, (shape[0], 2 * shape[1], *shape[2:])).astype(parse_dtype(dtype))
    want = x[:, : shape[1]] + x[:, shape[1] :]
    for a, b in ((x, turned(x)), (turned(x), x), (turned(x), turned(x))):
        y = kernels.add(np, a[:, : shape[1]], b[:, shape[1] :])
        np.testing.assert_array_equal(y, want)
        assert y.strides == turned(want).strides


@pytest.mark.parametrize("dtype", ["float16", "bf16"])
def test_fields_in_16_bits_lie_as_those_in_32_do(dtype: str) -> None:
    """Rounded in one pass, and read by the next layer without a copy in another order."""
    kind, x = parse_dtype(dtype), np.random.default_rng(5).normal(size=(2, 6, 4, 5)).astype(np.float32)
    for wide in (turned(x), turned(x)[:, 1:4], x[..., 0], x):
        half = kernels.cast_float_to_dtype(np, wide, kind)
        np.testing.assert_array_equal(half, wide.astype(kind))
        assert [2 * n for n in half.strides] == [*np.empty_like(wide).strides]
        assert kernels.to_float32(np, half).strides == np.empty_like(wide).strides
    weight = np.ones((16, 6, 3, 3), kind)
    y = windows.correlate(np, x.astype(kind), weight, None, sliding((3, 3), (1, 1), (1, 1)), (4, 5))
    assert y.strides == turned(y).strides


@pytest.mark.parametrize("dtype", ["float32", "bf16", "float16"])
def test_winograd_takes_inf_to_its_tile_and_no_further(dtype):
    """A tile of 4 x 4 results is made of differences of all its pixels."""
    rng, strides = np.random.default_rng(0), WindowStrides((3, 3), (1, 1), (1, 1), (-1, -1), 1)
    x, weight = (rng.normal(size=shape).astype(parse_dtype(dtype)) for shape in ((1, 16, 16, 32), (16, 16, 3, 3)))
    assert convolution.suits_winograd(x.shape, weight.shape, strides, (16, 32))
    clean = windows.correlate(np, x, weight, None, strides, (16, 32))
    x[0, 3, 5, 6] = np.inf
    with np.errstate(invalid="ignore"):
        got = windows.correlate(np, x, weight, None, strides, (16, 32))
    odd = ~np.isfinite(got.astype(np.float32))
    assert odd[:, :, 4:7, 5:8].all()
    odd[:, :, 4:8, 4:8] = True
    assert not odd[:, :, :4].any()
    np.testing.assert_array_equal(got[~odd], clean[~odd])
    assert (~odd).sum() == 16 * (16 * 32 - 4 * 4)


@pytest.mark.parametrize(("depth", "first", "suits"), [(32, -1, True), (1, -1, False), (1, 0, False), (2, -1, True)])
def test_slices_that_windows_hardly_meet_are_convolved_directly(depth: int, first: int, suits: bool) -> None:
    """Winograd algorithms multiply slices outside the field as zeros. Slices of another rank are few: of 32 slices
    of outputs, two or three meet them."""
    strides = WindowStrides((3, 3, 3), (1, 1, 1), (1, 1, 1), (first, -1, -1), 1)
    outputs = 32 if first == 0 else depth
    assert convolution.suits_winograd((1, 32, depth, 32, 32), (32, 32, 3, 3, 3), strides, (outputs, 32, 32)) is suits
