"""Products by the BLAS, and the cores they take."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, lay
from threadpoolctl import threadpool_info, threadpool_limits

from fsdpx.core.array import blas, cores, parallel
from fsdpx.core.array.kernels.choice import has_numba
from fsdpx.core.base import environment
from fsdpx.errors import ConfigError

LIBRARIES = list(blas.list_available_blas_libraries())
SIZES = st.one_of(st.integers(0, 5), st.sampled_from([31, 32, 33, 63, 64, 65, 130]))


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    blas.select_library(request.param)
    return request.param


def normal(dtype: str, *shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def error(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> float:
    """Largest error, relative to the sum of the terms' sizes: what rounding is proportional to."""
    return float(np.max(np.abs(got - want) / np.maximum(bound, 1e-300), initial=0.0))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("accumulate", [False, True])
@settings(max_examples=examples(40), deadline=None)
@given(SIZES, SIZES, SIZES, st.tuples(*[st.sampled_from(LAYOUTS)] * 3), st.integers(0, 99))
def test_gemm_is_the_product(dtype, accumulate, m, n, k, layouts, seed) -> None:
    a, b, c = normal(dtype, (m, k), (k, n), (m, n), seed=seed)
    before = c if accumulate else np.zeros_like(c)
    want = a.astype("f8") @ b.astype("f8") + before
    bound = np.abs(a).astype("f8") @ np.abs(b).astype("f8") + np.abs(before)
    for name in LIBRARIES:
        blas.select_library(name)
        out = lay(c if accumulate else np.full_like(c, np.nan), layouts[0])
        blas.gemm(out, lay(a, layouts[1]), lay(b, layouts[2]), accumulate)
        assert error(out, want, bound) < (1e-6 if dtype == "f4" else 1e-14), name


@settings(max_examples=examples(40), deadline=None)
@given(SIZES, SIZES, SIZES, st.booleans(), st.tuples(st.booleans(), st.booleans()), st.integers(0, 99))
def test_a_linear_layer_forward_and_backward(m, n, k, biased, adds, seed) -> None:
    x, weight, bias, dy = normal("f4", (m, k), (n, k), (n,), (m, n), seed=seed)
    wide = [a.astype("f8") for a in (x, weight, bias, dy)]
    for name in LIBRARIES:
        blas.select_library(name)
        out = np.full((m, n), np.nan, "f4")
        blas.linear_forward(out, x, weight, bias if biased else None)
        bound = np.abs(wide[0]) @ np.abs(wide[1]).T + np.abs(wide[2])
        assert error(out, wide[0] @ wide[1].T + (wide[2] if biased else 0), bound) < 1e-6, name
        dweight = np.ones((n, k), "f4") if adds[0] else np.full((n, k), np.nan, "f4")
        dbias = np.ones(n, "f4") if adds[1] else np.full(n, np.nan, "f4")
        blas.linear_backward_params((dweight, adds[0]), (dbias, adds[1]) if biased else None, dy, x)
        assert error(dweight, wide[3].T @ wide[0] + adds[0], np.abs(wide[3]).T @ np.abs(wide[0]) + 1) < 1e-6, name
        if biased:
            assert error(dbias, wide[3].sum(0) + adds[1], np.abs(wide[3]).sum(0) + 1) < 1e-6, name


