"""Matrices in 4 bits against a form of their own: loops over blocks, as the paper says it."""

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import shapes
from fsdpx.array import blas
from fsdpx.array.namespace import dtype
from fsdpx.array.nf4 import LEVELS, NF4
from fsdpx.array.packed import Packed
from fsdpx.layout.packed import PackedRows
from fsdpx.nn import numeric

SINGLE, BF16 = np.dtype("f4"), dtype("bf16")
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
SHAPES = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 63, 64, 65, 130, 400]))


def stored(values: np.ndarray, of: np.dtype = SINGLE) -> Packed:
    packing = NF4(of)
    flat = np.full(packing.nbytes(values.shape), 77, np.uint8)
    rows = PackedRows("w", flat.reshape(len(values), -1), values.shape[1], packing)
    rows[...] = values.reshape(-1)
    return Packed(flat, values.shape, packing)


def normal(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Rows of very different size, with an outlier and a block of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, (shape[0], 1))
    values[0, rng.integers(shape[1])] *= 300
    values[-1, :64] = 0
    return values.astype("f4")


def by_hand(row: np.ndarray) -> np.ndarray:
    """What a row is stored as: block by block, one element after the other, in Python's numbers."""
    blocks = [row[i : i + 64].astype("f8") for i in range(0, len(row), 64)]
    found: list[float] = []
    for first in range(0, len(blocks), 256):
        group = blocks[first : first + 256]
        tops = [max(abs(float(w)) for w in block) for block in group]
        step = 2.0**-120
        while step * 255 < max(tops) - min(tops) or step * 2**24 < max(tops):
            step *= 2
        offset = min(tops) // step * step
        for block, top in zip(group, tops, strict=True):
            scale = offset + (top - offset) // step * step
            for w in block:
                near = min(PUBLISHED, key=lambda level: abs(level - w / scale)) if scale else 0.0
                found.append(float(np.float32(near) * np.float32(scale)))
    return np.array(found, "f4")


@settings(max_examples=examples(40), deadline=None)
@given(SHAPES, st.integers(0, 999))
def test_what_is_stored_is_the_definition_and_once_more_the_same(shape: tuple[int, int], seed: int) -> None:
    values = normal(shape, seed)
    matrix = stored(values)
    got = matrix.dense()
    np.testing.assert_array_equal(got, np.stack([by_hand(row) for row in values]))
    np.testing.assert_array_equal(stored(got).dense(), got)


@settings(max_examples=examples(40), deadline=None)
@given(SHAPES, st.integers(0, 999))
def test_an_element_is_half_a_gap_and_a_step_away_at_most(shape: tuple[int, int], seed: int) -> None:
    """The widest gap is that between -1 and the level above it; a scale is less than a step below the largest."""
    values = normal(shape, seed).astype("f8")
    groups = np.array([np.abs(values[:, i : i + 64]).max(axis=1) for i in range(0, shape[1], 64)]).T
    high, low = groups.max(axis=1, keepdims=True), groups.min(axis=1, keepdims=True)
    step = np.maximum(2 * (high - low) / 255, high * 2.0**-23) + 2.0**-120
    top = groups[:, np.arange(shape[1]) // 64]
    gap = max(np.diff(PUBLISHED)) / 2
    assert np.all(np.abs(stored(values.astype("f4")).dense() - values) <= top * gap * (1 + 1e-6) + step)


def test_levels_are_those_of_the_paper_and_stored_exactly() -> None:
    np.testing.assert_array_equal(LEVELS, np.array(PUBLISHED, "f4"))
    rng = np.random.default_rng(0)
    values = LEVELS[rng.integers(0, 16, (4, 5, 64))]
    values[:, :, 7] = -1
    values *= rng.integers(1, 200, (4, 5, 1)).astype("f4") / 1024
    values = values.reshape(4, -1)
    np.testing.assert_array_equal(stored(values).dense(), values)


def test_a_row_takes_half_a_byte_for_each_element_and_its_scales() -> None:
    """A byte for each 64 elements, 8 for each 256 of those."""
    packing = NF4(SINGLE)
    assert packing.nbytes((10, 4096)) == 10 * (2048 + 64 + 8)
    assert packing.nbytes((10, 64 * 300)) == 10 * (32 * 300 + 300 + 2 * 8)
    assert packing.nbytes((1, 65)) == 36 + 8


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("of", [SINGLE, BF16], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 65, 3), (9, 64, 5), (40, 131, 7)])
def test_products_are_those_of_what_is_stored(
    m: int, k: int, n: int, of: np.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x, dy, bias = (rng.standard_normal(shape).astype("f4").astype(of) for shape in ((m, k), (m, n), (n,)))
    weight = stored(rng.standard_normal((n, k)).astype("f4"), of)
    exact = weight.dense().astype("f8")
    if not compiled:
        monkeypatch.setattr(blas.packed, "installed", lambda: False)
    y, dx = numeric.affine(np, x, weight, bias), numeric.product(np, dy, weight)
    assert y.dtype == dx.dtype == of
    size = 0 if of is SINGLE else 2.0**-7
    for got, left, right, shift in ((y, x, exact.T, bias.astype("f8")), (dx, dy, exact, 0.0)):
        want, terms = left.astype("f8") @ right, np.abs(left.astype("f8")) @ np.abs(right) + np.abs(shift)
        assert np.all(np.abs(got.astype("f8") - want - shift) <= ((k + n) * 2.0**-23 + 2 * size) * terms)


def test_rows_are_looked_up_and_shapes_are_known() -> None:
    matrix = stored(normal((7, 70), 3), BF16)
    index = np.array([[3, 0], [6, 6]])
    np.testing.assert_array_equal(matrix[index], matrix.dense(BF16)[index])
    packing = NF4(SINGLE)
    weight = Packed(shapes.empty(packing.nbytes((5, 70)), np.uint8), (5, 70), packing)
    assert numeric.affine(shapes, shapes.empty((3, 70), np.float32), weight, None).shape == (3, 5)
    assert numeric.product(shapes, shapes.empty((3, 5), np.float32), weight).shape == (3, 70)
    assert weight[np.zeros((2, 3), np.int64)].shape == (2, 3, 70)
