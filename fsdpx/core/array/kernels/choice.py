"""Which code runs a kernel: a fixed table, so that every rank computes the same bits.

The table follows `bench/kernels.py`; it never depends on a measurement made while a job runs."""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fsdpx.core.array.devices import device_with
from fsdpx.core.base.extensions import find_extension, list_extensions
from fsdpx.errors import ConfigError, warn

__all__ = [
    "Mode",
    "add_kernel",
    "find_compiled",
    "find_device_kernel",
    "has_numba",
    "implementation_of",
    "load_compiled_kernels",
    "register_compiled",
    "use_mode",
]

Mode = Literal["default", "plain", "numba"]

Sample = Callable[[Any, Any, Any], Any]
"""From rows (2, 3) and columns (3,) of the dtype computed in, and columns of that in which it is summed, to the
arguments of a call, or to a list of these."""

KERNELS: dict[str, Callable[..., Any]] = {}
"""The kernels whose files are imported, by name."""
FILES: dict[str, str] = {"normal": "fsdpx.core.array.kernels.compiled.normal"}
"""The module in which the compiled code of each of them lies, if it has any; and of `array.random.normal`."""
COMPILED_KERNELS: dict[str, Callable[..., Any]] = {}
"""The kernels that run as Numba code by default, each with its reason in the table of `bench/kernels.py`; once their
files are imported, which happens when one of the file is first wanted."""
SAMPLE_CALLS: dict[str, Sample | None] = {}
active_mode: Mode = "default"
"""The mode that `use` has set."""


def register_compiled(sample: Sample | None = None) -> Callable[[Any], Any]:
    """Declare a function the compiled code of the kernel of its name. sample: a call of that kernel, by which it is
    compiled or loaded before the first step; None: it runs for other samples, or nothing waits for it."""

    def register(function: Any) -> Any:
        COMPILED_KERNELS[function.__name__], SAMPLE_CALLS[function.__name__] = function, sample
        return function

    return register


def add_kernel(name: str, plain: Callable[..., Any], compiled_in: str = "") -> Callable[..., Any]:
    """Give a kernel a name, and return it. Its compiled code lies in the folder `compiled` beside its own file, in a
    file that is called `compiled_in`, or as its own."""
    package, _, own_file = plain.__module__.rpartition(".")
    KERNELS[name], FILES[name] = plain, f"{package}.compiled.{compiled_in or own_file}"
    return plain


def load_compiled_kernels() -> dict[str, Callable[..., Any]]:
    """The compiled code of every kernel that has any, by its name; all files are imported."""
    core_kernels = importlib.import_module("fsdpx.core.array.kernels")
    others = (find_extension("kernels", name, optional=True) for name in list_extensions("kernels"))
    for package in filter(None, (core_kernels, *others)):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for name in FILES:
        _look_up_compiled(name)
    return COMPILED_KERNELS


@contextmanager
def use_mode(mode: Mode) -> Iterator[None]:
    """Inside the block all kernels of the process run as "plain" code, or as "numba" code where there is any; that is
    the "default" where Numba is installed. For tests and measurements: it acts on all threads."""
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


def implementation_of(name: str) -> Literal["plain", "numba"]:
    """What runs kernel `name` on contiguous float32 or float64 NumPy arrays."""
    return "numba" if active_mode != "plain" and has_numba() and _look_up_compiled(name) is not None else "plain"


def find_compiled(name: str) -> Callable[..., Any] | None:
    """The compiled code of kernel `name` if there is any, the mode asks for it and Numba is there, else None."""
    if active_mode == "plain":
        return None
    if not has_numba():
        _warn_without_numba()
        return None
    return _look_up_compiled(name)


def find_device_kernel(name: str, xp: Any, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The own code of the device of `xp` for kernel `name` with these arguments; None: there is none."""
    return device_with(xp).find_kernel(name, arguments)


@functools.cache
def has_numba() -> bool:
    """Whether Numba can be imported."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _warn_without_numba() -> None:
    """Once per process."""
    warn(
        "fsdpx: Numba is not installed, so kernels run as plain array code (several times slower): pip install numba",
    )


def _look_up_compiled(name: str) -> Callable[..., Any] | None:
    """Return the compiled code of a kernel; what it is never depends on which files are imported already."""
    if name not in FILES:  # one of the core that nobody has used yet; those of an extension come with its layers
        getattr(importlib.import_module("fsdpx.core.array.kernels"), name, None)
    return _import_form(name, FILES.get(name))


@functools.cache
def _import_form(name: str, file: str | None) -> Callable[..., Any] | None:
    if file and importlib.util.find_spec(file):
        importlib.import_module(file)
    return COMPILED_KERNELS.get(name)
