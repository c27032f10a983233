"""Matrices in 8 bits: what is stored is near by the bound of the format, and products are those of what is stored."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import shapes
from fsdpx.array import blas, kernels, parallel
from fsdpx.array.blas import integers, onednn
from fsdpx.array.namespace import dtype
from fsdpx.array.packed import Packed, PackedInt8
from fsdpx.errors import DataError
from fsdpx.layout.packed import PackedRows
from fsdpx.nn import numeric

SINGLE, BF16 = np.dtype("f4"), dtype("bf16")
DIGITS = 2.0**-22
"""What is lost of a row in three digits, as a part of its largest element."""
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 64, 65, 130]))
BLOCKS = st.sampled_from([None, 8, 31, 64])


def stored(values: np.ndarray, block: int | None = None, of: Any = SINGLE) -> Packed:
    packing = PackedInt8(block, of)
    flat = np.full(packing.nbytes(values.shape), 77, np.uint8)
    rows = PackedRows("w", flat.reshape(-1, packing.stride(values.shape[1])), values.shape[1], packing)
    rows[...] = values.reshape(-1)
    return Packed(flat, values.shape, packing)


def each_scale(matrix: Packed) -> np.ndarray:
    """The scale of every element, in float64."""
    block = matrix.packing.block or matrix.shape[1]
    return matrix.scales[:, np.arange(matrix.shape[1]) // block].astype("f8")


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Rows of very different size, one of zeros among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, (shape[0], 1))
    values[rng.integers(shape[0])] = 0
    return values.astype("f4")


@settings(max_examples=examples(100), deadline=None)
@given(SIZES, SIZES, BLOCKS, st.integers(0, 999))
def test_what_is_stored_is_half_a_scale_away_at_most(rows, columns, block, seed) -> None:
    values = normal((rows, columns), seed)
    matrix = stored(values, block)
    scale = each_scale(matrix)
    assert np.all(np.abs(matrix.dense().astype("f8") - values) <= scale / 2)
    top = np.abs(values).max(axis=1, keepdims=True)
    assert np.all(scale <= np.maximum(top / 127.0 * (1 + 2.0**-15), 2.0**-120))
    assert np.abs(matrix.numbers.astype("i4")).max() <= 127
    np.testing.assert_array_equal(matrix.dense(), matrix.numbers * scale)  # without rounding


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from([None, 8]),
)
def test_any_floats_denormal_and_huge_and_once_more_the_same(numbers, block) -> None:
    values = np.array([numbers], "f4")
    matrix = stored(values, block)
    assert np.all(np.isfinite(matrix.dense()))
    assert np.all(np.abs(matrix.dense().astype("f8") - values) <= each_scale(matrix) / 2)
    again = stored(matrix.dense(), block)
    np.testing.assert_array_equal(again.stored, matrix.stored)
    np.testing.assert_array_equal(stored(-values, block).dense(), -matrix.dense())


def test_rows_take_their_numbers_and_scales() -> None:
    assert PackedInt8(None, SINGLE).nbytes((10, 64)) == 10 * (64 + 4)
    assert PackedInt8(None, SINGLE).nbytes((10, 65)) == 10 * (68 + 4)
    assert PackedInt8(16, SINGLE).nbytes((10, 65)) == 10 * (68 + 5 * 4)
    assert stored(np.zeros((3, 5), "f4")).dense().tolist() == np.zeros((3, 5)).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_by_name(bad: float) -> None:
    values = np.ones((4, 6), "f4")
    values[2, 3] = bad
    with pytest.raises(DataError, match=r"w cannot be stored as int8: NaN or Inf among the elements 12 to 17"):
        stored(values)


def test_rows_are_read_and_filled_in_parts() -> None:
    values, packing = normal((6, 5), 0), PackedInt8(None, SINGLE)
    flat = np.zeros(packing.nbytes((6, 5)), np.uint8)
    rows = PackedRows("w", flat.reshape(6, -1), 5, packing)
    assert (rows.size, rows.grain) == (30, 5)
    for start in (0, 10, 20):
        rows[start : start + 10][...] = values.reshape(-1)[start : start + 10]
    np.testing.assert_array_equal(np.asarray(rows), stored(values).dense().reshape(-1))
    np.testing.assert_array_equal(np.asarray(rows[5:15]), stored(values).dense()[1:3].reshape(-1))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("of", [SINGLE, BF16], ids=str)
@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from([1, 2, 3, 8, 9, 33]), SIZES, SIZES, BLOCKS, st.integers(0, 99))
def test_products_are_those_of_what_is_stored(compiled, of, m, k, n, block, seed) -> None:
    """Sums are rounded in float32; in bfloat16 the matrix is, where it is widened to it, and so is the result."""
    rng = np.random.default_rng(seed)
    x, dy, bias = (rng.standard_normal(shape).astype("f4").astype(of) for shape in ((m, k), (m, n), (n,)))
    weight = stored(normal((n, k), seed), block, of)
    exact, size = weight.dense().astype("f8"), 0 if of is SINGLE else 2.0**-8
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(blas.packed, "installed", lambda: False)
        y, dx = numeric.affine(np, x, weight, bias), numeric.product(np, dy, weight)
    assert y.dtype == dx.dtype == of
    for got, left, right, shift in ((y, x, exact.T, bias.astype("f8")), (dx, dy, exact, 0.0)):
        want, terms = left.astype("f8") @ right, np.abs(left.astype("f8")) @ np.abs(right) + np.abs(shift)
        bound = (right.shape[0] + 4) * 2.0**-23 * terms + size * (2 * terms + np.abs(want + shift))
        bound += DIGITS * np.abs(left.astype("f8")).max(axis=1, keepdims=True) * np.abs(right).sum(axis=0)
        assert np.all(np.abs(got.astype("f8") - want - shift) <= bound)


def test_products_are_within_half_a_scale_of_the_matrix_that_was_given() -> None:
    x, weight = np.random.default_rng(0).standard_normal((40, 200)).astype("f4"), normal((30, 200), 1)
    matrix = stored(weight)
    want = x.astype("f8") @ weight.T.astype("f8")
    bound = np.abs(x).sum(axis=1, dtype="f8")[:, None] * matrix.scales[:, 0].astype("f8") / 2
    noise = 204 * 2.0**-23 * (np.abs(x) @ np.abs(matrix.dense()).T)
    noise += DIGITS * np.abs(x).max(axis=1, keepdims=True) * np.abs(matrix.dense()).sum(axis=1)
    for rows in (1, 8, 40):
        y = numeric.affine(np, x[:rows], matrix, None)
        assert np.all(np.abs(y - want[:rows]) <= bound[:rows] + noise[:rows])


def test_no_result_depends_on_the_threads() -> None:
    x, matrix = np.random.default_rng(0).standard_normal((300, 600)).astype("f4"), stored(normal((900, 600), 1))
    alone = [numeric.affine(np, x[:rows], matrix, None) for rows in (4, 300)]
    parallel.set_threads(3)
    try:
        for rows, want in zip((4, 300), alone, strict=True):
            np.testing.assert_array_equal(numeric.affine(np, x[:rows], matrix, None), want)
    finally:
        parallel.set_threads(1)


def test_arrays_are_made_of_it_where_somebody_wants_one() -> None:
    matrix = stored(normal((7, 12), 3), 8, BF16)
    assert (matrix.shape, matrix.size, matrix.ndim, len(matrix), matrix.dtype) == ((7, 12), 84, 2, 7, BF16)
    np.testing.assert_array_equal(np.asarray(matrix), matrix.dense(BF16))
    np.testing.assert_array_equal(matrix.T, matrix.dense(BF16).T)
    index = np.array([[3, 0], [6, 6]])
    np.testing.assert_array_equal(matrix[index], matrix.dense(BF16)[index])


def test_shapes_alone() -> None:
    packing = PackedInt8(8, SINGLE)
    weight = Packed(shapes.empty(packing.nbytes((5, 12)), np.uint8), (5, 12), packing)
    x = shapes.empty((3, 12), np.float32)
    assert numeric.affine(shapes, x, weight, shapes.empty(5, np.float32)).shape == (3, 5)
    assert numeric.product(shapes, shapes.empty((3, 5), np.float32), weight).shape == (3, 12)
    assert weight[np.zeros((2, 3), np.int64)].shape == (2, 3, 12)


def test_nan_in_the_input_goes_where_it_belongs() -> None:
    matrix = stored(np.ones((5, 20), "f4"))
    for rows in (2, 20):
        x = np.ones((rows, 20), "f4")
        x[1, 3] = np.nan
        with kernels.use("default"):
            y = numeric.affine(np, x, matrix, None)
        assert np.isnan(y).any(axis=1).tolist() == [i == 1 for i in range(rows)]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 5), SIZES, st.integers(-130, 120), st.integers(0, 99))
def test_three_digits_are_a_row_but_for_its_last_bits(m, k, power, seed) -> None:
    from fsdpx.array.kernels.compiled.packed import apart

    x = (np.random.default_rng(seed).standard_normal((m, k)) * 2.0**power).astype("f4")
    digits, unit = np.empty((3, m, k), np.int8), np.empty(m, "f4")
    assert apart(x, digits, unit)
    first, second, third = digits.astype("f8")
    top = np.maximum(np.abs(x).max(axis=1, keepdims=True).astype("f8"), 2.0**-100)
    assert np.all(np.abs((first + second / 254 + third / 254**2) * unit[:, None] - x) <= DIGITS * top)
    assert np.abs(digits.astype("i4")).max() <= 127


@pytest.fixture
def anew() -> Iterator[None]:
    integers.library.cache_clear()
    yield
    integers.library.cache_clear()


@pytest.mark.usefixtures("anew")
def test_a_library_that_multiplies_wrongly_is_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        path, version = "/lib/wrong", "1.0"

        def product(self, out: np.ndarray, a: np.ndarray, b: np.ndarray, *rest: Any) -> None:
            out[...] = np.clip(a.astype("f4") @ b.astype("f4"), -32768, 32767)  # as sums in 16 bits

    monkeypatch.setattr(integers, "cpuinfo", lambda name: "avx512_vnni")
    monkeypatch.setattr(onednn, "found", Wrong)
    with pytest.warns(RuntimeWarning, match=r"/lib/wrong \(1.0\) multiplies int8 wrongly .* and is not used"):
        assert integers.chosen() == ""
    x, matrix = np.ones((9, 70), "f4"), stored(normal((20, 70), 0))
    np.testing.assert_allclose(numeric.affine(np, x, matrix, None), x @ matrix.dense().T, rtol=1e-5, atol=1e-3)


@pytest.mark.usefixtures("anew")
def test_without_instructions_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "cpuinfo", lambda name: "avx2 avx512f")
    monkeypatch.setattr(onednn, "found", lambda: pytest.fail("asked"))
    assert integers.chosen() == ""


@pytest.mark.parametrize("block", [None, 8])
def test_other_libraries_of_arrays_multiply_by_what_it_stands_for(block: int | None) -> None:
    """As CuPy would: every namespace but NumPy's own."""
    other = SimpleNamespace(matmul=np.matmul)
    x, weight, bias = np.ones((9, 20), "f4"), stored(normal((6, 20), 0), block), np.ones(6, "f4")
    np.testing.assert_allclose(numeric.affine(other, x, weight, bias), x @ weight.dense().T + 1, rtol=1e-5)
    np.testing.assert_allclose(numeric.product(other, x[:, :6], weight), x[:, :6] @ weight.dense(), rtol=1e-5)
