"""A kernel: one name for plain array code and its compiled namesake, with 16-bit floats computed in float32."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.core.array.kernels import choice
from fsdpx.core.array.kernels.choice import compiled, on_device
from fsdpx.core.array.kernels.half import narrowed, widened
from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.array.shapes.shape_cache import known

__all__ = ["kernel"]


def kernel(
    *, narrow: int = 1, into: tuple[str, ...] = (), bits: bool = True, way: Callable[..., Any] | None = None,
    compiled_in: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Make a plain function `f(xp, array, ...)` a kernel: 16-bit arrays are computed in float32, and on NumPy arrays of
    float32, float64, or bfloat16 with some of float32, the compiled function of the same name may run instead; on
    arrays of CuPy the CUDA C of that name.

    narrow: how many of the results of the plain code are rounded back to the 16-bit dtype of the first array.
    into: names of arguments that are changed in place; they are passed on unchanged.
    bits: the compiled code takes bfloat16 arrays, as views of their bits; else they are widened for it. way: from the
    shapes of the arguments behind xp, the name of the way that the compiled code goes, "" for the usual one, and
    `Product.windows`. compiled_in: the file of the compiled code, if it is called otherwise than the plain one."""

    def register(plain: Callable[..., Any]) -> Callable[..., Any]:
        name = plain.__name__
        kept = {place - 1 for place, word in enumerate(inspect.signature(plain).parameters) if word in into}
        bodies: dict[tuple[Any, ...], Callable[..., Any]] = {}  # by mode and dtypes: looked up once, not per call

        def direct(xp: Any, *arguments: Any, **options: Any) -> Any:
            return choose(xp, arguments)(xp, *arguments, **options)

        def fallback(xp: Any, *arguments: Any, **options: Any) -> Any:
            """Without the compiled code for this dtype, for what that does not take."""
            if arguments[0].dtype.itemsize != 2:
                return plain(xp, *arguments, **options)
            return _through_float32(plain if kept else direct, kept, narrow)(xp, *arguments, **options)

        def choose(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            fits = xp is np and _floats(arguments, kept) in ({"float32"}, {"float64"})
            return (compiled(name) or plain) if fits else plain

        def resolve(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            if (form := on_device(name, xp, arguments)) is not None:
                return form
            fits = bits and xp is np and _floats(arguments, kept) in ({"bfloat16"}, {"bfloat16", "float32"})
            if fits and (body := compiled(name)):
                return _on_bits(body, {n for n, a in enumerate(arguments) if _bfloat16(a)})
            return _through_float32(direct, kept, narrow) if arguments[0].dtype.itemsize == 2 else choose(xp, arguments)

        def resolved(xp: Any, *arguments: Any, **options: Any) -> Any:
            return resolve(xp, arguments)(xp, *arguments, **options)

        resolved.__name__, resolved.way = name, way  # type: ignore[attr-defined]  # they tell work on shapes apart
        @functools.wraps(plain)
        def run(xp: Any, *arguments: Any, **options: Any) -> Any:
            if xp is not np:
                empty = getattr(xp, "holds_no_data", False)
                return known(resolved, xp, *arguments, **options) if empty else resolved(xp, *arguments, **options)
            key = (choice.active, *[getattr(a, "dtype", None) for a in arguments])
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = resolve(xp, arguments)
            return body(xp, *arguments, **options)

        run.fallback = fallback  # type: ignore[attr-defined]
        return choice.add_kernel(name, run, compiled_in)

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


def _on_bits(body: Callable[..., Any], places: set[int]) -> Callable[..., Any]:
    """`body` on views of the bits of the arrays at `places`; of what it returns, bits are bfloat16 again."""
    bfloat16, word = dtype_of("bf16"), np.dtype(np.uint16)

    def run(xp: Any, *arguments: Any, **options: Any) -> Any:
        result = body(xp, *[a.view(word) if n in places else a for n, a in enumerate(arguments)], **options)
        return tuple(map(back, result)) if isinstance(result, tuple) else back(result)

    def back(a: Any) -> Any:
        return a.view(bfloat16) if getattr(a, "dtype", None) == word else a

    return run


def _bfloat16(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype.name == "bfloat16"


def _floats(arguments: tuple[Any, ...], kept: set[int]) -> set[str]:
    """The dtypes of NumPy arrays, without integers and what is changed in place."""
    dtypes = {a.dtype for n, a in enumerate(arguments) if isinstance(a, np.ndarray) and n not in kept}
    return {dtype.name for dtype in dtypes if dtype.kind not in "biu"}
