"""Arrays without data: NumPy's shapes, dtypes and errors, also of kernels."""

import operator
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from amount import examples
from calls import CALLS, arguments_of, each, kernel_of, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from present import is_present
from references import KERNELS

from fsdpx.core.array import shapes
from fsdpx.core.array import shapes as xp
from fsdpx.core.array.kernels import attention, embedding_backward
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes import shape_cache as known_of
from fsdpx.core.array.shapes.array import measuring_shape_only_memory
from fsdpx.core.array.shapes.flop_counter import counting_work
from fsdpx.core.array.shapes.shape_cache import call_cached

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(80))
DTYPES = st.sampled_from(["float64", "float32", "float16", "int64", "int32", "bool"])


def ghost(array):
    return ShapeArray(array.shape, array.dtype)


def same(function, *operands):
    """`function` on shapes gives the shape and dtype, or the kind of error, that it gives on arrays."""
    ghosts = [each(ghost, operand) for operand in operands]
    try:
        with warnings.catch_warnings(action="ignore"):
            want = np.asarray(function(np, *operands))
    except (ValueError, TypeError, IndexError) as error:
        kind = next(k for k in (IndexError, ValueError, TypeError) if isinstance(error, k))
        with pytest.raises(kind):
            function(xp, *ghosts)
    else:
        got = function(xp, *ghosts)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


@SETTINGS
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3), DTYPES, DTYPES)
def test_arithmetic_broadcasts_and_promotes(pair, left, right):
    a, b = np.ones(pair.input_shapes[0], left), np.ones(pair.input_shapes[1], right)
    for op in (operator.add, operator.mul, operator.truediv, operator.lt, operator.eq, operator.and_, operator.iadd):
        same(lambda m, x, y, op=op: op(x, y), a.copy(), b)
    for op in (operator.sub, operator.pow, operator.ge):
        same(lambda m, x, op=op: op(x, 2), a)
        same(lambda m, x, op=op: op(1.5, x), a)
    same(lambda m, x, y: m.where(x > 0, x, y), a, b)
    same(lambda m, x, y: m.maximum(x, y), a, b)


@SETTINGS
@given(st.lists(st.integers(0, 4), min_size=1, max_size=2), st.lists(st.integers(0, 4), min_size=1, max_size=2))
def test_operands_that_do_not_broadcast(left, right):
    same(lambda m, x, y: x + y, np.ones(left), np.ones(right))
    same(lambda m, x, y: operator.iadd(x, y), np.ones(left), np.ones(right))
    same(lambda m, x, y: x @ y, np.ones(left, np.float32), np.ones(right))
    same(lambda m, x, y: m.concatenate([x, y], axis=0), np.ones(left), np.ones(right))
    same(lambda m, x, y: m.stack([x, y]), np.ones(left), np.ones(right))


@SETTINGS
@given(st.data(), hnp.array_shapes(min_dims=1, max_dims=4, max_side=5))
def test_basic_indexing(data, shape):
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True))
    same(lambda m, x: x[index], np.ones(shape))


@SETTINGS
@given(st.data(), hnp.array_shapes(min_dims=2, max_dims=4, min_side=2, max_side=4))
def test_integer_array_indexing(data, shape):
    rows = data.draw(hnp.arrays(np.int64, st.sampled_from([(3,), (2, 1), ()]), elements=st.integers(0, 1)))
    every = slice(None)
    for index in (
        (rows,), (every, rows), (rows, rows), (rows, every, 1), (..., rows), (None, rows, 0),
        (every, rows, every, rows), (every, 1, None, rows),
    ):  # fmt: skip
        if sum(i is not None and i is not ... for i in index) <= len(shape):
            assert ShapeArray(shape)[each(ghost, index)].shape == np.ones(shape)[index].shape


