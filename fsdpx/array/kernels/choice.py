"""Which code runs a kernel: a fixed table, so that every rank computes the same bits.

The table follows `bench/kernels.py`; it never depends on a measurement made while a job runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from fsdpx.errors import ConfigError

__all__ = ["NUMBA", "Mode", "chosen", "compiled", "installed", "kernel", "use"]

Mode = Literal["default", "plain", "numba"]

NUMBA = frozenset({
    "add", "add_bias", "add_widened", "attention", "attention_backward", "bias_gelu", "cross_entropy",
    "cross_entropy_backward", "drop", "drop_backward", "embedding_backward", "gelu", "gelu_again", "gelu_backward",
    "layer_norm", "layer_norm_backward_input", "layer_norm_backward_params", "normal", "rms_norm",
    "rms_norm_backward_input", "rms_norm_backward_params", "sigmoid", "silu", "silu_backward", "softmax",
    "softmax_backward", "square_sum", "square_sums", "store", "sum_rows",
})  # fmt: skip
"""The kernels that run as Numba code by default, each with its reason in the table of `bench/kernels.py`."""

COMPILED = "fsdpx.array.kernels.compiled"
_mode: Mode = "default"


@contextmanager
def use(mode: Mode) -> Iterator[None]:
    """Inside the block all kernels of the process run as "plain" code, as "numba" code where there is any, or by
    the table ("default"). For tests and measurements: it acts on all threads.
    """
    global _mode
    if mode not in ("default", "plain", "numba"):
        raise ConfigError(f"kernels.use({mode!r}): choose one of default, plain, numba")
    if mode == "numba" and not installed():
        raise ConfigError("kernels.use('numba'): Numba is not installed: pip install numba")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def chosen(name: str) -> Literal["plain", "numba"]:
    """What runs kernel `name` on contiguous float32 or float64 NumPy arrays."""
    wanted = _mode == "numba" or (_mode == "default" and name in NUMBA)
    return "numba" if wanted and installed() and _compiled(name) is not None else "plain"


def kernel(
    *, narrow: int = 1, into: tuple[str, ...] = (), halves: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a plain function `f(xp, array, ...)` a kernel: 16-bit arrays are computed in float32, and on float32
    and float64 NumPy arrays its compiled namesake may run instead.

    narrow: how many of the results are rounded back to the 16-bit dtype of the first array.
    into: names of arguments that are changed in place; they are passed on as they are.
    halves: False if the plain code itself knows what to do with 16-bit arrays.
    """

    def register(plain: Callable[..., Any]) -> Callable[..., Any]:
        name = plain.__name__
        kept = {place - 1 for place, word in enumerate(inspect.signature(plain).parameters) if word in into}
        bodies: dict[tuple[Any, ...], Callable[..., Any]] = {}  # by mode and dtypes: looked up once, not per call

        def direct(xp: Any, *arguments: Any, **options: Any) -> Any:
            return choose(xp, arguments)(xp, *arguments, **options)

        def choose(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            fits = xp is np and _mode != "plain" and _compilable(arguments, kept)
            return (_compiled(name) or plain) if fits and _wanted(name) else plain

        def resolve(xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
            narrow_too = halves and arguments[0].dtype.itemsize == 2
            return _through_float32(direct, kept, narrow) if narrow_too else choose(xp, arguments)

        @functools.wraps(plain)
        def run(xp: Any, *arguments: Any, **options: Any) -> Any:
            if xp is not np:
                return resolve(xp, arguments)(xp, *arguments, **options)
            key = (_mode, *[getattr(a, "dtype", None) for a in arguments])
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = resolve(xp, arguments)
            return body(xp, *arguments, **options)

        return run

    return register


def _through_float32(body: Callable[..., Any], kept: set[int], narrow: int) -> Callable[..., Any]:
    """`body` for 16-bit arrays: widened before, results rounded after."""

    def run(xp: Any, *arguments: Any, **options: Any) -> Any:
        from fsdpx.array.kernels.half import narrowed, widened

        dtype = arguments[0].dtype
        result = body(xp, *(a if n in kept else widened(xp, a) for n, a in enumerate(arguments)), **options)
        if not isinstance(result, tuple):
            return narrowed(xp, result, dtype) if narrow else result
        return tuple(narrowed(xp, r, dtype) if n < narrow else r for n, r in enumerate(result))

    return run


def _compilable(arguments: tuple[Any, ...], kept: set[int]) -> bool:
    """All float arrays are NumPy's and of one of the two dtypes that are compiled for."""
    dtypes = {a.dtype.char for n, a in enumerate(arguments) if isinstance(a, np.ndarray) and n not in kept}
    floats = dtypes & {"f", "d"}
    return len(floats) == 1 and dtypes - floats <= set("bBhHiIlLqQ")


def compiled(name: str) -> Callable[..., Any] | None:
    """The compiled code of `name` if it is to run: for kernels that are no `kernel`."""
    return _compiled(name) if _mode != "plain" and _wanted(name) else None


def _wanted(name: str) -> bool:
    """Whether the table and the mode ask for compiled code, and there is Numba."""
    if _mode == "default" and name not in NUMBA:
        return False
    if not installed():
        _warn()
        return False
    return True


@functools.cache
def installed() -> bool:
    """Whether Numba can be imported."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _warn() -> None:
    """Once per process."""
    warnings.warn(
        "fsdpx: Numba is not installed, so kernels run as plain array code (several times slower): pip install numba",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _compiled(name: str) -> Callable[..., Any] | None:
    return getattr(importlib.import_module(COMPILED), name, None)
