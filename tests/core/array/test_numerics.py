"""Kernels have the values of exact references, and keep their accuracy at the ends of the formats."""

import math
from itertools import product

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import lay
from references import BF16, F16, FAMILIES, KERNELS, TOLERANCE, agree, cases, layer_norm, lookups, sums

from fsdpx.core.array import kernels
from fsdpx.errors import ShapeError

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(40))
ELEMENTWISE = {
    "gelu": (1, ()), "gelu tanh": (1, ("tanh",)), "gelu_backward": (2, ()), "gelu_backward tanh": (2, ("tanh",)),
    "silu": (1, ()), "silu_backward": (2, ()), "sigmoid": (1, ()), "elu": (1, (1.0,)), "softplus": (1, (1.0, 20.0)),
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
    with kernels.use_mode(mode):
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


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1003, 1024, 1025, (1 << 14) + 7, (1 << 18) + 70])
def test_sums_of_squares_have_one_order_on_every_processor(size, kind):
    """Norms decide updates: both forms add 64 lanes, and then the lanes by halves, whatever the width of vectors."""
    rng = np.random.default_rng(size)
    x = (rng.normal(size=size) * 10.0 ** rng.integers(-6, 4, size)).astype(kind)
    for grain in (1, 16, 100, 1024) if size < 1 << 18 else (16, 1024):
        plain, compiled = in_both_modes(kernels.sum_squares_of_blocks, np, x, grain)
        assert compiled.tobytes() == plain.tobytes(), grain
        want = [add_as_documented(x[start : start + grain]) for start in range(0, min(size, 5000), grain)]
        assert plain.tolist()[: len(want)] == want, grain
    plain, compiled = in_both_modes(kernels.square_sum, np, x)
    assert compiled == plain
    assert plain == pytest.approx(math.fsum(np.square(x.astype(np.float64)).tolist()), rel=1e-13)


def in_both_modes(kernel, *arguments):
    with kernels.use_mode("plain"):
        plain = kernel(*arguments)
    with kernels.use_mode("numba"):
        return plain, kernel(*arguments)


def add_as_documented(block):
    squares = np.zeros((-(-block.size // 64), 64))
    squares.flat[: block.size] = np.square(block.astype(np.float64))
    lanes = squares.cumsum(axis=0)[-1]
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


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
        assert math.isnan(kernels.cross_entropy(np, x, np.array([0, 0]))[0])
        bits = {"float32": (0x7FFFFFFF, 0x7FC007A2), "float64": (0x7FFFFFFFFFFFFFFF, 0x7FF80000000007A2)}[kind]
        others = np.copysign(np.repeat(np.array(bits, f"u{x.itemsize}").view(kind), 40), sign)
        for name in ("sigmoid", "silu", "gelu", "elu", "softplus"):
            with np.errstate(invalid="ignore"):  # NumPy 1.24's expm1 warns of a NaN that it is given
                assert np.isnan(call(name, others)).all(), name


def test_rows_are_added_without_losing_digits():
    x, gw, gb = np.ones((20_000, 4), np.float32), *np.zeros((2, 4), np.float32)
    with kernels.use_mode("numba"):
        kernels.layer_norm_backward_params(np, x, x[:, 0] * 0, x[:, 0], x * np.float32(0.1), gw, gb)
    np.testing.assert_allclose(gb, 20_000 * np.float64(np.float32(0.1)), rtol=1e-5)


X = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "words"),
    [
        ("cross_entropy", (np.array([0, 4, 1]),), IndexError, r"target 4 of row 1 is not in \[0, 4\)"),
        ("cross_entropy_backward", (np.array([0, 3, -1]), X[:, 0], 1.0), IndexError,
         r"target -1 of row 2 is not in \[0, 4\)"),
        ("embedding_backward", (np.array([0, 9]), X[:2]), IndexError, "index 9 at 1 is out of range for 3 rows"),
        ("cross_entropy", (np.array([0, 1]),), ShapeError, "3 rows of logits, and targets of shape"),
        ("squared_error", (X[:2],), ShapeError, r"of one shape are needed, got \(3, 4\) and \(2, 4\)"),
        ("squared_error_backward", (X[:2], 1.0), ShapeError, "of one shape are needed"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_not_read(name, arguments, kind, words):
    with kernels.use_mode("numba"), pytest.raises(kind, match=words):
        getattr(kernels, name)(np, X, *arguments)


def test_unknown_gelu(mode):
    with pytest.raises(ValueError, match="gelu: approximate must be 'none' or 'tanh', got 'fast'"):
        kernels.gelu(np, np.ones(3), "fast")


def test_sorted_sum_of_embedding_gradients_matches():
    from fsdpx.core.array.kernels.loss import _sort_and_scatter_add_rows

    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 57):
        index, dy = rng.integers(0, 5, n), rng.normal(size=(n, 3))
        got, want = np.zeros((5, 3)), np.zeros((5, 3))
        _sort_and_scatter_add_rows(np, got, index, dy)
        np.add.at(want, index, dy)
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


ROWS = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 130])
COLUMNS = st.integers(1, 140)
SCALE = st.sampled_from([1e-3, 1.0, 5.0])
MODE = st.sampled_from(["plain", "numba"])
LAID = st.sampled_from(["rows", "columns", "every second"])
FORMATS = st.sampled_from([np.dtype(np.float32), BF16, F16])
families = pytest.mark.parametrize("family", FAMILIES)


def tried(number):
    return settings(derandomize=True, database=None, deadline=None, max_examples=examples(number))


def compare(family, mode, dtype, x, dy, layout="rows"):
    """All kernels of a family on numbers as `dtype` has them. layout: of matrices in memory."""
    x, dy = (a.astype(dtype).astype(np.float64) for a in (x, dy))
    for name, case in cases(family, x, dy, dtype):
        arrays = [a.astype(dtype) if a.dtype == np.float64 else a for a in case.arrays]
        arrays = [lay(a, layout) if a.ndim == 2 else a for a in arrays]
        with kernels.use_mode(mode), np.errstate(all="ignore"):
            got = case.run(np, *arrays)
        assert got.dtype in (dtype, BF16, np.float32, np.float64), name
        try:
            agree(got, case, 1e-13 if dtype == np.float64 else TOLERANCE)
        except AssertionError as error:
            error.add_note(f"{name}, {mode}, {dtype.name}, {x.shape}, {layout}")
            raise


@families
@tried(30)
@given(rows=ROWS, columns=COLUMNS, scale=SCALE, mode=MODE, dtype=FORMATS, layout=LAID, seed=st.integers(0, 9))
def test_against_float64(family, rows, columns, scale, mode, dtype, layout, seed):
    rng = np.random.default_rng(seed)
    compare(family, mode, dtype, rng.normal(size=(rows, columns)) * scale, rng.normal(size=(rows, columns)), layout)


@pytest.mark.parametrize("family", [layer_norm, lookups, sums])
@pytest.mark.parametrize("layout", ["rows", "columns", "every second"])
def test_sums_into_16_bits(family, mode, layout):
    """In every layout, which the few examples of a property do not all meet."""
    for dtype, rows in product((BF16, F16), (0, 1, 33)):
        x, dy = np.random.default_rng(rows).normal(size=(2, rows, 71))
        compare(family, mode, dtype, x, dy, layout)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.__name__ not in ("gelu", "products")])
