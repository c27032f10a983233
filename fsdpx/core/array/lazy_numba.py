"""Names of Numba and llvmlite that are looked up when something is compiled, not when a file is imported.

Files of compiled code import these names, so reading them loads neither library. A function that is to be compiled is
copied by `bound`: in the copy the libraries' own objects stand in place of these."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

__all__ = ["BARE", "Late", "bound", "cgutils", "digest", "intrinsic", "ir", "overload", "register_jitable", "types"]

BARE: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Without Numba's own entries for Python and C, which nothing calls."""


class Late:
    """A name in a library, or what it returns for some arguments."""

    def __init__(self, module: str, path: tuple[str, ...] = (), given: tuple[Any, ...] | None = None) -> None:
        self._parts = module, path, given

    def __getattr__(self, name: str) -> Late:
        if name.startswith("__"):
            raise AttributeError(name)
        module, path, _ = self._parts
        return Late(module, (*path, name))

    def __call__(self, *given: Any) -> Late:
        module, path, _ = self._parts
        return Late(module, path, given)

    def found(self) -> Any:
        """The library's own object."""
        module, path, given = self._parts
        found: Any = importlib.import_module(module)
        for name in path:
            found = getattr(found, name)
        return found if given is None else found(*_bound(given))


class Intrinsic:
    """A function that writes the instructions of a call itself, for `numba.extending.intrinsic`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__


ir: Any = Late("llvmlite.ir")
types: Any = Late("numba.types")
cgutils: Any = Late("numba.core.cgutils")
intrinsic: Any = Intrinsic  # its annotations describe the code maker, not the function made
_jitable: set[FunctionType] = set()
_overloads: dict[Any, tuple[FunctionType, dict[str, Any]]] = {}
_copies: dict[FunctionType, Any] = {}


def register_jitable(function: Any) -> Any:
    """Compiled where compiled code calls it."""
    _jitable.add(function)
    return function


def overload(target: Any, **options: Any) -> Callable[[Any], Any]:
    """What is compiled in place of `target`: the function that the decorated one returns for the types given."""

    def register(function: Any) -> Any:
        _overloads[target] = function, options
        return function

    return register


def bound(function: Any) -> Any:
    """The function with the libraries' own objects in its globals and its closure."""
    made = _copies.get(function)
    if made is not None:
        return made
    names: dict[str, Any] = {"__name__": function.__globals__["__name__"], "__builtins__": __builtins__}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells or None)
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    _copies[function] = made
    if function in _overloads:
        from numba import extending

        body, options = _overloads[function]
        extending.overload(made, jit_options=BARE, **options)(bound(body))
    names |= {name: _bound(value) for name, value in _globals(function)}
    for cell, known in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _bound(known.cell_contents)
    if function in _jitable:
        from numba import extending

        extending.register_jitable(**BARE)(made)
    return made


def _bound(value: Any) -> Any:
    if isinstance(value, Late):
        return value.found()
    if isinstance(value, Intrinsic):
        return _made(value)
    if hasattr(value, "bare"):
        return value.bare()
    if isinstance(value, tuple | list):
        return type(value)(map(_bound, value))
    if isinstance(value, dict):
        return {_bound(key): _bound(one) for key, one in value.items()}
    return bound(value) if _is_own(value) else value


@functools.cache
def _made(value: Intrinsic) -> Any:
    from numba import extending

    return extending.intrinsic(bound(value.function))


def _is_own(value: Any) -> bool:
    """Whether a value may use names of this file: it is a function, and not of another library."""
    return isinstance(value, FunctionType) and not value.__module__.startswith(("numpy", "numba", "llvmlite"))


def _globals(function: Any) -> Iterator[tuple[str, Any]]:
    names = sorted(_names(function.__code__))
    return ((name, function.__globals__[name]) for name in names if name in function.__globals__)


def _names(code: CodeType) -> set[str]:
    """The names that a code uses, and the functions inside it."""
    return {*code.co_names}.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def digest(function: Any) -> str:
    """The hash of the code of a function, and of all that it reaches: other functions, constants, names of
    libraries."""
    left, texts = [function], {}
    while left:
        one = left.pop()
        if one not in texts:
            texts[one], reached = _described(one)
            left += reached
    return blake2b("\n".join(texts.values()).encode(), digest_size=16).hexdigest()


@functools.cache
def _described(function: FunctionType) -> tuple[str, list[FunctionType]]:
    """What machine code may depend on, in words that are the same in every process; and functions that are reached."""
    reached: list[FunctionType] = []
    if not _is_own(function):
        return f"{function.__module__}.{function.__qualname__}", reached

    def describe(value: Any) -> Any:
        if isinstance(value, Late):
            return describe(value._parts)
        if isinstance(value, Intrinsic):
            return describe(value.function)
        if hasattr(value, "bare"):
            return str(value.freedom), describe(value.function)
        if isinstance(value, FunctionType):
            reached.append(value)
            return value.__qualname__
        if isinstance(value, CodeType):
            return value.co_code, value.co_names, value.co_varnames, describe(value.co_consts)
        if isinstance(value, dict):
            return [(describe(key), describe(one)) for key, one in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if isinstance(value, tuple | list):
            return [describe(one) for one in value]
        if isinstance(value, ModuleType | type | BuiltinFunctionType):
            return value.__name__
        if value is None or isinstance(value, bool | int | float | str | bytes | np.generic | np.dtype | np.ufunc):
            return repr(value)
        raise TypeError(f"compiled code uses {value!r}: nobody can tell whether it is the same in another process")

    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = function.__code__, tuple(_globals(function)), inside, function.__defaults__, _overloads.get(function)
    return repr([describe(part) for part in parts]), reached
