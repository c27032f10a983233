"""The index algebra of matrix products by cuBLAS, against NumPy, on a gemm that reads memory by columns."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from calls import noise
from hypothesis import given
from hypothesis import strategies as st
from stand_in import Cupy, by_columns

from fsdpx.ext.gpu.gemm import can_cublas_multiply, plan_cublas_gemm, run_batched_gemm_into, run_gemm_into
from fsdpx.nn import gradient_accumulation


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    return Cupy().install(monkeypatch)


def matrix(draw: Any, rows: int, columns: int) -> np.ndarray:
    """Whole numbers, in memory by rows or columns, perhaps a part of a larger matrix."""
    more = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    whole = np.random.default_rng(rows + 7 * columns).integers(-4, 5, (rows + more[0], columns + more[1])).astype(float)
    return np.asarray(whole, order=draw(st.sampled_from("CF")))[:rows, :columns]


SIZES = st.integers(1, 4)


@given(st.data(), SIZES, SIZES, SIZES)
def test_any_layout_is_asked_for_rightly(data: Any, m: int, n: int, k: int) -> None:
    """By a gemm that sees addresses and leading dimensions only."""
    a, b, out = (matrix(data.draw, *shape) for shape in ((m, k), (k, n), (m, n)))
    wanted = plan_cublas_gemm(*((x.shape, tuple(s // 8 for s in x.strides)) for x in (out, a, b)))
    assert wanted is not None
    want = a @ b
    first, second = (a, b) if wanted.turned else (b, a)
    pointers = [x.__array_interface__["data"][0] for x in (first, second, out)]
    by_columns(
        np.float64, np.float64, (int(wanted.first), int(wanted.second), wanted.m, wanted.n, wanted.k),
        1.0, pointers[0], wanted.ld_first, pointers[1], wanted.ld_second, 0.0, pointers[2], wanted.ld_out,
    )  # fmt: skip
    np.testing.assert_array_equal(out, want)


def test_a_matrix_without_unit_stride_cannot_be_asked_for() -> None:
    good = ((3, 3), (3, 1))
    assert plan_cublas_gemm(good, ((3, 3), (6, 2)), good) is None
    assert plan_cublas_gemm(((3, 3), (6, 2)), good, good) is None
    assert plan_cublas_gemm(good, ((3, 3), (0, 1)), good) is None  # a row that is repeated


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 1e-2), ("float16", 1e-3)]
)
def test_products_and_their_sums(cupy: Cupy, dtype: str, bound: float) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = noise(5, 7).astype(kind), noise(7, 3, seed=1).astype(kind)
    want = a.astype(float) @ b.astype(float)
    x, y = cupy.asarray(a), cupy.asarray(b)
    assert can_cublas_multiply(x, y)
    found = gradient_accumulation.matmul_in_dtype_of_first(cupy, x, y).get().astype(float)
    np.testing.assert_allclose(found, want, rtol=bound, atol=bound)
    wide = np.float64 if dtype == "float64" else np.float32
    out = cupy.asarray(np.ones((5, 3), wide))
    run_gemm_into(out, x, y, accumulate=True)  # 16 bits into a gradient of float32
    np.testing.assert_allclose(out.get(), 1 + want, rtol=1e-5, atol=1e-5)
    turned = cupy.asarray(np.ones((3, 5), wide)).T
    run_gemm_into(turned, x, y)
    np.testing.assert_allclose(turned.get(), want, rtol=1e-5, atol=1e-5)


def test_several_at_once_as_attention_needs_them(cupy: Cupy) -> None:
    """Heads lie between time and features: (T, H, D) in memory, (H, T, D) as multiplied."""
    q, k = (cupy.asarray(noise(4, 2, 3, seed=n)).swapaxes(0, 1) for n in range(2))
    scores = cupy.zeros((2, 4, 4), np.float64)
    run_batched_gemm_into(scores, q, k.swapaxes(1, 2), scale=0.5)
    np.testing.assert_allclose(scores.get(), 0.5 * q.get() @ k.get().swapaxes(1, 2), rtol=1e-14)
    o = cupy.zeros((4, 2, 3), np.float64).swapaxes(0, 1)
    run_batched_gemm_into(o, scores.swapaxes(1, 2), q)
    np.testing.assert_allclose(o.get(), scores.get().swapaxes(1, 2) @ q.get(), rtol=1e-13)


def test_what_lies_neither_by_rows_nor_by_columns_is_copied(cupy: Cupy) -> None:
    a, b = cupy.asarray(noise(6, 8))[::2, ::2], cupy.asarray(noise(4, 5))
    out = cupy.asarray(np.ones((6, 10)))[::2, ::2]
    run_gemm_into(out, a, b, accumulate=True)
    np.testing.assert_allclose(out.get(), 1 + a.get() @ b.get(), rtol=1e-13)


def test_what_cublas_does_not_take(cupy: Cupy) -> None:
    a = cupy.asarray(noise(3, 3))
    assert not can_cublas_multiply(a, cupy.asarray(noise(3, 3).astype(np.float32)))
    assert not can_cublas_multiply(a, noise(3, 3))
    assert not can_cublas_multiply(a[:0], a)
    assert not can_cublas_multiply(cupy.asarray(np.ones((2, 2), int)))


def test_gradients_are_added_where_they_lie(cupy: Cupy) -> None:
    half = ml_dtypes.bfloat16
    x, dy = cupy.asarray(noise(6, 4).astype(half)), cupy.asarray(noise(6, 3, seed=1).astype(half))
    g = {"weight": cupy.asarray(np.ones((3, 4), np.float32)), "bias": cupy.asarray(np.ones(3, np.float32))}
    memory = g["weight"].memory
    gradient_accumulation.add_linear_gradients(cupy, g, dy, x)
    assert g["weight"].memory is memory
    want = 1 + dy.get().astype(float).T @ x.get().astype(float)
    np.testing.assert_allclose(g["weight"].get(), want, rtol=1e-6)