def test_gradients_of_another_format_than_what_they_are_made_of() -> None:
    """Layers that are called by hand may mix them: nothing beyond the gradients is written."""
    x, dy, weight = normal("f8", (5, 3), (5, 4), (4, 3))
    both = blas.linear_backward_params, lambda *given: blas.linear_backward(np.empty((5, 3)), *given, weight)
    for adds in (False, True):
        for call in both:
            memory = np.full(64, 7.0, np.float32)
            dweight, dbias = memory[:12].reshape(4, 3), memory[24:28]
            call((dweight, adds), (dbias, adds), dy, x)
            np.testing.assert_allclose(dweight, dy.T @ x + 7 * adds, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(dbias, dy.sum(0) + 7 * adds, rtol=1e-5, atol=1e-5)
            assert (memory[12:24] == 7).all()
            assert (memory[28:] == 7).all()


@pytest.mark.parametrize("shape", [(64, 32, 32), (64, 48, 33), (64, 256, 64), (256, 512, 384)])
def test_the_same_bits_at_every_alignment(library: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = normal("f4", (m, k), (k, n))

    def at(offset: int, values: np.ndarray) -> np.ndarray:
        storage = np.empty(values.size + 32, "f4")
        start = (-storage.ctypes.data // 4) % 16 + offset
        moved = storage[start : start + values.size].reshape(values.shape)
        moved[...] = values
        return moved

    seen = set()
    for offset in range(16):
        out = at(offset * 7 % 16, np.zeros((m, n), "f4"))
        blas.gemm(out, at(offset, a), at(offset * 3 % 16, b))
        seen.add(out.tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("shape", [(700, 200, 130), (200, 700, 130), (64, 4200, 64)])
def test_cut_among_threads(library: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight, bias = normal("f4", (m, k), (n, k), (n,))
    blas.set_product_threads(3)
    parallel.set_threads(3)
    y, dweight, dbias = np.empty((m, n), "f4"), np.empty((n, k), "f4"), np.empty(n, "f4")
    blas.linear_forward(y, x, weight, bias)
    blas.linear_backward_params((dweight, False), (dbias, False), y, x)
    blas.gemm(y, x, weight.T, True)
    product = x.astype("f8") @ weight.astype("f8").T
    size = np.abs(x).astype("f8") @ np.abs(weight).astype("f8").T
    assert error(y, 2 * product + bias, 2 * size + np.abs(bias)) < 1e-6
    forward = product + bias
    assert error(dweight, forward.T @ x, np.abs(forward).T @ np.abs(x)) < 1e-5
    assert error(dbias, forward.sum(0), np.abs(forward).sum(0)) < 1e-5


@pytest.mark.parametrize("shape", [(33, 130), (200, 64), (5, 1)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_few_rows_have_the_bits_of_each_alone_in_every_library(shape: tuple[int, int], dtype: str) -> None:
    """A matrix is read once for all of them, as memory has it: BLAS would copy it, and add in an order of its own."""
    n, k = shape
    x, weight, bias = normal(dtype, (4, k), (n, k), (n,))
    found = set()
    for name in LIBRARIES:
        blas.select_library(name)
        together, line, bare = (np.empty((4, n), dtype) for _ in range(3))
        blas.linear_forward(together, x, weight, bias)
        for i in range(4):
            blas.linear_forward(line[i : i + 1], x[i : i + 1], weight, bias)
        blas.gemm(bare, x, weight.T)
        np.testing.assert_array_equal(bare + bias, together)
        np.testing.assert_array_equal(line, together)
        found.add(together.tobytes())
    assert len(found) == 1 or k == 1 or not has_numba()


@pytest.mark.parametrize("accumulate", [False, True])
def test_infinity_and_nan_pass_through_without_a_warning(library: str, accumulate: bool) -> None:
    a = np.array([[np.inf, 1.0], [np.nan, 2.0], [3.0, 4.0], [np.inf, -np.inf], [3e38, 3e38], [0.0, np.inf]] * 3, "f4")
    out = np.zeros((18, 2), "f4")
    blas.gemm(out, a, np.array([[1, 1], [1, 0]], "f4"), accumulate)
    one = [[np.inf] * 2, [np.nan] * 2, [7.0, 3.0], [np.nan] * 2, [np.inf, np.float32(3e38)], [np.inf, np.nan]]
    np.testing.assert_array_equal(out, one * 3)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2)),
        (np.ones((2, 3), "f2"), np.ones((3, 2), "f2")),
        (np.ones((2, 3), "f4"), np.ones((3, 2), "f8")),
    ],
)
def test_what_blas_does_not_know_goes_to_numpy(a: np.ndarray, b: np.ndarray) -> None:
    out = np.zeros((2, 2), np.result_type(a, b))
    blas.gemm(out, a, b)
    np.testing.assert_array_equal(out, a @ b)
    blas.gemm(out, a, b, True)
    np.testing.assert_array_equal(out, 2 * (a @ b))


def test_what_is_read_may_be_read_only(library: str) -> None:
    a = np.frombuffer(np.ones((3, 3), "f4").tobytes(), "f4").reshape(3, 3)
    out = np.empty((3, 3), "f4")
    blas.linear_forward(out, a, a, a[0])
    np.testing.assert_array_equal(out, np.full((3, 3), 4.0))


def test_shapes_that_do_not_fit_are_refused(library: str) -> None:
    with pytest.raises(ValueError, match="matmul"):
        blas.gemm(np.empty((2, 2), "f4"), np.ones((2, 3), "f4"), np.ones((2, 2), "f4"))


def test_choice() -> None:
    assert "numpy" in blas.list_available_blas_libraries()
    assert blas.get_selected_library() in blas.list_available_blas_libraries()
    with pytest.raises(ConfigError, match="choose one of"):
        blas.select_library("atlas")
    before = blas.get_selected_library()
    rates = blas.measure_gflops_of_each_library()
    assert list(rates) == list(blas.list_available_blas_libraries())
    assert all(rate > 0 for rate in rates.values())
    assert blas.get_selected_library() == before


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host of two cores whose user said nothing of threads."""
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cores, "count_usable_cores", lambda: 2)
    yield
    blas.set_thread_limit(None)


@pytest.mark.usefixtures("two_cores")
def test_cores_are_divided_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.read_environment().threads is None
    assert [cores.set_threads_per_rank(ranks) for ranks in (1, 2, 3)] == [2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert cores.set_threads_per_rank(2) == parallel.get_threads() == blas.get_product_threads() == 5


def threads_of_numpy() -> int:
    """Of the BLAS that comes with NumPy; SciPy may have brought another one."""
    return int(next(pool["num_threads"] for pool in threadpool_info() if "numpy" in pool["filepath"]))


needs_openblas = pytest.mark.skipif("openblas" not in LIBRARIES, reason="NumPy's OpenBLAS is not here")


@needs_openblas
@pytest.mark.usefixtures("two_cores")
def test_numpys_library_is_limited_while_fsdpx_computes_and_as_before_then() -> None:
    """Cut products need one thread in the library that multiplies, or their bits change."""
    for chosen, ranks, wanted in (("openblas", 1, 1), (None, 2, 1), ("numpy", 2, 1), ("numpy", 1, 2)):
        blas.select_library(chosen)
        with threadpool_limits(limits=3, user_api="blas"):
            assert cores.set_threads_per_rank(ranks) == 2 // ranks
            assert threads_of_numpy() == 3
            with blas.limit_threads(), blas.limit_threads():
                assert threads_of_numpy() == wanted
            assert threads_of_numpy() == 3
        with threadpool_limits(limits=1, user_api="blas"), blas.limit_threads():
            assert threads_of_numpy() == 1  # never more than the program has chosen
        with threadpool_limits(limits=3, user_api="blas"):
            with blas.limit_threads():
                threadpool_limits(limits=4, user_api="blas")  # it changes its mind meanwhile
            assert threads_of_numpy() == 4
    with threadpool_limits(limits=3, user_api="blas"):
        blas.set_thread_limit(None)
        blas.select_library("numpy")
        with blas.limit_threads():
            assert threads_of_numpy() == 3


@needs_openblas
@pytest.mark.usefixtures("two_cores")
def test_threads_that_compute_at_the_same_time_limit_once() -> None:
    blas.select_library("openblas")
    met, seen = threading.Barrier(2, timeout=60), []

    def compute() -> None:
        with blas.limit_threads():
            met.wait()
            seen.append(threads_of_numpy())
            met.wait()
        met.wait()
        seen.append(threads_of_numpy())

    with threadpool_limits(limits=3, user_api="blas"), ThreadPoolExecutor(2) as pool:
        cores.set_threads_per_rank(1)
        for done in [pool.submit(compute) for _ in range(2)]:
            done.result()
    assert seen == [1, 1, 3, 3]
