"""Which code runs a kernel: a fixed table, so that every rank computes the same bits.

The table follows `bench/kernels.py`; it never depends on a measurement made while a job runs."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fsdpx.core.array.devices import gpu_function
from fsdpx.errors import ConfigError, warn

__all__ = ["Mode", "chosen", "compiled", "form", "installed", "names", "on_device", "use"]

Mode = Literal["default", "plain", "numba"]

Sample = Callable[[Any, Any, Any], Any]
"""From rows (2, 3) and columns (3,) of the dtype computed in, and columns of that in which it is summed, to the
arguments of a call, or to a list of these."""

FORMS: dict[str, Callable[..., Any]] = {}
"""The kernels that run as Numba code by default, each with its reason in the table of `bench/kernels.py`; once they are
loaded."""
SAMPLES: dict[str, Sample | None] = {}
active: Mode = "default"
"""The mode that `use` has set."""


def form(sample: Sample | None = None) -> Callable[[Any], Any]:
    """Declare a function the compiled code of the kernel of its name. sample: a call of that kernel, by which it is
    compiled or loaded before the first step; None: it runs for other samples, or nothing waits for it."""

    def declare(function: Any) -> Any:
        FORMS[function.__name__], SAMPLES[function.__name__] = function, sample
        return function

    return declare


def names() -> dict[str, Callable[..., Any]]:
    """The compiled code of every kernel that has any, by its name; the files are imported."""
    importlib.import_module("fsdpx.core.array.kernels.compiled")  # by name: its files import this one
    return FORMS


@contextmanager
def use(mode: Mode) -> Iterator[None]:
    """Inside the block all kernels of the process run as "plain" code, or as "numba" code where there is any; that is
    the "default" where Numba is installed. For tests and measurements: it acts on all threads."""
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
    return "numba" if active != "plain" and installed() and _compiled(name) is not None else "plain"


def compiled(name: str) -> Callable[..., Any] | None:
    """The compiled code of kernel `name` if there is any, the mode asks for it and Numba is there, else None."""
    if active == "plain":
        return None
    if not installed():
        _warn()
        return None
    return _compiled(name)


def on_device(name: str, xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The CUDA C of kernel `name` for these arrays of CuPy, unless "plain" code is wanted; None: there is none."""
    if active == "plain" or getattr(xp, "__name__", "") != "cupy":
        return None
    body: Callable[..., Any] | None = gpu_function("on_gpu")(name, arguments)
    return body


@functools.cache
def installed() -> bool:
    """Whether Numba can be imported."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _warn() -> None:
    """Once per process."""
    warn(
        "fsdpx: Numba is not installed, so kernels run as plain array code (several times slower): pip install numba",
    )


@functools.cache
def _compiled(name: str) -> Callable[..., Any] | None:
    return names().get(name)
