"""Compiled attention: random shapes, special values, any number of threads, and denormals."""

from typing import Any

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from references import attend, attention_slopes

from fsdpx.core.array import blas, kernels, parallel, parse_dtype

pytestmark = pytest.mark.skipif(blas.get_selected_library() == "numpy", reason="compiled attention calls a BLAS")


def reference(q, k, v, do, seen: Any = True, scale: float = 0.3) -> list[np.ndarray]:
    """o, dq, dk, dv in float64, of heads repeated and masks written out. seen: which keys each query sees."""
    q, k, v, do = (a.astype("f8") for a in (q, k, v, do))
    (b, g, t, d), groups = k.shape, q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores, lse, sizes = attend(q, k, scale, seen)
    p = np.exp(scores - lse[..., None])
    (dq, *others), _, _ = attention_slopes(q, k, v, p @ v, do, p, sizes, scale)
    return [p @ v, dq, *(a.reshape(b, g, groups, t, d).sum(2) for a in others)]


def agree(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """Relative to the largest element of a result: its elements are sums of terms of about that size."""
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= 2e-6 * max(1.0, np.abs(want).max())


def heads(seed: int, b: int, h: int, t: int, d: int) -> list[np.ndarray]:
    """q, k, v as a layer passes them, and the gradient of o."""
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((b, t, 3, h, d)).astype("f4").transpose(2, 0, 3, 1, 4)
    return [*qkv, rng.standard_normal((b, t, h, d)).astype("f4").swapaxes(1, 2)]


def run(q, k, v, do, causal: bool, scale: float, *more: Any, mode: Any = "numba") -> list[np.ndarray]:
    with kernels.use_mode(mode):
        o, lse = kernels.attention(np, q, k, v, causal, scale, *more)
        return [o, *kernels.attention_backward(np, q, k, v, o, lse, do, causal, scale, *more)]


@settings(max_examples=examples(40), deadline=None)
@given(
    b=st.integers(1, 2), h=st.integers(1, 3), t=st.sampled_from([1, 2, 63, 64, 65, 127, 130, 200]),
    d=st.integers(1, 40), causal=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_shapes(b, h, t, d, causal, seed) -> None:
    arrays = heads(seed, b, h, t, d)
    agree(run(*arrays, causal, 0.3), reference(*arrays, np.tri(t, dtype=bool) if causal else True))


@pytest.mark.parametrize("mode", ["numba", "plain"])
@pytest.mark.parametrize(("t", "s"), [(1, 2), (1, 140), (2, 1), (63, 64), (65, 64), (64, 65), (129, 130), (5, 140)])
def test_keys_of_another_length(t, s, mode) -> None:
    q, do = heads(0, 2, 3, t, 7)[::3]
    _, k, v, _ = heads(1, 2, 3, s, 7)
    agree(run(q, k, v, do, False, 0.3, mode=mode), reference(q, k, v, do))


def test_large_scores_do_not_overflow() -> None:
    q, k, v, do = heads(1, 1, 2, 70, 8)
    arrays = q * 1e3, k * 1e3, v, do
    results = run(*arrays, True, 1.0)
    assert all(np.isfinite(r).all() for r in results)
    np.testing.assert_allclose(results[0], reference(*arrays, np.tri(70, dtype=bool), 1.0)[0], rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_rows() -> None:
    q, k, v, do = (a.copy() for a in heads(1, 1, 1, 130, 8))
    q[0, 0, 100] = np.nan
    o = run(q, k, v, do, True, 0.3)[0]
    assert np.isnan(o[0, 0, 100]).all()
    assert np.isfinite(np.delete(o, 100, 2)).all()


@pytest.mark.parametrize("t", [40, 64, 130])
def test_what_comes_later_does_not_show_in_a_bit(t: int) -> None:
    q, k, v, do = (a.copy() for a in heads(1, 1, 2, t, 8))
    before = run(q, k, v, do, True, 0.3)
    seen = t // 2 + 1
    q[:, :, seen:], k[:, :, seen:], v[:, :, seen:], do[:, :, seen:] = 3.0, -50.0, 1e30, 0.0
    after = run(q, k, v, do, True, 0.3)
    assert np.array_equal(before[0][:, :, :seen], after[0][:, :, :seen])  # o
    assert np.array_equal(before[1][:, :, :seen], after[1][:, :, :seen])  # dq


@pytest.mark.parametrize("causal", [True, False])
def test_the_number_of_threads_does_not_show(causal: bool) -> None:
    arrays = heads(2, 2, 3, 130, 16)
    seen = set()
    for count in (1, 2, 3):
        parallel.set_threads(count)
        seen.add(b"".join(a.tobytes() for a in run(*arrays, causal, 0.25)))
    assert len(seen) == 1


def test_the_mode_of_the_processor_comes_back() -> None:
    run(*heads(3, 1, 1, 70, 4), True, 1.0)
    assert (np.full(4, 1e-40, "f4") * np.float32(1)).all()


def everything(b: int, h: int, g: int, t: int, d: int, window: int, apart: bool) -> tuple[list[np.ndarray], list[Any]]:
    """q, k, v and the gradient of o; then o, dq, dk, dv of heads repeated and masks written out, in float64."""
    rng = np.random.default_rng([b, h, g, t, d, window])
    shapes = (b, t, h, d), (b, t, g, d), (b, t, g, d), (b, t, h, d)
    q, k, v, do = (rng.standard_normal(s).astype("f4").swapaxes(1, 2) for s in shapes)
    segments = np.sort(rng.integers(5, 8, (b, t)), axis=1) if apart else None
    seen = np.tri(t, dtype=bool) & ~np.tri(t, k=-window, dtype=bool) if window else np.tri(t, dtype=bool)
    if apart:
        seen = seen & (segments[:, :, None] == segments[:, None, :])[:, None]
    return [q, k, v, do], [segments, *reference(q, k, v, do, seen)]


@pytest.mark.parametrize("mode", ["numba", "plain"])
@pytest.mark.parametrize(
    ("h", "g", "t", "window", "apart"),
    [(4, 2, 65, 0, False), (2, 2, 130, 7, False), (3, 1, 130, 70, True), (2, 1, 64, 0, True), (1, 1, 1, 1, True)],
)
def test_shared_keys_windows_and_segments(h, g, t, window, apart, mode) -> None:
    arrays, (segments, *want) = everything(2, h, g, t, 5, window, apart)
    agree(run(*arrays, True, 0.3, window, segments, mode=mode), want)


@pytest.mark.parametrize("library", ["numpy", None])
def test_one_query_reads_keys_where_they_lie_whichever_library_there_is(library: str | None) -> None:
    """As text is written: each head as if it were alone, and keys and values that are parts of longer arrays."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 7)).astype("f4").swapaxes(1, 2)
    k, v = rng.standard_normal((2, 2, 2, 50, 7)).astype("f4")[:, :, :, 9:42]
    scores = 0.3 * q.astype("f8") @ np.repeat(k, 2, 1).swapaxes(-1, -2)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    blas.select_library(library)
    with kernels.use_mode("numba"):
        o, lse = kernels.attention(np, q, k, v, False, 0.3)
        one, _ = kernels.attention(np, q[1:, 3:], k[1:, 1:], v[1:, 1:], False, 0.3)
    np.testing.assert_allclose(o, p @ np.repeat(v, 2, 1) / p.sum(-1, keepdims=True), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=2e-6)
    np.testing.assert_array_equal(one, o[1:, 3:])


@pytest.mark.parametrize(("window", "apart"), [(0, False), (5, True)])
def test_shared_keys_in_16_bits(window, apart) -> None:
    """As near as rounding of what goes in and comes out lets it be, whichever code runs."""
    arrays, (segments, *_) = everything(1, 4, 2, 70, 8, window, apart)
    results = []
    for kind in ("bf16", "float32"):
        rounded = [a.astype(parse_dtype("bf16")).astype(parse_dtype(kind)) for a in arrays]
        found = run(*rounded, True, 0.3, window, segments, mode="default")
        assert found[0].dtype == found[2].dtype == rounded[0].dtype
        results.append([a.astype("f4") for a in found])
    for got, want in zip(*results, strict=True):
        assert np.abs(got - want).max() <= 2.0**-6 * np.abs(want).max()
