"""Shape-only arrays against NumPy: the same shapes, dtypes and refusals."""

import operator
import warnings

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fsdpx import shapes as xp
from fsdpx.shapes import ShapeArray

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(80))
DTYPES = st.sampled_from(["float64", "float32", "float16", "int64", "int32", "bool"])


def ghost(array):
    return ShapeArray(array.shape, array.dtype)


def same(function, *operands):
    """`function` on shapes gives the shape and dtype, or the kind of error, that it gives on arrays."""
    try:
        with warnings.catch_warnings(action="ignore"):
            want = np.asarray(function(np, *operands))
    except (ValueError, TypeError, IndexError) as error:
        kind = next(k for k in (IndexError, ValueError, TypeError) if isinstance(error, k))
        with pytest.raises(kind):
            function(xp, *(ghost(o) if isinstance(o, np.ndarray) else o for o in operands))
        return
    got = function(xp, *(ghost(o) if isinstance(o, np.ndarray) else o for o in operands))
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
    for index in (
        (rows,),
        (slice(None), rows),
        (rows, rows),
        (rows, slice(None), 1),
        (..., rows),
        (None, rows, 0),
        (slice(None), rows, slice(None), rows),
        (slice(None), 1, None, rows),
    ):
        kept = tuple(i for i in index if i is not None and i is not ...)
        if len(kept) <= len(shape):
            want = np.ones(shape)[index].shape
            assert ShapeArray(shape)[tuple(ghost(i) if isinstance(i, np.ndarray) else i for i in index)].shape == want


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
    for function in (
        lambda m, x: x.T,
        lambda m, x: x.transpose(2, 0, 1),
        lambda m, x: x.transpose(0, 0, 1),
        lambda m, x: x.swapaxes(0, -1),
        lambda m, x: m.moveaxis(x, 0, -1),
        lambda m, x: m.moveaxis(x, -1, 1),
        lambda m, x: m.expand_dims(x, -1),
        lambda m, x: m.expand_dims(x, 1).squeeze(1),
        lambda m, x: x.squeeze(1),
        lambda m, x: x.reshape(-1, 12),
        lambda m, x: x.reshape(5, -1),
        lambda m, x: x.reshape((4, -1)),
        lambda m, x: x.ravel(),
        lambda m, x: m.broadcast_to(x, (7, *shape)),
        lambda m, x: m.broadcast_to(x, (3,)),
        lambda m, x: m.take_along_axis(x, m.zeros((*x.shape[:2], 1), dtype=np.int64), axis=2),
        lambda m, x: m.take(x, m.zeros((5,), dtype=np.int64), axis=1),
        lambda m, x: m.pad(x, ((0, 0), (1, 2), (0, 3))),
        lambda m, x: m.concatenate([x, x], axis=1),
        lambda m, x: m.stack([x, x], axis=-1),
        lambda m, x: m.split(x, 3, axis=1)[2],
        lambda m, x: m.einsum("abc,adc->bd", x, x),
        lambda m, x: m.cumsum(x, axis=1),
        lambda m, x: m.triu(x[0:1].reshape(x[0:1].shape)),
        lambda m, x: x.view(np.int32),
        lambda m, x: x.view(np.float64),
        lambda m, x: x.astype(np.float16),
        lambda m, x: -abs(x),
        lambda m, x: ~(x > 0),
        lambda m, x: m.isfinite(x),
        lambda m, x: m.zeros_like(x, dtype=np.int8),
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
    with pytest.raises(ValueError, match=r"only an array of one element is a number, not shape \(2,\)"):
        float(ShapeArray((2,)))


def test_assignment_must_fit():
    x = ShapeArray((2, 3))
    x[0] = ShapeArray((3,))
    x[...] = 1.0
    x[x > 0] = 0.0
    x[...] = ShapeArray((2, 1))
    x[0] = ShapeArray((1, 1, 3))
    with pytest.raises(ValueError, match=r"from shape \(2, 3\) into shape \(3,\)"):
        x[0] = ShapeArray((2, 3))
    with pytest.raises(ValueError, match=r"from shape \(4,\) into shape \(3,\)"):
        x[0] = ShapeArray((4,))


def test_a_mask_selects_nobody_knows_how_much():
    x = ShapeArray((2, 3))
    with pytest.raises(TypeError, match="depends on data"):
        x[x > 0]


def test_in_place_keeps_dtype_and_refuses_what_numpy_refuses():
    x = ShapeArray((2, 3), "float32")
    x += ShapeArray((3,), "float64")
    assert x.dtype == np.float32
    with pytest.raises(TypeError, match="cannot cast output from float64 to int64"):
        operator.iadd(ShapeArray((2,), "int64"), ShapeArray((2,)))


def test_numpy_operands_on_the_left():
    assert (np.ones(3, np.float32) * ShapeArray((2, 3), "float32")).shape == (2, 3)
    assert (np.ones((4, 2)) @ ShapeArray((2, 3))).shape == (4, 3)


def test_add_at_checks_shapes():
    xp.add.at(ShapeArray((5, 3)), ShapeArray((7,), "int64"), ShapeArray((7, 3)))
    with pytest.raises(ValueError, match=r"could not broadcast|from shape|mismatch"):
        xp.add.at(ShapeArray((5, 3)), ShapeArray((7,), "int64"), ShapeArray((6, 3)))


def test_einsum_names_what_is_wrong():
    with pytest.raises(ValueError, match="'b' is both 3 and 4"):
        xp.einsum("ab,bc->ac", ShapeArray((2, 3)), ShapeArray((4, 5)))
    with pytest.raises(ValueError, match="spell out one term per operand"):
        xp.einsum("ab,bc", ShapeArray((2, 3)), ShapeArray((3, 5)))
