"""A `dataclass` decorator for the classes of this package. It creates classes faster than Python's own decorator does.

Python's decorator compiles six methods for each frozen class. For the 130 such classes of this package, this took a
quarter of the start time of a training job. The decorator in this module compiles only the constructor. The resulting
classes behave like those of Python's decorator, and compare as tuples of their fields, as in Python 3.12. Classes that
need more, for example keyword-only fields, are left to Python's decorator.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, field, fields, replace
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field", "fields", "replace"]

METHODS = {"__init__", "__eq__", "__hash__", "__setattr__", "__delattr__"}
"""If a class defines one of these methods itself, Python's own `dataclass` decorator keeps this definition or raises an
error."""


def _convert_to_dataclass(cls: Any = None, /, *, frozen: bool = False, **options: bool) -> Any:
    """Turn `cls` into a dataclass that behaves like the result of `dataclasses.dataclass`."""
    if cls is None:
        return lambda cls: _convert_to_dataclass(cls, frozen=frozen, **options)
    if options.keys() - {"eq", "repr"} or _needs_standard_dataclass_decorator(cls):
        return dataclasses.dataclass(cls, frozen=frozen, **options)
    dataclasses.dataclass(cls, init=False, repr=False, eq=False)
    cls.__dataclass_params__.frozen = frozen
    methods = {"__init__": _compile_init(cls, frozen)}
    if options.get("repr", True) and "__repr__" not in vars(cls):
        methods["__repr__"] = _make_repr([one.name for one in fields(cls) if one.repr])
    if options.get("eq", True):
        methods["__eq__"], get_hash = _make_comparison([one.name for one in fields(cls) if one.compare])
        methods["__hash__"] = get_hash if frozen else None
    if frozen:
        methods["__setattr__"] = _make_method_raising_frozen_error(cls, "__setattr__", "assign to")
        methods["__delattr__"] = _make_method_raising_frozen_error(cls, "__delattr__", "delete")
    for name, method in methods.items():
        if method is not None:
            method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)
    return cls


def _needs_standard_dataclass_decorator(cls: Any) -> bool:
    """Return whether a class needs Python's decorator. It does if it is derived from a dataclass, lacks a docstring, or
    itself defines one of the methods in `METHODS`. It also does if a field is keyword-only, is not stored, or is
    declared with its own setting for hashing."""
    return (
        any(hasattr(base, "__dataclass_fields__") for base in cls.__mro__[1:])
        or not cls.__doc__
        or not METHODS.isdisjoint(vars(cls))
        or any("InitVar" in str(kind) or "KW_ONLY" in str(kind) for kind in cls.__annotations__.values())
        or any(isinstance(v, Field) and (v.kw_only is True or v.hash is not None) for v in vars(cls).values())
    )


class _NewValue:
    def __repr__(self) -> str:
        return "<factory>"  # as in the signatures of Python's own dataclasses


def _compile_init(cls: Any, frozen: bool) -> Any:
    names: dict[str, Any] = {"_set": object.__setattr__, "_new": _NewValue()}
    parameters, lines = ["self"], ["pass"]
    for one in fields(cls):
        parameter = value = one.name
        if one.default_factory is not MISSING:
            names[f"_make_{one.name}"] = one.default_factory
            parameter, value = f"{one.name}=_new", f"_make_{one.name}()"
            value += f" if {one.name} is _new else {one.name}" if one.init else ""
        elif one.default is not MISSING:
            names[f"_default_{one.name}"] = one.default
            parameter = f"{one.name}=_default_{one.name}"
        if one.init:
            parameters.append(parameter)
        if one.init or one.default_factory is not MISSING:
            lines.append(f"_set(self, {one.name!r}, {value})" if frozen else f"self.{one.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    inner = f"def __init__({', '.join(parameters)}):\n  " + "\n  ".join(lines)
    made: dict[str, Any] = {}
    exec(f"def make({', '.join(names)}):\n {inner}\n return __init__", vars(sys.modules[cls.__module__]), made)
    init = made["make"](**names)
    init.__annotations__ = {one.name: one.type for one in fields(cls) if one.init} | {"return": None}
    return init


def _make_repr(names: Sequence[str]) -> Any:
    def format_fields(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return recursive_repr()(format_fields)


def _make_comparison(names: Sequence[str]) -> tuple[Any, Any]:
    get: Any = attrgetter(*names) if len(names) > 1 else lambda self: tuple(getattr(self, name) for name in names)

    def is_equal(self: Any, other: object) -> Any:
        return get(self) == get(other) if type(other) is type(self) else NotImplemented

    return is_equal, lambda self: hash(get(self))


def _make_method_raising_frozen_error(cls: Any, method: str, action: str) -> Any:
    def change(self: Any, name: str, *value: object) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot {action} field {name!r}")
        getattr(super(cls, self), method)(name, *value)

    return change


if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    dataclass = _convert_to_dataclass
