"""What codecs that lose something promise: nothing is lost for good, or everything is right in the mean."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from turns import arrived, steps

from fsdpx import Int8, PowerSGD, TopK
from fsdpx.core.array import kernels
from fsdpx.core.array.random import NumberRange
from fsdpx.core.compression import Codec
from fsdpx.errors import ConfigError
from fsdpx.ext.compression.implementations import BLOCK_ELEMENTS
from fsdpx.ext.compression.int8 import dequantize_into, quantize
from fsdpx.ext.compression.topk import count_chosen_elements, scatter_largest_into, select_largest_magnitudes_of_blocks

FEEDBACK: dict[str, Callable[[], Codec]] = {
    "int8": Int8,
    "topk": lambda: TopK(0.05, warmup=2),
    "topk in blocks": lambda: TopK(0.05, warmup=2, block=100),
    "powersgd": lambda: PowerSGD(2).for_shapes([(37, 21)]),
    "powersgd with vectors": lambda: PowerSGD(2).for_shapes([(6,), (3, 256), (3,)]),
}
each = pytest.mark.parametrize("name", FEEDBACK)
sizes = pytest.mark.parametrize("size", [1, 2, 3, 5])
N = 777


def gradient(rank: int, step: int, n: int = N, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([n, rank, step]).standard_normal(n).astype(dtype)


@each
@sizes
@pytest.mark.parametrize("together", [False, True])
def test_what_arrived_and_what_is_kept_is_what_was_given(name: str, size: int, together: bool) -> None:
    """After each number of steps: sent + memory = accumulated, up to the rounding of float32 sums."""
    count = 6
    found = steps(FEEDBACK[name](), size, count, together, gradient)
    sent = sum(arrived(found, step, together) for step in range(count))
    kept = sum(memory["error"].astype(np.float64) for _, memory in found)
    given = sum(gradient(rank, step).astype(np.float64) for rank in range(size) for step in range(count))
    np.testing.assert_allclose(sent + kept, given, atol=2e-5 * size)
    assert np.abs(sent - given).max() > 1e-4  # it does lose something


@pytest.mark.parametrize("together", [False, True])
def test_each_number_is_right_in_the_mean(together: bool) -> None:
    count, size = 400, 2
    found = steps(Int8(unbiased=True), size, count, together, lambda rank, step: gradient(rank, 0))
    assert all("error" not in memory for _, memory in found)
    seen = np.array([arrived(found, step, together) for step in range(count)])
    given = sum(gradient(rank, 0).astype(np.float64) for rank in range(size))
    deviation = seen.std(0) / count**0.5
    assert np.median(deviation) > 0
    assert np.abs((seen.mean(0) - given) / (deviation + 1e-6)).max() < 6
    assert np.abs((seen.mean(0) - given).mean()) < 5 * np.sqrt((deviation**2).mean() / N)


@sizes
def test_whole_levels_arrive_exactly(size: int) -> None:
    """The limiting case of int8: numbers that are levels lose nothing, and nothing is kept."""

    def whole(rank: int, step: int) -> np.ndarray:
        grad = np.random.default_rng([rank, step]).integers(-127, 128, N).astype(np.float32)
        grad[::2] = 127  # the largest of every block
        return grad

    found = steps(Int8(), size, 3, False, whole)
    for step in range(3):
        np.testing.assert_array_equal(arrived(found, step, False), sum(whole(rank, step) for rank in range(size)))
    assert not any(memory["error"].any() for _, memory in found)


def test_the_first_of_equals_travel() -> None:
    ones = np.where(np.arange(N) % 2, 1, -1).astype(np.float32)
    ((outs, _),) = steps(TopK(0.01), 1, 1, False, lambda rank, step: ones.copy())
    np.testing.assert_array_equal(np.flatnonzero(outs[0]), range(8))


def test_a_warm_up_ends_at_the_fraction() -> None:
    codec = TopK(0.001, warmup=5)
    shares = [codec.packed_bytes(1_000_000, turn) / 8e6 for turn in range(7)]
    np.testing.assert_allclose(shares, [*(0.25 * 0.004 ** (t / 5) for t in range(5)), 0.001, 0.001], rtol=1e-3)
    found = steps(TopK(0.01, warmup=3), 1, 5, False, gradient)
    assert [np.count_nonzero(out) for out in found[0][0]] == [195, 67, 23, 8, 8]


@pytest.mark.parametrize("name", [*FEEDBACK, "unbiased"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("together", [False, True])
def test_what_is_no_number_arrives_and_is_not_kept(name: str, bad: float, together: bool) -> None:
    def spoilt(rank: int, step: int) -> np.ndarray:
        grad = gradient(rank, step)
        grad[5] = bad if (rank, step) == (1, 0) else grad[5]
        return grad

    codec = Int8(unbiased=True) if name == "unbiased" else FEEDBACK[name]()
    found = steps(codec, 2, 2, together, spoilt)
    assert not np.isfinite(arrived(found, 0, together)).all()
    assert np.isfinite(arrived(found, 1, together)).all()
    assert all(np.isfinite(array).all() for _, memory in found for array in memory.values())


@each
def test_zeros_stay_zeros(name: str) -> None:
    found = steps(FEEDBACK[name](), 2, 3, True, lambda rank, step: np.zeros(N, np.float32))
    assert not np.any([arrived(found, step, True) for step in range(3)])


@each
@pytest.mark.parametrize("dtype", ["int32", "float16", "uint8"])
def test_other_numbers_are_refused(name: str, dtype: str) -> None:
    codec = FEEDBACK[name]()
    words = f"codec {type(codec).__name__} carries gradients of float32 or float64, not {dtype}"
    with pytest.raises(ConfigError, match=f"^g: {words}"):
        steps(codec, 2, 1, True, lambda rank, step: np.ones(N, dtype))
    with pytest.raises(ConfigError, match=f"^{words}"):
        codec.check(dtype)


def test_bytes_of_few_elements() -> None:
    assert [TopK(0.01).packed_bytes(n) for n in (0, 1, 100, 101)] == [0, 8, 8, 16]
    assert [Int8().packed_bytes(n) for n in (0, 1, 4, 5, 256, 257, 1024)] == [0, 8, 8, 16, 264, 272, 1040]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "share"), [(1, 0.1), (300, 0.1), (1000, 0.01), (1024, 1.0), (2500, 0.3)])
@pytest.mark.parametrize("block", [256, None])
def test_both_forms_of_the_largest_in_blocks_give_the_same_bits(dtype, n, share, block, monkeypatch) -> None:
    """Equals are among them, many zeros, and in the last block what is no number. None: one block is all."""
    monkeypatch.setattr("fsdpx.ext.compression.compiled.MIN_PARTITION_ELEMENTS", 256)
    block = block or n
    x = np.round(spread(n, dtype), 1)
    x[-1:], x[n // 2 : n // 2 + 1] = np.nan, np.inf
    found = []
    for way in ("plain", "numba"):
        k = sum(count_chosen_elements(n, block, share))
        values, places, lost = np.zeros(k, np.float32), np.zeros(k, np.uint16), np.zeros(n, dtype)
        with kernels.use_mode(way):
            select_largest_magnitudes_of_blocks(np, x, block, share, values, places, lost)
            again = lost.copy()
            scatter_largest_into(np, values, places, block, share, again, True)
        assert np.isfinite(lost).all()
        good = np.isfinite(again)
        np.testing.assert_array_equal(again[good], x[good])
        found.append([values.tobytes(), places.tobytes(), lost.tobytes(), again.tobytes()])
    assert found[0] == found[1]


def test_the_largest_of_each_block_travel() -> None:
    codec, x = TopK(0.01, block=100), np.arange(250, dtype=np.float32)
    wire, lost, out = np.zeros(codec.packed_bytes(250), np.uint8), np.empty_like(x), np.empty_like(x)
    assert wire.size == 24  # of three, 6 bytes each, made up to a multiple of 8
    codec.pack_part(np, x, wire, lost, 0, NumberRange(0, "", 0, 250))
    codec.unpack_part(np, wire, out, False, 0)
    assert np.flatnonzero(out).tolist() == [99, 199, 249]
    np.testing.assert_array_equal(out + lost, x)


def spread(n: int, dtype: Any) -> np.ndarray:
    """Numbers of many sizes, zeros, and from 700 on some that are none."""
    x = gradient(0, n, n, dtype) * 10.0 ** np.random.default_rng(n).integers(-6, 6, n).astype(dtype)
    x[: n // 3] = 0
    x[n // 2 :: 700] = np.nan
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 255, 256, 257, 3000])
@pytest.mark.parametrize("by_chance", [False, True])
def test_both_forms_of_quantise_give_the_same_bits(dtype: str, n: int, by_chance: bool) -> None:
    x = spread(n, dtype)
    forms = []
    for mode in ("plain", "numba"):
        q, scales, lost = np.empty(n, np.int8), np.empty(-(-n // BLOCK_ELEMENTS), np.float32), np.empty_like(x)
        out = np.arange(n, dtype=dtype)
        with kernels.use_mode(mode):
            quantize(np, x, q, scales, lost, NumberRange(3, "a", 0, n) if by_chance else None)
            dequantize_into(np, q, scales, out, True)
        parts = (q, np.isnan(scales), scales[~np.isnan(scales)], lost, np.isnan(out), out[np.isfinite(out)])
        forms.append([array.tobytes() for array in parts])
    assert forms[0] == forms[1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_levels_are_the_nearest(mode: str, dtype: str) -> None:
    x = gradient(0, 1, 5000, dtype)
    q, scales, lost, out = np.empty(5000, np.int8), np.empty(20, np.float32), np.empty_like(x), np.empty_like(x)
    quantize(np, x, q, scales, lost, None)
    dequantize_into(np, q, scales, out, False)
    largest = np.array([np.abs(x[a : a + BLOCK_ELEMENTS]).max() for a in range(0, 5000, BLOCK_ELEMENTS)])
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    each = np.repeat(scales, BLOCK_ELEMENTS)[:5000]
    assert np.all(np.abs(x - out) <= each * 0.5001)
    np.testing.assert_allclose(lost, x - out, atol=1e-7)


@pytest.mark.parametrize("value", [1e-45, 1e-39, 3e38, 1e-30])
def test_the_ends_of_float32(mode: str, value: float) -> None:
    x = np.full(3, value, np.float32)
    q, scales, lost, out = np.empty(3, np.int8), np.empty(1, np.float32), np.empty_like(x), np.empty_like(x)
    quantize(np, x, q, scales, lost, None)
    dequantize_into(np, q, scales, out, False)
    np.testing.assert_allclose(out + lost, x, rtol=1e-6)