def test_in_float64(family, mode):
    """Without products of 16 bits, and without gelu, whose erfc is a polynomial for float32."""
    rng = np.random.default_rng(0)
    compare(family, mode, np.dtype(np.float64), rng.normal(size=(33, 37)) * 3, rng.normal(size=(33, 37)))


def test_gelu_in_float64(mode):
    """Its reference among the families rounds what is recomputed, as float32 does."""
    x = np.random.default_rng(0).normal(size=(33, 37)) * 3
    below = np.vectorize(math.erfc)(-x / math.sqrt(2.0)) / 2
    slope = below + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(kernels.gelu(np, x), x * below, rtol=1e-12, atol=1e-30)
    np.testing.assert_allclose(kernels.gelu_backward(np, x, np.ones_like(x)), slope, rtol=1e-12, atol=1e-14)


@families
@tried(20)
@given(
    shape=st.tuples(st.sampled_from([1, 2, 5, 33]), st.integers(1, 40)), share=st.sampled_from([0.01, 0.05, 0.3]),
    mode=MODE, dtype=FORMATS, seed=st.integers(0, 99),
)  # fmt: skip
def test_denormals_inf_and_nan_come_out_where_float64_has_them(family, shape, share, mode, dtype, seed):
    rng = np.random.default_rng(seed)
    least = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}[dtype.name]
    special = np.array([np.nan, np.inf, -np.inf, least, -least, 3 * least, -77 * least])
    x, dy = (
        np.where(rng.random(shape) < share, special[rng.integers(0, special.size, shape)], rng.normal(size=shape))
        for _ in range(2)
    )
    compare(family, mode, dtype, x, dy)


def test_every_kernel_has_a_reference():
    """A kernel that is added is added there, too."""
    x = np.ones((2, 3))
    known = {name for family in FAMILIES for name, _ in cases(family, x, x, BF16)}
    assert known - {"product"} == KERNELS


SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e38, -1e38, 3e38, np.inf, -np.inf, np.nan, 1.0], np.float32)


def test_special_values_of_elementwise_kernels(mode):
    with np.errstate(all="ignore"):
        got = kernels.gelu(np, SPECIAL)
        np.testing.assert_array_equal(got[[0, 1, 5, 6, 7, 8]], np.float32([0, 0, 1e38, 0, 3e38, np.inf]))
        assert np.isnan(got[10])
        assert got[11] == np.float32(0.8413447460685429)
        slope = kernels.gelu_backward(np, SPECIAL[:8], np.ones(8, np.float32))
        np.testing.assert_allclose(slope, [0.5, 0.5, 0.5, 0.5, 0.5, 1, 0, 1], atol=1e-30, rtol=1e-7)
        np.testing.assert_array_equal(kernels.sigmoid(np, SPECIAL[[0, 5, 6, 8, 9]]), [0.5, 1, 0, 1, 0])
        np.testing.assert_array_equal(kernels.add(np, SPECIAL, SPECIAL[::-1]), SPECIAL + SPECIAL[::-1])


def test_rows_without_anything_finite(mode):
    x = np.array([[-np.inf, -np.inf], [-np.inf, 2.0], [np.inf, 1.0]], np.float32)
    with np.errstate(all="ignore"):
        y = kernels.softmax(np, x)
    assert np.isnan(y[0]).all()
    assert y[1].tolist() == [0.0, 1.0]
    assert np.isnan(y[2, 0])
    total, weight, lse = kernels.cross_entropy(np, x[1:2], np.array([1]))
    assert (total, weight, lse.tolist()) == (0.0, 1.0, [2.0])


def test_huge_logits(mode):
    x = np.array([[1e38, -1e38, 0.0], [-1e38, -1e38, -1e38]], np.float32)
    total, _, lse = kernels.cross_entropy(np, x, np.array([0, 2]))
    np.testing.assert_allclose(lse, x.max(axis=1))
    assert total == 0.0 or abs(total) < 2.0
    assert np.isfinite(kernels.cross_entropy_backward(np, x, np.array([0, 2]), lse, 1.0)).all()
