"""Which code runs a kernel: a fixed table, so that every rank computes the same bits.

The table follows `bench/kernels.py`; it never depends on a measurement made while a job runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from fsdpx.errors import ConfigError

__all__ = ["NUMBA", "Mode", "chosen", "kernel", "use"]

Mode = Literal["default", "plain", "numba"]

NUMBA = frozenset({
    "attention", "attention_backward", "cross_entropy", "cross_entropy_backward", "embedding_backward",
    "gelu", "gelu_backward", "layer_norm", "layer_norm_backward_input", "layer_norm_backward_params",
    "rms_norm", "rms_norm_backward_input", "rms_norm_backward_params", "sigmoid", "silu", "silu_backward",
    "softmax", "softmax_backward", "square_sum",
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
    if mode == "numba" and not _installed():
        raise ConfigError("kernels.use('numba'): Numba is not installed: pip install numba")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def chosen(name: str) -> Literal["plain", "numba"]:
    """What runs kernel `name` on contiguous float32 or float64 NumPy arrays."""
    wanted = _mode == "numba" or (_mode == "default" and name in NUMBA)
    return "numba" if wanted and _installed() and _compiled(name) is not None else "plain"


def kernel(*, narrow: int = 1, into: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a plain function `f(xp, array, ...)` a kernel: 16-bit arrays are computed in float32, and on float32
    and float64 NumPy arrays its compiled namesake may run instead.

    narrow: how many of the results are rounded back to the 16-bit dtype of the first array.
    into: names of arguments that are changed in place; they are passed on as they are.
    """

    def register(plain: Callable[..., Any]) -> Callable[..., Any]:
        name = plain.__name__
        kept = {place - 1 for place, word in enumerate(inspect.signature(plain).parameters) if word in into}

        @functools.wraps(plain)
        def run(xp: Any, *arguments: Any, **options: Any) -> Any:
            dtype = arguments[0].dtype
            if dtype.itemsize == 2:
                arguments = tuple(a if n in kept else _wide(a) for n, a in enumerate(arguments))
            body = plain
            if xp is np and _mode != "plain" and _compilable(arguments, kept) and chosen(name) == "numba":
                body = _compiled(name) or plain
            result = body(xp, *arguments, **options)
            return _rounded(result, dtype, narrow) if dtype.itemsize == 2 else result

        return run

    return register


def _wide(argument: Any) -> Any:
    """16-bit floats (bf16 has kind "V") as float32, all else as it is."""
    dtype = getattr(argument, "dtype", None)
    half = dtype is not None and dtype.itemsize == 2 and dtype.kind in "fV"
    return argument.astype(np.float32) if half else argument


def _rounded(result: Any, dtype: Any, narrow: int) -> Any:
    if not isinstance(result, tuple):
        return result.astype(dtype) if narrow else result
    return tuple(r.astype(dtype) if n < narrow else r for n, r in enumerate(result))


def _compilable(arguments: tuple[Any, ...], kept: set[int]) -> bool:
    """All float arrays are NumPy's and of one of the two dtypes that are compiled for."""
    dtypes = {a.dtype.char for n, a in enumerate(arguments) if isinstance(a, np.ndarray) and n not in kept}
    floats = dtypes & {"f", "d"}
    return len(floats) == 1 and dtypes - floats <= set("bBhHiIlLqQ")


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _compiled(name: str) -> Callable[..., Any] | None:
    return getattr(importlib.import_module(COMPILED), name, None)
