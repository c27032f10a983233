"""Files of compiled code read a second time, with the names of Numba and llvmlite: what is to be compiled."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdpx.native import cache

__all__ = ["dispatcher", "for_python"]

TOOLS = f"{__package__}.tools"
BARE: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Without Numba's own entries for Python and C, which nothing calls."""
_made: dict[tuple[str, str], Any] = {}  # by file and name
_python = builtins.__import__
_read: dict[str, ModuleType] = {}


def dispatcher(function: Callable[..., Any], fastmath: Any) -> Any:
    """Numba's dispatcher of a function of such a file; of any other function, of itself, also of a script's, which
    would run again. What it compiles is called by compiled code alone: Python takes an entry of `build`, or
    `for_python`. The caller holds the lock."""
    key = function.__code__.co_filename, function.__qualname__
    for home in [function.__module__, *sorted(name for name in sys.modules if name.startswith("fsdpx."))]:
        if _is_code(home):
            _reread(home)
            if key in _made:
                return _made[key]
    return _dispatcher(function, fastmath)


def for_python(function: Callable[..., Any], fastmath: Any) -> Any:
    """The same, to be called by Python."""
    return _dispatcher(dispatcher(function, fastmath).py_func, fastmath, {})


def _jit(function: Any = None, *, fastmath: Any = False, name: str = "") -> Any:
    """`jit` in the second reading."""
    if function is None:
        return functools.partial(_jit, fastmath=fastmath)
    function.__qualname__ = name or function.__qualname__
    made = _made[function.__code__.co_filename, function.__qualname__] = _dispatcher(function, fastmath)
    return made


def _dispatcher(function: Any, fastmath: Any, entries: Any = BARE) -> Any:
    import numba

    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath, **entries}
    made: Any = numba.njit(**options)(function)
    cache.enable(made, function, fastmath, bare=bool(entries))
    return made


@functools.cache
def _is_code(home: str) -> bool:
    module = sys.modules.get(home)
    file = getattr(module, "__file__", None)
    if module is None or file is None or home in (__name__, "__main__"):
        return False
    return f"from {TOOLS} " in Path(file).read_text()


def _reread(home: str) -> ModuleType:
    if home not in _read:
        file = sys.modules[home].__file__
        assert file is not None
        module = _read[home] = ModuleType(home)
        module.__file__ = file
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return _read[home]


def _import(name: str, globals: Any = None, locals: Any = None, names: Any = (), level: int = 0) -> Any:
    """Python's import, with the second reading of files of compiled code."""
    if name == TOOLS:
        return _tools()
    module = _python(name, globals, locals, names, level)
    return _reread(name) if names and _is_code(name) else module


@functools.cache
def _tools() -> ModuleType:
    from llvmlite import ir
    from numba import extending, types
    from numba.core import cgutils

    tools = ModuleType(TOOLS)
    tools.__dict__.update(cgutils=cgutils, extending=extending, ir=ir, jit=_jit, types=types)
    tools.__dict__.update(overload=functools.partial(extending.overload, jit_options=BARE))
    tools.__dict__.update(register_jitable=extending.register_jitable(**BARE))
    return tools
