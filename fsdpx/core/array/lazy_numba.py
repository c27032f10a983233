"""Stand-ins for objects of Numba and llvmlite. The objects are looked up when a function is compiled, not when a file
is imported.

Files of compiled code import the stand-ins, so importing these files loads neither library.
`copy_function_with_real_numba_objects` copies a function before it is compiled, and replaces the stand-ins in the copy
with the libraries' own objects. """

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

__all__ = [
    "BARE", "LazyObject", "cgutils", "copy_function_with_real_numba_objects", "hash_function", "intrinsic", "ir",
    "overload_function", "register_jitable", "types",
]  # fmt: skip

BARE: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options that make Numba omit the entry points for Python and C, which are never called."""


class LazyObject:
    """Stand-in for an object of a library, or for the result of calling such an object. The object is imported only
    when it is needed."""

    def __init__(self, module: str, path: tuple[str, ...] = (), given: tuple[Any, ...] | None = None) -> None:
        self._parts = module, path, given

    def __getattr__(self, name: str) -> LazyObject:
        if name.startswith("__"):
            raise AttributeError(name)
        module, path, _ = self._parts
        return LazyObject(module, (*path, name))

    def __call__(self, *given: Any) -> LazyObject:
        module, path, _ = self._parts
        return LazyObject(module, path, given)

    def import_object(self) -> Any:
        """Import and return the object that this stand-in represents."""
        module, path, given = self._parts
        value: Any = importlib.import_module(module)
        for name in path:
            value = getattr(value, name)
        return value if given is None else value(*_resolve_lazy_value(given))


class LazyIntrinsic:
    """Stand-in for `numba.extending.intrinsic`. For each call to the intrinsic in compiled code, the wrapped function
    emits LLVM instructions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__


ir: Any = LazyObject("llvmlite.ir")
types: Any = LazyObject("numba.types")
cgutils: Any = LazyObject("numba.core.cgutils")
# typed as Any, because the annotations of an intrinsic describe its code generator, not its calls
intrinsic: Any = LazyIntrinsic
_jitable: set[FunctionType] = set()
_overloads: dict[Any, tuple[FunctionType, dict[str, Any]]] = {}
_copies: dict[FunctionType, Any] = {}


def register_jitable(function: Any) -> Any:
    """Allow compiled code to call a Python function, which is then compiled together with its callers. Return the
    function."""
    _jitable.add(function)
    return function


def overload_function(target: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that registers how compiled code implements calls to `target`. The decorated function takes
    the types of the arguments and returns the implementation."""

    def register_overload(function: Any) -> Any:
        _overloads[target] = function, options
        return function

    return register_overload


def copy_function_with_real_numba_objects(function: Any) -> Any:
    """Return a copy of the function. In the globals and the closure of the copy, all stand-ins are replaced with the
    objects of Numba and llvmlite."""
    bound_copy = _copies.get(function)
    if bound_copy is not None:
        return bound_copy
    names: dict[str, Any] = {"__name__": function.__globals__["__name__"], "__builtins__": __builtins__}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    bound_copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells or None)
    bound_copy.__qualname__, bound_copy.__doc__ = function.__qualname__, function.__doc__
    _copies[function] = bound_copy
    if function in _overloads:
        from numba import extending

        body, options = _overloads[function]
        extending.overload(bound_copy, jit_options=BARE, **options)(copy_function_with_real_numba_objects(body))
    names |= {name: _resolve_lazy_value(value) for name, value in _list_globals(function)}
    for cell, known in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _resolve_lazy_value(known.cell_contents)
    if function in _jitable:
        from numba import extending

        extending.register_jitable(**BARE)(bound_copy)
    return bound_copy


def _resolve_lazy_value(value: Any) -> Any:
    if isinstance(value, LazyObject):
        return value.import_object()
    if isinstance(value, LazyIntrinsic):
        return _make_intrinsic(value)
    if hasattr(value, "get_dispatcher_without_python_entry"):
        return value.get_dispatcher_without_python_entry()
    if isinstance(value, tuple | list):
        return type(value)(map(_resolve_lazy_value, value))
    if isinstance(value, dict):
        return {_resolve_lazy_value(key): _resolve_lazy_value(one) for key, one in value.items()}
    return copy_function_with_real_numba_objects(value) if _may_use_lazy_names(value) else value


@functools.cache
def _make_intrinsic(value: LazyIntrinsic) -> Any:
    from numba import extending

    return extending.intrinsic(copy_function_with_real_numba_objects(value.function))


def _may_use_lazy_names(value: Any) -> bool:
    """Return whether `value` is a function that could use lazy names (placeholders that stand for Numba objects until
    Numba is loaded). Functions of NumPy, Numba and llvmlite never use them."""
    return isinstance(value, FunctionType) and not value.__module__.startswith(("numpy", "numba", "llvmlite"))


def _list_globals(function: Any) -> Iterator[tuple[str, Any]]:
    names = sorted(_list_used_names(function.__code__))
    return ((name, function.__globals__[name]) for name in names if name in function.__globals__)


def _list_used_names(code: CodeType) -> set[str]:
    """Return the names that a code object and its nested functions use."""
    return {*code.co_names}.union(*(_list_used_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def hash_function(function: Any) -> str:
    """Return a hash of the code of a function and of everything that it refers to: other functions, constants and
    names of libraries."""
    left, texts = [function], {}
    while left:
        pending = left.pop()
        if pending not in texts:
            texts[pending], reached = _describe_function_and_list_callees(pending)
            left += reached
    return blake2b("\n".join(texts.values()).encode(), digest_size=16).hexdigest()


@functools.cache
def _describe_function_and_list_callees(function: FunctionType) -> tuple[str, list[FunctionType]]:
    """Return a string that contains everything that the machine code of a function may depend on, and a list of the
    functions that this function calls. The string is the same in every process."""
    reached: list[FunctionType] = []
    if not _may_use_lazy_names(function):
        return f"{function.__module__}.{function.__qualname__}", reached

    def describe_value(value: Any) -> Any:
        if isinstance(value, LazyObject):
            return describe_value(value._parts)
        if isinstance(value, LazyIntrinsic):
            return describe_value(value.function)
        if hasattr(value, "get_dispatcher_without_python_entry"):
            return str(value.freedom), describe_value(value.function)
        if isinstance(value, FunctionType):
            reached.append(value)
            return value.__qualname__
        if isinstance(value, CodeType):
            return value.co_code, value.co_names, value.co_varnames, describe_value(value.co_consts)
        if isinstance(value, dict):
            return [(describe_value(key), describe_value(one)) for key, one in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if isinstance(value, tuple | list):
            return [describe_value(one) for one in value]
        if isinstance(value, ModuleType | type | BuiltinFunctionType):
            return value.__name__
        if value is None or isinstance(value, bool | int | float | str | bytes | np.generic | np.dtype | np.ufunc):
            return repr(value)
        raise TypeError(f"compiled code uses {value!r}, which may differ in another process")

    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = function.__code__, tuple(_list_globals(function)), inside, function.__defaults__, _overloads.get(function)
    return repr([describe_value(part) for part in parts]), reached
