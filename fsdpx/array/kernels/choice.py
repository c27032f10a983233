"""Which code runs a kernel: a fixed table, so that every rank computes the same bits.

The table follows `bench/kernels.py`; it never depends on a measurement made while a job runs."""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fsdpx.errors import ConfigError

__all__ = ["NUMBA", "Mode", "chosen", "compiled", "installed", "on_device", "use"]

Mode = Literal["default", "plain", "numba"]

NUMBA = frozenset({
    "add", "add_bias", "add_widened", "attention", "attention_backward", "avg_pool", "avg_pool_backward",
    "bias_gelu", "channel_affine", "channel_norm_backward", "channel_squares", "channel_sums", "channel_sums_with",
    "conv2d", "conv2d_backward_input", "conv2d_backward_params", "correlate", "correlate_backward_input",
    "correlate_backward_params", "cross_entropy", "cross_entropy_backward", "drop",
    "drop_backward", "embedding_backward", "gated", "gated_backward", "gelu", "gelu_backward", "gelu_recompute",
    "layer_norm", "layer_norm_backward_input", "layer_norm_backward_params", "max_pool", "max_pool_backward",
    "normal", "relu", "relu_backward", "rms_norm", "rms_norm_backward_input", "rms_norm_backward_params", "rotate",
    "round_randomly", "sigmoid", "silu", "silu_backward", "softmax", "softmax_backward", "square_sum", "square_sums",
    "squared_error", "squared_error_backward", "store", "sum_rows",
})  # fmt: skip
"""The kernels that run as Numba code by default, each with its reason in the table of `bench/kernels.py`."""

load: Callable[[], dict[str, Callable[..., Any]]] = dict
"""Imports and returns the compiled kernels; set by the package `kernels`: their files import this one."""
active: Mode = "default"
"""The mode that `use` has set."""


@contextmanager
def use(mode: Mode) -> Iterator[None]:
    """Inside the block all kernels of the process run as "plain" code, as "numba" code where there is any, or by
    the table ("default"). For tests and measurements: it acts on all threads."""
    global active
    if mode not in ("default", "plain", "numba"):
        raise ConfigError(f"kernels.use({mode!r}): choose one of default, plain, numba")
    if mode == "numba" and not installed():
        raise ConfigError("kernels.use('numba'): Numba is not installed: pip install numba")
    before, active = active, mode
    try:
        yield
    finally:
        active = before


def chosen(name: str) -> Literal["plain", "numba"]:
    """What runs kernel `name` on contiguous float32 or float64 NumPy arrays."""
    wanted = active == "numba" or (active == "default" and name in NUMBA)
    return "numba" if wanted and installed() and _compiled(name) is not None else "plain"


def compiled(name: str) -> Callable[..., Any] | None:
    """The compiled code of kernel `name` if the mode and the table ask for it and Numba is there, else None."""
    if active == "plain" or (active == "default" and name not in NUMBA):
        return None
    if not installed():
        _warn()
        return None
    return _compiled(name)


def on_device(name: str, xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The CUDA C of kernel `name` for these arrays of CuPy, unless "plain" code is wanted; None: there is none."""
    if active == "plain" or getattr(xp, "__name__", "") != "cupy":
        return None
    from fsdpx.cuda.kernels import on_gpu

    return on_gpu(name, arguments)


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
    return load().get(name)
