"""The decorator `kernel`, which combines plain array code and the compiled function of the same name into one kernel.
The kernel computes in float32 if its arrays are 16-bit floats."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.core.array.kernels import choice
from fsdpx.core.array.kernels.choice import find_compiled_kernel, find_device_kernel
from fsdpx.core.array.kernels.half import cast_float_to_dtype, to_float32
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.shapes.shape_cache import call_cached

__all__ = ["kernel"]


def kernel(
    *, narrow: int = 1, into: tuple[str, ...] = (), bits: bool = True,
    choose_algorithm: Callable[..., Any] | None = None, compiled_in: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Return a decorator that turns a plain function `f(xp, array, ...)` into a kernel.

    For 16-bit arrays, the kernel computes in float32. For float32, float64 or bfloat16 NumPy arrays (bfloat16 may be
    mixed with float32), the compiled function of the same name may run instead of the plain function. For CuPy arrays,
    the CUDA C function of the same name may run.

    Parameters
    ----------
    narrow : number of leading results of the plain code that are rounded to the 16-bit dtype of the first array
    into : names of arguments that are modified in place, and are therefore not converted to float32
    bits : whether the compiled code accepts views of the bits of bfloat16 arrays; if false, bfloat16 arrays are
        converted to float32
    choose_algorithm : function that takes the arguments after xp, uses only their shapes, and returns two values: the
        name of the algorithm that the compiled code uses ("" for the usual one), and the value of
        `ProductCount.windows`
    compiled_in : name of the file that contains the compiled code, if it differs from the plain code's file
    """

    def make_kernel(plain: Callable[..., Any]) -> Callable[..., Any]:
        name = plain.__name__
        kept = {place - 1 for place, word in enumerate(inspect.signature(plain).parameters) if word in into}
        # implementations keyed by mode and dtypes, so that each is looked up only once
        bodies: dict[tuple[Any, ...], Callable[..., Any]] = {}

        def call_body(xp: Any, *arguments: Any, **options: Any) -> Any:
            return choose_body(xp, arguments)(xp, *arguments, **options)

        def call_plain(xp: Any, *arguments: Any, **options: Any) -> Any:
            """Run the kernel as plain array code, for arguments that its compiled code rejects. For 16-bit arrays,
            compute in float32."""
            if arguments[0].dtype.itemsize != 2:
                return plain(xp, *arguments, **options)
            return _wrap_to_compute_in_float32(plain if kept else call_body, kept, narrow)(xp, *arguments, **options)

        def choose_body(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            fits = xp is np and _list_float_dtypes(arguments, kept) in ({"float32"}, {"float64"})
            return (find_compiled_kernel(name) or plain) if fits else plain

        def resolve_body(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            if (form := find_device_kernel(name, xp, arguments)) is not None:
                return form
            fits = bits and xp is np and _list_float_dtypes(arguments, kept) in ({"bfloat16"}, {"bfloat16", "float32"})
            if fits and (body := find_compiled_kernel(name)):
                return _wrap_to_compute_on_bits(body, {n for n, a in enumerate(arguments) if _is_bfloat16(a)})
            return (
                _wrap_to_compute_in_float32(call_body, kept, narrow)
                if arguments[0].dtype.itemsize == 2
                else choose_body(xp, arguments)
            )

        def call_resolved(xp: Any, *arguments: Any, **options: Any) -> Any:
            return resolve_body(xp, arguments)(xp, *arguments, **options)

        call_resolved.__name__, call_resolved.choose_algorithm = name, choose_algorithm  # type: ignore[attr-defined] # read by shape_cache.py

        @functools.wraps(plain)
        def run_kernel(xp: Any, *arguments: Any, **options: Any) -> Any:
            if xp is not np:
                empty = getattr(xp, "holds_no_data", False)
                return (
                    call_cached(call_resolved, xp, *arguments, **options)
                    if empty
                    else call_resolved(xp, *arguments, **options)
                )
            key = (choice.active_mode, *[getattr(a, "dtype", None) for a in arguments])
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = resolve_body(xp, arguments)
            return body(xp, *arguments, **options)

        run_kernel.fallback = call_plain  # type: ignore[attr-defined]
        return choice.register_plain_kernel(name, run_kernel, compiled_in)

    return make_kernel


def _wrap_to_compute_in_float32(body: Callable[..., Any], kept: set[int], narrow: int) -> Callable[..., Any]:
    """Return a function that converts 16-bit arrays to float32, calls `body`, and rounds the first `narrow` results to
    16 bits. Arguments at the positions `kept` are not converted."""

    def run_widened(xp: Any, *arguments: Any, **options: Any) -> Any:
        dtype = arguments[0].dtype
        result = body(xp, *(a if n in kept else to_float32(xp, a) for n, a in enumerate(arguments)), **options)
        if not isinstance(result, tuple):
            return cast_float_to_dtype(xp, result, dtype) if narrow else result
        return tuple(cast_float_to_dtype(xp, r, dtype) if n < narrow else r for n, r in enumerate(result))

    return run_widened


def _wrap_to_compute_on_bits(body: Callable[..., Any], positions: set[int]) -> Callable[..., Any]:
    """Return a function that calls `body`. Bfloat16 arrays at `positions` are passed as views of their bits (uint16),
    and results that consist of such bits are returned as bfloat16 views."""
    bfloat16, word = parse_dtype("bf16"), np.dtype(np.uint16)

    def run_on_bits(xp: Any, *arguments: Any, **options: Any) -> Any:
        result = body(xp, *[a.view(word) if n in positions else a for n, a in enumerate(arguments)], **options)
        return tuple(map(view_back, result)) if isinstance(result, tuple) else view_back(result)

    def view_back(a: Any) -> Any:
        return a.view(bfloat16) if getattr(a, "dtype", None) == word else a

    return run_on_bits


def _is_bfloat16(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype.name == "bfloat16"


def _list_float_dtypes(arguments: tuple[Any, ...], kept: set[int]) -> set[str]:
    """Return the dtypes of the NumPy arrays among the arguments. Integer arrays and arrays at the positions `kept` are
    left out."""
    dtypes = {a.dtype for n, a in enumerate(arguments) if isinstance(a, np.ndarray) and n not in kept}
    return {dtype.name for dtype in dtypes if dtype.kind not in "biu"}
