"""What a tolerance against PyTorch does not show: tails, overflow, NaN, slices, order, refusals."""

import math

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.array import kernels

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(40))
ELEMENTWISE = {
    "gelu": (1, ()), "gelu tanh": (1, ("tanh",)), "gelu_backward": (2, ()), "gelu_backward tanh": (2, ("tanh",)),
    "silu": (1, ()), "silu_backward": (2, ()), "sigmoid": (1, ()),
}  # fmt: skip


def call(name, *arrays):
    return getattr(kernels, name.partition(" ")[0])(np, *arrays, *ELEMENTWISE[name][1])


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("kind", ["float64", "float32"])
@SETTINGS
@given(st.sampled_from(["plain", "numba"]), st.integers(0, 300), st.integers(0, 300), st.integers(1, 3))
def test_an_element_does_not_see_its_place(name, kind, mode, a, b, step):
    start, stop = sorted((a, b))
    rng = np.random.default_rng(0)
    arrays = [(rng.normal(size=300) * 4).astype(kind) for _ in range(ELEMENTWISE[name][0])]
    with kernels.use(mode):
        whole, part = call(name, *arrays), call(name, *(x[start:stop:step] for x in arrays))
    np.testing.assert_array_equal(part, whole[start:stop:step], strict=True)


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_the_same_call_gives_the_same_bits(mode, kind):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(40, 130)).astype(kind), rng.normal(size=130).astype(kind)
    q, k, v = rng.normal(size=(3, 2, 2, 70, 8)).astype(kind)  # three: NumPy computes a @ a.T in another way
    for run in (
        lambda a: kernels.layer_norm(np, a, w, w, 1e-5)[0],
        lambda a: kernels.softmax(np, a),
        lambda a: np.float64(kernels.square_sum(np, a.reshape(-1))),
    ):
        moved = np.empty(x.size + 1, kind)[1:].reshape(x.shape)  # other alignment, same numbers
        moved[...] = x
        assert run(x).tobytes() == run(moved).tobytes() == run(np.asfortranarray(x).copy("C")).tobytes()
    o = kernels.attention(np, q, k, v, True, 0.3)[0]
    assert np.array_equal(o, kernels.attention(np, q.copy(), k.copy(), v.copy(), True, 0.3)[0])


@pytest.mark.parametrize(("kind", "tolerance"), [("float64", 1e-14), ("float32", 2e-6)])
def test_gelu_keeps_its_relative_accuracy_in_the_tail(mode, kind, tolerance):
    x = np.linspace(-8, 3, 500).astype(kind)
    x = x[x != 0]
    want = np.array([v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)])
    np.testing.assert_allclose(kernels.gelu(np, x), want, rtol=tolerance)


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_exponential_at_its_ends(mode, kind):
    x = np.array([[0.0, -1e-30, -87.0, -100.0, -103.0, -110.0, -700.0, -740.0, -800.0, -np.inf]], kind)
    want = np.exp(x.astype(np.float64))
    got = kernels.softmax(np, x) * (want.sum())
    np.testing.assert_allclose(got, want.astype(kind), rtol=3e-6 if kind == "float32" else 1e-14, atol=3e-45)


def test_large_numbers_do_not_overflow(mode):
    x = np.array([[1e30, -1e30, 0.0, 88.0]], np.float32)
    assert np.array_equal(kernels.softmax(np, x), [[1, 0, 0, 0]])
    assert np.array_equal(kernels.sigmoid(np, x)[0, :3], [1.0, 0.0, 0.5])
    assert np.array_equal(kernels.silu(np, x)[0, :3], np.array([1e30, 0.0, 0.0], np.float32))
    far = np.array([-15.0, 15.0, -200.0, 200.0], np.float32)
    np.testing.assert_allclose(kernels.gelu_backward(np, far, np.ones_like(far)), [0, 1, 0, 1], atol=1e-30)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_seen(mode, sign):
    nan = math.copysign(math.nan, sign)
    for kind in ("float32", "float64"):
        x = np.array([[1.0, nan, 3.0], [1.0, 2.0, 3.0]], kind)
        assert np.isnan(kernels.gelu(np, x)).sum() == 1
        assert np.isnan(kernels.softmax(np, x)).all(axis=1).tolist() == [True, False]
        assert np.isnan(kernels.layer_norm(np, x, None, None, 1e-5)[0]).any(axis=1).tolist() == [True, False]
        assert math.isnan(kernels.cross_entropy(np, x, np.array([0, 0]))[0])
        assert math.isnan(kernels.square_sum(np, x.reshape(-1)))


def test_rows_are_added_without_losing_digits():
    n = 20_000
    dy = np.full((n, 4), 0.1, np.float32)
    x, gb = np.ones((n, 4), np.float32), np.zeros(4, np.float32)
    with kernels.use("numba"):
        kernels.layer_norm_backward_params(np, x, x[:, 0] * 0, x[:, 0], dy, np.zeros(4, np.float32), gb)
    np.testing.assert_allclose(gb, n * np.float64(np.float32(0.1)), rtol=1e-5)


def test_bad_indices_are_refused_not_read():
    x = np.zeros((3, 4), np.float32)
    with kernels.use("numba"):
        with pytest.raises(IndexError, match=r"target 4 of row 1 is not in \[0, 4\)"):
            kernels.cross_entropy(np, x, np.array([0, 4, 1]))
        with pytest.raises(IndexError, match=r"target -1 of row 2 is not in \[0, 4\)"):
            kernels.cross_entropy_backward(np, x, np.array([0, 3, -1]), x[:, 0], 1.0)
        with pytest.raises(IndexError, match="index 9 at 1 is out of range for 3 rows"):
            kernels.embedding_backward(np, x, np.array([0, 9]), x[:2])


def test_unknown_gelu(mode):
    with pytest.raises(ValueError, match="gelu: approximate must be 'none' or 'tanh', got 'fast'"):
        kernels.gelu(np, np.ones(3), "fast")


def test_sorted_sum_of_embedding_gradients_matches():
    from fsdpx.array.kernels.loss import _add_sorted

    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 57):
        index, dy = rng.integers(0, 5, n), rng.normal(size=(n, 3))
        got, want = np.zeros((5, 3)), np.zeros((5, 3))
        _add_sorted(np, got, index, dy)
        np.add.at(want, index, dy)
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)
