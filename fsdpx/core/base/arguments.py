"""Check arguments against the type hints of what they are given to, so that a wrong one is a ConfigError that names it.

A function's own checks come first, since they know more: hints are looked at when it has failed with an error that is
not one for users, and when it has returned."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from fsdpx.core.base.messages import shorten_value
from fsdpx.errors import ConfigError, FsdpxError

__all__ = ["check_arguments", "check_own_constructor", "describe_hint", "fits_hint", "require_arguments"]

P = ParamSpec("P")
T = TypeVar("T")
MAX_ARRAY_INTEGER = 2**64
"""Whole numbers from here on fit into no array, and none is meant."""


def check_arguments(
    function: Callable[P, T], name: str = "", when: Literal["after", "failed"] = "after"
) -> Callable[P, T]:
    """Let a function, or an `__init__`, answer an argument that does not fit its type hint with ConfigError.

    Parameters
    ----------
    function : what is called
    name : of the call in errors (default: the function's own)
    when : hints are looked at. "after": when the function has returned, or failed with an error that is not one for
        users, for constructors, whose own checks say more; "failed": only where it has failed, where a call leaves
        something behind
    """
    label = name or function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call_checked(*given: P.args, **options: P.kwargs) -> T:
        if when == "after":
            _require_finite_integers(function, label, given, options)
        try:
            result = function(*given, **options)
        except FsdpxError:
            raise
        except Exception as error:
            _require_fit(function, label, given, options, error)
            raise
        if when == "after":
            _require_fit(function, label, given, options)
        return result

    return call_checked


def require_arguments(
    function: Callable[..., Any], given: tuple[Any, ...], options: Mapping[str, Any], name: str = ""
) -> None:
    """ConfigError for the first argument that does not fit its type hint, before the call."""
    label = name or function.__qualname__.removesuffix(".__init__")
    _require_finite_integers(function, label, given, options)
    _require_fit(function, label, given, options)


def check_own_constructor(kind: type) -> None:
    """Let the constructor that a class of this library defines check its arguments. Those of users stay as they are."""
    if "__init__" in vars(kind) and kind.__module__.startswith("fsdpx."):
        kind.__init__ = check_arguments(kind.__init__, kind.__name__)  # type: ignore[misc]


def _require_finite_integers(
    function: Callable[..., Any], label: str, given: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """ConfigError for a whole number that fits into no array: a loop over it would not end."""
    for name, value in [*zip(_get_hints(function)[1], given, strict=False), *options.items()]:
        if type(value) is int and abs(value) >= MAX_ARRAY_INTEGER:
            raise ConfigError(f"{label}({name}={value}): the number is too large")


def _require_fit(
    function: Callable[..., Any],
    label: str,
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    error: Exception | None = None,
) -> None:
    """ConfigError for the first argument that does not fit its hint. error: what the call has failed with; then arrays
    of one number are no numbers, since not all code takes them for one."""
    hints, positional = _get_hints(function)
    for name, value in [*zip(positional, given, strict=False), *options.items()]:
        hint = hints.get(name, Any)
        if not fits_hint(value, hint, failed=error is not None):
            needed = f"{describe_hint(hint)} is needed"
            raise ConfigError(f"{label}({name}={shorten_value(value)}): {needed}") from error


@cache
def _get_hints(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Type hints of parameters by name, and the names of positional parameters in order."""
    named = inspect.signature(function).parameters.values()
    positional = [one.name for one in named if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    single = [one.name for one in named if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    try:
        hints = get_type_hints(function)
    except NameError:  # a name that only a type checker imports
        hints = {}
    return {name: hints[name] for name in single if name in hints}, positional


def fits_hint(value: Any, hint: Any, failed: bool = False) -> bool:
    """Whether a value is of the kind that a type hint says, as far as users mean it: numbers of NumPy are numbers, a
    list does where a tuple is named, and True is no number.

    failed: a call that was given it has failed, so an array of one number is no number, which not all code takes for
    one, and an object of a user's class is none of ours, which it may stand for."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits_hint(value, one, failed) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin in _PLAIN:
        if not failed and isinstance(value, np.ndarray) and value.shape == ():
            value = value.item()
        return _PLAIN[origin](value)
    if origin in _SEQUENCES and isinstance(value, str):
        return origin not in (tuple, list) and inner == (str,)  # one text, as its own check may take or refuse
    if origin in _SEQUENCES:
        return _is_sequence(value, origin) and all(
            fits_hint(one, kind, failed) for one, kind in _pair_elements(value, inner)
        )
    if origin in _MAPPINGS:
        return isinstance(value, Mapping)
    if origin is PathLike or origin is Path:
        return isinstance(value, PathLike) or (origin is Path and isinstance(value, str))
    if origin is Callable or origin is type:
        return callable(value)
    ours = isinstance(origin, type) and origin.__module__.startswith("fsdpx.")
    if not ours or getattr(origin, "_is_protocol", False):
        return True
    return isinstance(value, origin) or (not failed and type(value).__module__ not in ("builtins", "numpy"))


_PLAIN: dict[Any, Callable[[Any], bool]] = {
    type(None): lambda value: value is None,
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool | np.bool_),
    str: lambda value: isinstance(value, str),
    bytes: lambda value: isinstance(value, bytes),
}
_SEQUENCES = (tuple, list, Sequence, Collection, Iterable)
_MAPPINGS = (dict, Mapping)
_SEEN = (tuple, list, range, set, frozenset, np.ndarray)
MAX_CHECKED_ELEMENTS = 1000
"""Of longer sequences, which are data, the elements are not looked at."""


def _is_sequence(value: Any, kind: Any) -> bool:
    if isinstance(value, str | bytes | Mapping):
        return False
    if kind in (tuple, list):
        return isinstance(value, tuple | list)
    if isinstance(value, type) or len(getattr(value, "shape", "x")) != 1:  # of several dims
        return False
    return isinstance(value, kind) or hasattr(value, "__getitem__")


def _pair_elements(value: Any, inner: tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    """The elements of a tuple or list with the hint of each."""
    if not inner or not isinstance(value, _SEEN) or len(value) > MAX_CHECKED_ELEMENTS:
        return ()
    if len(inner) == 1 or inner[1] is Ellipsis:
        return ((one, inner[0]) for one in value)
    return zip(value, inner, strict=False)


def describe_hint(hint: Any, plural: bool = False) -> str:
    """A type hint in words: "a whole number, or a tuple of whole numbers"."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return ", or ".join(dict.fromkeys(describe_hint(one, plural) for one in inner))
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin in _WORDS:
        return _WORDS[origin][plural]
    if origin in _SEQUENCES or origin in _MAPPINGS:
        word = _COLLECTIONS[origin] + "s" * plural
        kind = next((one for one in inner if one is not Ellipsis), Any)
        return word if kind is Any or origin in _MAPPINGS else f"{word} of {describe_hint(kind, True)}"
    if origin is Callable:
        return "functions" if plural else "a function"
    name = getattr(origin, "__name__", str(origin))
    return f"fsdpx's {name}" if getattr(origin, "__module__", "").startswith("fsdpx.") else name


_WORDS: dict[Any, tuple[str, str]] = {
    type(None): ("None", "None"),
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    bytes: ("bytes", "bytes"),
    PathLike: ("a path", "paths"),
    Path: ("a path", "paths"),
    type: ("a class", "classes"),
}
_COLLECTIONS = {
    tuple: "a tuple", list: "a list", Sequence: "a list", Collection: "a list", Iterable: "a list or an iterator",
    dict: "a dict", Mapping: "a dict",
}  # fmt: skip
