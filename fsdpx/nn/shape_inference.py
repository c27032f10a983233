"""Infer the shapes of all values of a model in a dry run on arrays without data."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from fsdpx.core.array import shapes as xp
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.random import Random
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.container import Container
from fsdpx.nn.layer import Array, LayerAxes, LayerContext, Params, find_sequence_length
from fsdpx.nn.layer_list import NUMBERS, LayerList, Node, find_dtypes_read_by_inputs, linearize

__all__ = [
    "CALLS_NUMPY", "UNKNOWN", "get_or_memoize", "is_missing_function_error", "is_numpy_call_error", "memoizing",
    "output_shapes", "value_shapes",
]  # fmt: skip

T = TypeVar("T")


class OneRank:
    """A mesh of one rank for shape-only forward passes. The object also serves as each axis of this mesh. An all-reduce
    does nothing, because the arrays have no data."""

    rank, size, counters = 0, 1, None

    @property
    def tensor(self) -> Any:
        return self

    data = parts = tensor
    domain: tuple[Any, ...] = ()

    def all_reduce(self, buf: Array, op: Any = "sum", *, what: str = "") -> "OneRank":
        return self

    def wait(self) -> None:
        return None


def output_shapes(
    model: LayerList, inputs: Sequence[Any], dtype: Any = "float32", axes: LayerAxes | None = None
) -> list[Any]:
    """Return the outputs of a model on this rank as shape-only arrays.

    `inputs` contains one array per input; only its shape and dtype are read. `dtype` is the dtype of the parameters.
    `axes` is the connected mesh of this rank, for models that are sharded over a tensor axis; None means one rank.
    Raise ShapeError if an input of a layer does not fit; the message contains the path of the layer, the inputs and
    their sources, and the shape that the layer needs. Raise ConfigError, with the path of the layer, if a layer calls
    numpy directly or returns a dtype that the model does not compute in."""
    values = value_shapes(model, inputs, dtype, axes=axes)
    return [values[i] for i in model.outputs]


def value_shapes(
    model: LayerList,
    inputs: Sequence[Any],
    dtype: Any = "float32",
    training: bool = True,
    axes: LayerAxes | None = None,
) -> list[Any]:
    """Return all values of a model (inputs, then the results of each node) as shape-only arrays. The arguments and
    errors are the same as for `output_shapes`."""
    if len(inputs) != len(model.inputs):
        raise ShapeError(f"the model takes {len(model.inputs)} inputs ({', '.join(model.inputs)}), got {len(inputs)}")
    inputs = [xp.ShapeArray(tuple(x.shape), x.dtype) for x in inputs]
    axes, real = axes or OneRank(), parse_dtype(dtype) if isinstance(dtype, str) else dtype
    lines = [(line.rank, line.size) for line in (axes.tensor, axes.data, *axes.domain)]
    key = "shapes", model, inputs, real, training, lines
    shapes_and_dtypes = get_or_memoize(
        key, lambda: [(one.shape, one.dtype) for one in _infer_shapes(model, inputs, real, training, axes)]
    )
    return [xp.ShapeArray(*one) for one in shapes_and_dtypes]


def _infer_shapes(model: LayerList, inputs: Sequence[Any], real: Any, training: bool, axes: LayerAxes) -> list[Any]:
    env = LayerContext(xp, axes, Random(0), training, time=find_sequence_length(inputs), dtype=real)
    values, known = list(inputs), dict[Any, list[tuple[Any, Any]]]()
    for node in model.nodes:
        key = (id(node.layer), *((values[i].shape, values[i].dtype) for i in node.inputs))
        if key in known:  # a layer that occurs several times runs once per combination of input shapes
            values.extend(xp.ShapeArray(*one) for one in known[key])
            continue
        p = {
            name: xp.ShapeArray(spec.local_shape(axes.tensor.rank, axes.tensor.size), real)
            for name, spec in node.layer.specs().items()
        }
        x = [values[i] for i in node.inputs]
        try:
            results, wrong, cause = _run_node_on_shapes(env, node, p, x, real)
        except (ValueError, IndexError) as error:
            hint = f". As indices: {TAKES}" if isinstance(error, IndexError) else ""
            raise ShapeError(_describe_misfit(model, node, values, error) + hint) from error
        if wrong:
            if isinstance(node.layer, Container):  # run children one by one, so that the error names the failing child
                value_shapes(linearize(node.layer, node.path, units=True), x, real, training, axes)
            raise ConfigError(f"layer {node.path!r} {node.layer!r} {wrong}") from cause
        if all(isinstance(y, xp.ShapeArray) for y in results):
            known[key] = [(y.shape, y.dtype) for y in results]
        values.extend(results)
    return values


def _run_node_on_shapes(
    env: LayerContext, node: Node, p: Params, x: Sequence[Any], dtype: Any
) -> tuple[Sequence[Any], str, Exception | None]:
    """Run a layer on shape-only arrays. Return three values: the layer's results, text that says what is wrong with the
    layer ("" if nothing is), and the exception that the layer raised (None if there is none)."""
    try:
        found = node.layer.forward_shape_only(env.child(node.path), p, x[0] if len(x) == 1 else tuple(x))
    except Exception as error:
        if is_numpy_call_error(error):
            return (), f"{CALLS_NUMPY} ({error})", error
        if is_missing_function_error(error):
            return (), f"calls {error}; {UNKNOWN}", error
        error.add_note(f"in forward of layer {node.path!r} {node.layer!r}")
        raise
    results, count = found if isinstance(found, tuple) else (found,), len(node.outputs)
    if len(results) != count:
        return results, f"returns {len(results)} arrays, but declares n_outputs = {count}", None
    for y in results:
        if not hasattr(y, "dtype"):
            return results, f"returns {type(y).__name__} where an array is needed", None
        if not y.shape:
            return results, RETURNS_NUMBER, None
    if any(part.dtype.kind in "iub" for part in x):
        words = find_dtypes_read_by_inputs(node.layer, len(x), [frozenset()] * node.layer.n_outputs)
        odd = [part.dtype for part, word in zip(x, words, strict=True) if part.dtype.kind in "iub" and word == NUMBERS]
        if odd:
            return results, f"takes numbers, but gets {odd[0]}: {TAKES}", None
    for y in results:
        if y.dtype.kind == "f" and y.dtype not in (dtype, *(part.dtype for part in x)):
            cure = "make constants Python floats, and arrays by env.xp with dtype=x.dtype"
            return results, f"returns {y.dtype} where the model computes in {np.dtype(dtype)}: {cure}", None
    return results, "", None


TAKES = 'a layer that takes whole numbers says so in its class, takes = "indices"'
RETURNS_NUMBER = (
    "returns a single number, such as its loss: return predictions with one row per sample (models of transformers do "
    "so without labels), and give distribute the loss as loss=..."
)
CALLS_NUMPY = (
    "calls numpy itself: use env.xp, which is numpy, cupy or, when shapes are followed through the model before "
    "anything is computed, arrays without data"
)
UNKNOWN = "write it with functions that they know, or give env.xp.empty of the shape where env.xp.holds_no_data is true"


def is_missing_function_error(error: Exception) -> bool:
    """Return whether an exception was raised because shape-only arrays lack the NumPy function that was called."""
    return isinstance(error, AttributeError) and getattr(error.obj, "holds_no_data", False) is True


def is_numpy_call_error(error: Exception) -> bool:
    """Return whether an exception was raised because a NumPy function was called on a shape-only array."""
    return isinstance(error, TypeError) and "ShapeArray" in str(error)


def _describe_misfit(model: LayerList, node: Node, values: Sequence[Any], error: Exception) -> str:
    got = [f"{tuple(values[i].shape)} {values[i].dtype} from {_describe_value_source(model, i)}" for i in node.inputs]
    return f"layer {node.path!r} {node.layer!r} does not fit: {error}. It got {'; '.join(got)}"


def _describe_value_source(model: LayerList, value: int) -> str:
    if value < len(model.inputs):
        return f"the model's input {model.inputs[value]!r}"
    node = model.find_node_of_value(value)
    return f"layer {node.path!r} {node.layer!r}"


class _MemoizedResults(threading.local):
    """Results stored by `get_or_memoize` in this thread, keyed by the `key` argument. Keys contain the ids of objects.
    Each entry also holds these objects, because Python could otherwise free them and give their ids to new objects."""

    results: dict[Any, tuple[Any, list[Any]]] | None = None


_kept = _MemoizedResults()


@contextmanager
def memoizing() -> Iterator[None]:
    """Context manager within which `get_or_memoize` stores its results, so that repeated dry runs of a model do not
    repeat the same work."""
    before = _kept.results
    _kept.results = {} if before is None else before
    try:
        yield
    finally:
        _kept.results = before


def get_or_memoize(key: tuple[Any, ...], find: Callable[[], T]) -> T:
    """Return `find()` or, inside a `memoizing` block, the stored result of an earlier call with an equal key. Callers
    must not change the result.

    `key` must contain everything that the result depends on. In the key, shape-only arrays are compared by shape and
    dtype; numbers, strings and dtypes by value; and other objects, such as models, by identity."""
    if _kept.results is None:
        return find()
    held: list[Any] = []
    known_as = _make_memo_key(key, held)
    if known_as not in _kept.results:
        _kept.results[known_as] = find(), held
    result: T = _kept.results[known_as][0]
    return result


def _make_memo_key(value: Any, held: list[Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value), *[_make_memo_key(one, held) for one in value]
    if isinstance(value, xp.ShapeArray):
        return value.shape, value.dtype
    if value is None or isinstance(value, int | float | str | np.dtype | type):
        return type(value), value
    held.append(value)
    return id(value)
