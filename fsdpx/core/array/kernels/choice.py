"""Choose the implementation of a kernel. The choice follows a fixed table, so that results are bitwise equal on all
ranks.

The table is based on `bench/kernels.py`, and never on measurements made while a job runs.
"""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fsdpx.core.array.devices import get_device_of_namespace
from fsdpx.core.base.extensions import import_extension_if_declared, list_extensions
from fsdpx.errors import ConfigError, warn

__all__ = [
    "Mode", "find_compiled_kernel", "find_device_kernel", "get_implementation_name", "has_numba",
    "import_all_compiled_kernels", "register_compiled_kernel", "register_plain_kernel", "use_mode",
]  # fmt: skip

Mode = Literal["default", "plain", "numba"]

Sample = Callable[[Any, Any, Any], Any]
"""Function that returns the arguments for a sample call of a kernel, or a list with the arguments for several calls.
The function takes arrays of shapes (2, 3) and (3,) in the compute dtype, and one of shape (3,) in the accumulation
dtype."""

KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels whose files have been imported, by name."""
FILES: dict[str, str] = {"normal": "fsdpx.core.array.kernels.compiled.normal"}
"""Maps each kernel name to the module that would contain its compiled code. The module need not exist. There is also an
entry for `array.random.normal`."""
COMPILED_KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels that run as Numba code by default. The table of `bench/kernels.py` justifies each choice. An entry is added
when its file is imported, which happens when a kernel in that file is first used."""
SAMPLE_CALLS: dict[str, Sample | None] = {}
active_mode: Mode = "default"
"""Mode set by `use_mode`."""


def register_compiled_kernel(sample: Sample | None = None) -> Callable[[Any], Any]:
    """Return a decorator that registers a function as the compiled implementation of the kernel of the same name.

    `sample` returns example arguments, which are used to compile or load the kernel before the first step. `sample` is
    None if the examples for other kernels also compile this kernel, or if no training step runs this kernel."""

    def register(function: Any) -> Any:
        COMPILED_KERNELS[function.__name__], SAMPLE_CALLS[function.__name__] = function, sample
        return function

    return register


def register_plain_kernel(name: str, plain: Callable[..., Any], compiled_in: str = "") -> Callable[..., Any]:
    """Register the plain implementation of a kernel under `name` and return it. The compiled implementation is looked
    up in the folder `compiled`, in the file `compiled_in` (by default, the file that has the same name as the plain
    implementation's file)."""
    package, _, own_file = plain.__module__.rpartition(".")
    KERNELS[name], FILES[name] = plain, f"{package}.compiled.{compiled_in or own_file}"
    return plain


def import_all_compiled_kernels() -> dict[str, Callable[..., Any]]:
    """Import all kernel files, and return the compiled implementations, keyed by kernel name."""
    core_kernels = importlib.import_module("fsdpx.core.array.kernels")
    others = (import_extension_if_declared("kernels", name, optional=True) for name in list_extensions("kernels"))
    for package in filter(None, (core_kernels, *others)):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for name in FILES:
        _look_up_compiled_kernel(name)
    return COMPILED_KERNELS


@contextmanager
def use_mode(mode: Mode) -> Iterator[None]:
    """Return a context manager that chooses how all kernels of the process run. Use it only for tests and measurements,
    since it affects all threads.

    Parameters
    ----------
    mode : "plain": array code; "numba": compiled code where it exists; "default": the same as "numba" if Numba is
        installed, otherwise the same as "plain"
    """
    global active_mode
    if mode not in ("default", "plain", "numba"):
        raise ConfigError(f"kernels.use_mode({mode!r}): choose one of default, plain, numba")
    if mode == "numba" and not has_numba():
        raise ConfigError("kernels.use_mode('numba'): Numba is not installed: pip install numba")
    before, active_mode = active_mode, mode
    try:
        yield
    finally:
        active_mode = before


def get_implementation_name(name: str) -> Literal["plain", "numba"]:
    """Return which implementation of the kernel `name` runs on contiguous float32 or float64 NumPy arrays."""
    return "numba" if active_mode != "plain" and has_numba() and _look_up_compiled_kernel(name) is not None else "plain"


def find_compiled_kernel(name: str) -> Callable[..., Any] | None:
    """Return the compiled implementation of the kernel `name`. Return None if there is none, if the mode is "plain",
    or if Numba is not installed."""
    if active_mode == "plain":
        return None
    if not has_numba():
        _warn_numba_missing()
        return None
    return _look_up_compiled_kernel(name)


def find_device_kernel(name: str, xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the implementation of the kernel `name` that the device of `xp` provides for these arguments. Return None
    if the device has none."""
    return get_device_of_namespace(xp).find_kernel(name, arguments)


@functools.cache
def has_numba() -> bool:
    """Return whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _warn_numba_missing() -> None:
    """Warn once per process that Numba is not installed, and that kernels therefore run as slower array code."""
    warn(
        "fsdpx: Numba is not installed, so kernels run as plain array code (several times slower): pip install numba",
    )


def _look_up_compiled_kernel(name: str) -> Callable[..., Any] | None:
    """Import and return the compiled implementation of a kernel; return None if there is none. The result does not
    depend on which files have been imported before."""
    # import only the core kernels here, because the kernels of an extension are imported together with the extension's
    # layers
    if name not in FILES:
        getattr(importlib.import_module("fsdpx.core.array.kernels"), name, None)
    return _import_compiled_kernel(name, FILES.get(name))


@functools.cache
def _import_compiled_kernel(name: str, file: str | None) -> Callable[..., Any] | None:
    if file and importlib.util.find_spec(file):
        importlib.import_module(file)
    return COMPILED_KERNELS.get(name)
