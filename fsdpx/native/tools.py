"""What files of compiled code import: `jit`, and names of Numba and llvmlite that are nothing until code is compiled.

A file that imports this is read twice. As Python reads it, functions that are decorated are `Compiled`, and Numba's
names stand for nothing, so that neither library is loaded. When something is to be compiled, `fsdpx.native.twice` reads
the file again, with the libraries' own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdpx.native.compiled import jit

__all__ = ["cgutils", "extending", "ir", "jit", "overload", "register_jitable", "types"]


class _Nothing:
    """Whatever is asked of it is nothing too."""

    def __init__(self, *ignored: Any, **also: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *ignored: Any, **also: Any) -> Any:
        return self


def register_jitable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is."""
    return function


cgutils: Any = _Nothing()
extending: Any = _Nothing()
ir: Any = _Nothing()
overload: Any = _Nothing()
types: Any = _Nothing()