@SETTINGS
@given(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3), DTYPES, st.booleans(), st.integers(-1, 0))
def test_reductions(shape, dtype, keepdims, axis):
    for name in ("sum", "mean", "max", "min", "any", "all", "prod"):
        same(lambda m, x, n=name: getattr(m, n)(x, axis=axis, keepdims=keepdims), np.ones(shape, dtype))
        same(lambda m, x, n=name: getattr(x, n)(), np.ones(shape, dtype))
    same(lambda m, x: m.sum(x, axis=axis, dtype=np.float64), np.ones(shape, dtype))
    same(lambda m, x: m.argmax(x, axis=axis), np.ones(shape, dtype))


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3, 4)])
def test_rearranging(shape):
    x = np.ones(shape, np.float32)
    for name, *arguments in (
        ("transpose", 2, 0, 1), ("transpose", 0, 0, 1), ("swapaxes", 0, -1), ("squeeze", 1), ("reshape", -1, 12),
        ("reshape", 5, -1), ("reshape", (4, -1)), ("ravel",), ("view", np.int32), ("view", np.float64),
        ("astype", np.float16),
    ):  # fmt: skip
        same(lambda m, x, n=name, a=arguments: getattr(x, n)(*a), x)
    for name, *arguments in (
        ("moveaxis", 0, -1), ("moveaxis", -1, 1), ("expand_dims", -1), ("broadcast_to", (7, *shape)),
        ("broadcast_to", (3,)), ("pad", ((0, 0), (1, 2), (0, 3))), ("isfinite",), ("zeros_like", np.int8),
    ):  # fmt: skip
        same(lambda m, x, n=name, a=arguments: getattr(m, n)(x, *a), x)
    for function in (
        lambda m, x: x.T,
        lambda m, x: m.expand_dims(x, 1).squeeze(1),
        lambda m, x: m.take_along_axis(x, m.zeros((*x.shape[:2], 1), dtype=np.int64), axis=2),
        lambda m, x: m.take(x, m.zeros((5,), dtype=np.int64), axis=1),
        lambda m, x: m.concatenate([x, x], axis=1),
        lambda m, x: m.stack([x, x], axis=-1),
        lambda m, x: m.split(x, 3, axis=1)[2],
        lambda m, x: m.einsum("abc,adc->bd", x, x),
        lambda m, x: m.cumsum(x, axis=1),
        lambda m, x: m.triu(x[0:1].reshape(x[0:1].shape)),
        lambda m, x: -abs(x),
        lambda m, x: ~(x > 0),
        lambda m, x: m.full((2,), 3),
        lambda m, x: m.arange(2, 9, 3),
        lambda m, x: x[1, 0, 9],
        lambda m, x: x[0, 0, 0, 0],
    ):
        same(function, x)


def test_a_huge_array_costs_nothing():
    x = xp.zeros((10**6, 10**6), dtype="float32")
    assert (x @ x.T).nbytes == 4 * 10**12
    assert x[:, None, ::2].shape == (10**6, 1, 5 * 10**5)


def test_numbers_and_truth():
    x = ShapeArray((), "float32")
    assert (float(x), int(x), bool(x), x.item()) == (0.0, 0, False, 0.0)


def test_assignment_must_fit():
    x = ShapeArray((2, 3))
    x[0] = ShapeArray((3,))
    x[...] = 1.0
    x[x > 0] = 0.0
    x[...] = ShapeArray((2, 1))
    x[0] = ShapeArray((1, 1, 3))


def test_in_place_keeps_dtype():
    x = ShapeArray((2, 3), "float32")
    x += ShapeArray((3,), "float64")
    assert x.dtype == np.float32


