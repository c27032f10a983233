"""Functions that are compiled once, for fixed argument types, and not for every layout that they are called with."""

import threading
from collections.abc import Callable
from typing import Any, cast

import numba

__all__ = ["fixed"]

_functions: dict[Any, Callable[..., Any]] = {}
_lock = threading.Lock()


def fixed(function: Any, arguments: str, formats: tuple[Any, ...] = (numba.float32, numba.float64)) -> Any:
    """`function` in float32 and float64, or in `formats`. arguments: `i` an int64, `b` a truth value, `A2` an array of
    two dims in any layout, `C2` one in C order; h after it: of the bits of 16-bit numbers; s: of float32; a final r: it
    is only read, so it may be read-only and lie at any byte."""
    made = _functions.get(function)
    if made is None:
        with _lock:  # a thread rank must not disable the compiler while another one is compiling
            made = _functions.get(function) or _functions.setdefault(function, _compiled(function, arguments, formats))
    return made


def _compiled(function: Any, arguments: str, formats: tuple[Any, ...]) -> Callable[..., Any]:
    for real in formats:
        function.compile(tuple(_type(real, kind) for kind in arguments.split()))
    function.disable_compile()
    return function


def _type(real: Any, kind: str) -> Any:
    if kind in ("i", "b"):
        return numba.int64 if kind == "i" else numba.boolean
    real = {"h": numba.uint16, "s": numba.float32}.get(kind[2:3], real)
    read, array = kind.endswith("r"), cast(Any, numba.types.Array)
    return array(real, int(kind[1]), kind[0], readonly=read, aligned=not read)
