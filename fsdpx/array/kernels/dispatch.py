"""A kernel: one name for plain array code and its compiled namesake, with 16-bit floats computed in float32."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.array.kernels import choice
from fsdpx.array.kernels.choice import compiled
from fsdpx.array.kernels.half import narrowed, widened
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.shape_array import as_one

__all__ = ["kernel"]


def kernel(
    *,
    narrow: int = 1,
    into: tuple[str, ...] = (),
    halves: bool = True,
    bits: bool = False,
    wide: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a plain function `f(xp, array, ...)` a kernel: 16-bit arrays are computed in float32, and on float32 and
    float64 NumPy arrays the compiled function of the same name may run instead.

    narrow: how many of the results are rounded back to the 16-bit dtype of the first array.
    into: names of arguments that are changed in place; they are passed on unchanged.
    halves: False if the plain code handles 16-bit arrays itself.
    bits: the compiled code takes bfloat16 arrays itself, as views of their bits.
    wide: names of arguments that are float32 beside bfloat16 arrays."""

    def register(plain: Callable[..., Any]) -> Callable[..., Any]:
        name = plain.__name__
        floats = {place - 1 for place, word in enumerate(inspect.signature(plain).parameters) if word in (*into, *wide)}
        kept = {place - 1 for place, word in enumerate(inspect.signature(plain).parameters) if word in into}
        bodies: dict[tuple[Any, ...], Callable[..., Any]] = {}  # by mode and dtypes: looked up once, not per call

        def direct(xp: Any, *arguments: Any, **options: Any) -> Any:
            return choose(xp, arguments)(xp, *arguments, **options)

        def choose(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            return (compiled(name) or plain) if xp is np and _compilable(arguments, kept) else plain

        def resolve(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            if bits and xp is np and _all_bfloat16(arguments, floats) and (body := compiled(name)):
                return _on_bits(body)
            narrow_too = halves and arguments[0].dtype.itemsize == 2
            return _through_float32(direct, kept, narrow) if narrow_too else choose(xp, arguments)

        @functools.wraps(plain)
        def run(xp: Any, *arguments: Any, **options: Any) -> Any:
            if xp is not np:
                call = resolve(xp, arguments)
                empty = getattr(xp, "holds_no_data", False)
                return as_one(call, xp, *arguments, **options) if empty else call(xp, *arguments, **options)
            key = (choice.active, *[getattr(a, "dtype", None) for a in arguments])
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = resolve(xp, arguments)
            return body(xp, *arguments, **options)

        return run

    return register


def _through_float32(body: Callable[..., Any], kept: set[int], narrow: int) -> Callable[..., Any]:
    """`body` for 16-bit arrays: widened before, results rounded after."""

    def run(xp: Any, *arguments: Any, **options: Any) -> Any:
        dtype = arguments[0].dtype
        result = body(xp, *(a if n in kept else widened(xp, a) for n, a in enumerate(arguments)), **options)
        if not isinstance(result, tuple):
            return narrowed(xp, result, dtype) if narrow else result
        return tuple(narrowed(xp, r, dtype) if n < narrow else r for n, r in enumerate(result))

    return run


def _on_bits(body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` on views of the bits of bfloat16 arrays; what it returns is bfloat16 again."""

    def run(xp: Any, *arguments: Any, **options: Any) -> Any:
        result = body(xp, *(a.view(np.uint16) if _bfloat16(a) else a for a in arguments), **options)
        return tuple(map(back, result)) if isinstance(result, tuple) else back(result)

    def back(a: Any) -> Any:
        return a.view(dtype_of("bf16")) if a is not None and a.dtype == np.uint16 else a

    return run


def _bfloat16(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype.name == "bfloat16"


def _all_bfloat16(arguments: tuple[Any, ...], floats: set[int]) -> bool:
    """All arrays are, but those at `floats` may be float32."""
    arrays = [(n, a) for n, a in enumerate(arguments) if isinstance(a, np.ndarray)]
    fit = all(_bfloat16(a) or (n in floats and a.dtype == np.float32) for n, a in arrays)
    return fit and _bfloat16(arguments[0])


def _compilable(arguments: tuple[Any, ...], kept: set[int]) -> bool:
    """All float arrays are NumPy's and of one of the two dtypes that are compiled for."""
    dtypes = {a.dtype.char for n, a in enumerate(arguments) if isinstance(a, np.ndarray) and n not in kept}
    floats = dtypes & {"f", "d"}
    return len(floats) == 1 and dtypes - floats <= set("bBhHiIlLqQ")