PAIR, ROWS, SEVEN = ShapeArray((2,)), ShapeArray((2, 3)), ShapeArray((7,), "int64")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: float(PAIR), ValueError, r"only an array of one element is a number, not shape \(2,\)"),
        (lambda: operator.setitem(ROWS, 0, ROWS), ValueError, r"from shape \(2, 3\) into shape \(3,\)"),
        (lambda: operator.setitem(ROWS, 0, ShapeArray((4,))), ValueError, r"from shape \(4,\) into shape \(3,\)"),
        (lambda: ROWS[ROWS > 0], TypeError, "depends on data"),
        (lambda: operator.iadd(SEVEN, ShapeArray((7,))), TypeError, "cannot cast output from float64 to int64"),
        (lambda: xp.add.at(ROWS, SEVEN, ShapeArray((6, 3))), ValueError, "could not broadcast|from shape|mismatch"),
        (lambda: xp.einsum("ab,bc->ac", ROWS, ShapeArray((4, 5))), ValueError, "'b' is both 3 and 4"),
        (lambda: xp.einsum("ab,bc", ROWS), ValueError, "2 terms for 1 operands"),
        (
            lambda: attention(xp, *(ShapeArray((1, 1, 4, d)) for d in (2, 3, 3)), True, 1.0), ValueError,
            "2 columns do not match 3 rows",
        ),
        (
            lambda: embedding_backward(xp, ShapeArray((5, 3)), SEVEN, ShapeArray((7, 2))), ValueError,
            r"from shape \(7, 2\)",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_numpy_operands_on_the_left():
    assert (np.ones(3, np.float32) * ShapeArray((2, 3), "float32")).shape == (2, 3)
    assert (np.ones((4, 2)) @ ShapeArray((2, 3))).shape == (4, 3)


def test_add_at_takes_what_fits():
    xp.add.at(ShapeArray((5, 3)), SEVEN, ShapeArray((7, 3)))


OF_ONE: dict[str, list[dict[str, Any]]] = {
    "pad": [{"pad_width": ((0, 0), (1, 2), (3, 0))}], "sort": [{}, {"axis": None}], "argsort": [{"axis": 0}],
    "cumsum": [{"axis": -1}, {}], "cumprod": [{"axis": 0}], "diff": [{"axis": 1}], "roll": [{"shift": 1, "axis": 0}],
    "repeat": [{"repeats": 3, "axis": 1}, {"repeats": [1, 0, 2], "axis": 1}], "tile": [{"reps": (2, 1, 1, 3)}],
    "tril": [{}], "copy": [{}], "asarray": [{"dtype": np.float64}], "round": [{"decimals": 2}], "nan_to_num": [{}],
    "fft.fft": [{}, {"n": 9, "axis": 1}], "fft.rfft": [{"axis": 0}], "fft.fft2": [{}], "fft.rfft2": [{}],
    "fft.rfftn": [{"axes": (1, 2)}], "fft.fftn": [{"s": (5, 6), "axes": (0, 1)}], "fft.fftshift": [{}],
    "linalg.norm": [{"axis": -1, "keepdims": True}],
}  # fmt: skip
"""Functions of one array, with options."""

AT = np.array([2, 0, 1])
COUNTED = {
    **{
        f"{name} {options}": lambda m, x, name=name, options=options: operator.attrgetter(name)(m)(x, **options)
        for name, every in OF_ONE.items()
        for options in every
    },
    "concatenate": lambda m, x: m.concatenate([x, x], axis=1),
    "concatenate, flat": lambda m, x: m.concatenate([x, x], axis=None),
    "stack": lambda m, x: m.stack((x, x)),
    "hstack": lambda m, x: m.hstack([x, x]),
    "vstack": lambda m, x: m.vstack([x[0, 0], x[1, 0]]),
    "take": lambda m, x: m.take(x, m.asarray(AT), axis=1),
    "take, flat": lambda m, x: m.take(x, m.asarray(AT)),
    "take_along_axis": lambda m, x: m.take_along_axis(x, m.argsort(x, axis=1), axis=1),
    "fancy": lambda m, x: x[:, m.asarray(AT)],
    "fancy, a list": lambda m, x: x[:, [2, 0]],
    "where": lambda m, x: m.where(x > 0, x, 0.0),
    "arctan2": lambda m, x: m.arctan2(x, x),
    "logaddexp": lambda m, x: m.logaddexp(x, x),
    "searchsorted": lambda m, x: m.searchsorted(m.asarray(np.arange(3.0)), x),
    "tensordot": lambda m, x: m.tensordot(x, x, axes=([1, 2], [1, 2])),
    "dot": lambda m, x: m.dot(x, x[0].T),
    "einsum": lambda m, x: m.einsum("bij,bkj->bik", x, x),
    "einsum, implicit": lambda m, x: m.einsum("bij,bkj", x, x),
    "einsum, dots": lambda m, x: m.einsum("...ij,kj->...ik", x, x[0]),
    "einsum, of one": lambda m, x: m.einsum("bij->j", x),
    "einsum, elements": lambda m, x: m.einsum("bij,ij->bij", x, x[0]),
    "einsum, of three": lambda m, x: m.einsum("bij,bjk,bkl->bil", x, x.swapaxes(1, 2), x),
    "ifft": lambda m, x: m.fft.ifft(m.fft.fft(x)),
    "irfft": lambda m, x: m.fft.irfft(m.fft.rfft(x), n=4),
    "irfftn": lambda m, x: m.fft.irfftn(m.fft.rfftn(x, axes=(0, 2)), axes=(0, 2)),
    "inv": lambda m, x: m.linalg.inv(m.eye(3, dtype=np.float32) + 0 * x[:, :, :3]),
    "det": lambda m, x: m.linalg.det(x[:, :, :3]),
    "solve": lambda m, x: m.linalg.solve(m.eye(3, dtype=np.float32) + 0 * x[:, :, :3], x),
}
FLOPS = {"einsum", "dot", "tensordot", "fft", "ifft", "rfft", "irfft", "inv", "det", "solve"}


@pytest.mark.parametrize("name", COUNTED)
def test_functions_of_layers_give_what_numpy_gives_and_are_counted(name):
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    same(COUNTED[name], x)
    with counting_work() as work:
        found = COUNTED[name](xp, ghost(x))
    assert work.nbytes + sum(one.nbytes * times for one, times in work.products.items()) >= found.nbytes
    if any(word in name for word in FLOPS) and name not in ("fft.fftshift {}", "einsum, of one", "einsum, elements"):
        assert work.flops > 0


def test_an_einsum_takes_the_flops_of_its_product():
    for letters in ("bij,bkj->bik", "bij,bkj->ik"):
        with counting_work() as work:
            xp.einsum(letters, ShapeArray((2, 3, 4)), ShapeArray((2, 3, 4)))
        assert work.flops == 2 * 2 * 3 * 3 * 4


@pytest.mark.parametrize("write", [
    lambda m, x: x.__setitem__((slice(None), m.asarray(AT)), 1.0),
    lambda m, x: x.__setitem__(x > 0, 1.0),
    lambda m, x: m.put_along_axis(x, m.argsort(x, axis=1), x, axis=1),
    lambda m, x: m.copyto(x, x),
])  # fmt: skip
def test_what_is_written_is_counted(write):
    with counting_work() as work:
        write(xp, ShapeArray((2, 3, 4), "float32"))
    assert work.nbytes >= 96


def test_views_and_what_is_an_array_already_cost_nothing():
    x = ShapeArray((4, 6), "float32")
    with counting_work() as work, measuring_shape_only_memory() as meter:
        views = [*xp.split(x, 2), xp.asarray(x), xp.flip(x), xp.diagonal(x), xp.einsum("ij->ji", x), x[1:, None]]
    assert (work.nbytes, meter.peak) == (0, 0)
    assert all(one.root is x.root for one in views)


@pytest.mark.parametrize("name", ["unique", "nonzero", "linalg.svd", "fft.hfft", "percentile", "interp"])
def test_a_function_that_is_not_known_is_named(name):
    with pytest.raises(AttributeError, match=rf"env\.xp\.{name}, which shape-only arrays do not support"):
        operator.attrgetter(name)(xp)


x, w, h = noise(6, 4), noise(4), noise(2, 3, 2, 4)
ALL: dict[str, list[tuple[Any, ...]]] = CALLS | {
    "channels_last": [(h,)],
    "to_float32": [(x,)], "cast_float_to_dtype": [(x, np.dtype("float16"))], "store": [(x, x)], "add_widened": [(x, x)],
    "silu": [(x,)], "silu_backward": [(x, x)], "sigmoid": [(x,)], "gated": [(x, x)],
    "leaky_relu": [(x, 0.1)], "leaky_relu_backward": [(x, x, 0.1)], "elu": [(x, 1.0)], "elu_backward": [(x, x, 1.0)],
    "softplus": [(x, 1.0, 20.0)], "softplus_backward": [(x, x, 1.0, 20.0)], "sigmoid_backward": [(x, x)],
    "tanh_backward": [(x, x)], "gated_backward": [(x, x, x, "gelu")], "rotate": [(h, noise(3, 2), noise(3, 2))],
    "binary_entropy": [(x, x)], "binary_entropy_backward": [(x, x, 2.0)], "squared_error_backward": [(x, x, 2.0)],
    "squared_error_gradient_and_sum": [(x, x, 2.0)], "huber_error": [(x, x, 0.5)],
    "huber_error_backward": [(x, x, 0.5, 2.0)], "huber_error_gradient_and_sum": [(x, x, 0.5, 2.0)],
}  # fmt: skip
if is_present("meshes"):
    import segment_kernels

    ALL |= segment_kernels.CALLS


def test_every_kernel_is_here():
    assert KERNELS - {*ALL} == {"round_randomly"}  # updates without data do nothing


def described(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(tuple(r.shape), r.dtype) if hasattr(r, "shape") else type(r) for r in results]


@pytest.mark.parametrize("name", ALL)
def test_same_shapes_and_dtypes(name, dtype):
    for arguments in ALL[name]:
        real = arguments_of(name, arguments, dtype.name)
        ghosts = [each(ghost, a) for a in real]
        want = kernel_of(name)(np, *real)
        assert described(kernel_of(name)(shapes, *ghosts)) == described(want)


@pytest.mark.parametrize("name", ALL)
def test_what_is_remembered_takes_the_same_memory(name):
    def call():
        ghosts = [each(ghost, a) for a in arguments_of(name, ALL[name][0], "float32")]
        with measuring_shape_only_memory() as meter:
            results = kernel_of(name)(shapes, *ghosts)
            roots = [getattr(r, "root", None) for r in (results if isinstance(results, tuple) else (results,))]
            others = [getattr(g, "root", None) for g in ghosts]
            shared = [[one is not None and one is other for other in (*roots, *others)] for one in roots]
            return described(results), shared, meter.live, meter.peak

    known_of._results.clear()
    assert call() == call()


def test_threads_that_count_memory_do_not_see_each_other():
    inside = threading.Barrier(2)

    def count(nbytes):
        with measuring_shape_only_memory() as meter:
            inside.wait()
            array = shapes.zeros(nbytes, "u1")
            inside.wait()
            return meter.live, array

    with ThreadPoolExecutor(2) as pool:
        assert [live for live, _ in pool.map(count, (10, 20))] == [10, 20]


def test_a_function_runs_once_for_each_kind_of_arguments():
    ran = []

    def first_of(xp, *arrays, scale=1, into=()):
        ran.append(scale)
        if arrays[0].ndim > 2:
            raise ValueError("too many dims")
        return arrays[0][:1], xp.zeros((2, *arrays[-1].shape)), arrays[-1], None

    a, b = ShapeArray((3, 4), "f4"), ShapeArray((4,), "f8")
    for _ in range(2):
        view, made, same, nothing = call_cached(first_of, shapes, a, b)
        assert (view.shape, view.dtype, made.shape, nothing) == ((1, 4), np.dtype("f4"), (2, 4), None)
        assert (view.root is a.root, made.root is a.root, same is b) == (True, False, True)
    assert len(ran) == 1
    call_cached(first_of, shapes, a, a.copy())
    view, _, same, _ = call_cached(first_of, shapes, a, a.T.T)
    assert same is not a
    assert same.root is view.root
    call_cached(first_of, shapes, a, a)
    assert len(ran) == 4, "arrays that share memory are another kind"
    for scale in (1, 1.0, True, 2, 2):
        call_cached(first_of, shapes, a, b, scale=scale)
    assert ran[4:] == [1, 1.0, True, 2]
    for _ in range(2):
        call_cached(first_of, shapes, a, into=[])
        with pytest.raises(ValueError, match="too many dims"):
            call_cached(first_of, shapes, ShapeArray((1, 1, 1)))
    assert len(ran) == 12, "neither lists nor errors are remembered"
