"""Check arguments against the type hints of a function. An argument of the wrong type raises a ConfigError that names
the argument.

A function's own checks are more specific, so they run first. The hints are checked only after the function has
returned, or has raised an error other than an FsdpxError.
"""

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

__all__ = [
    "describe_hint", "fits_hint", "require_arguments_match_type_hints", "wrap_constructor_with_argument_check",
    "wrap_with_type_hint_check",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
MAX_ARRAY_INTEGER = 2**64
"""Integers of this magnitude or larger do not fit into any array dtype, and are rejected as mistakes."""


def wrap_with_type_hint_check(
    function: Callable[P, T], name: str = "", when: Literal["after", "failed"] = "after"
) -> Callable[P, T]:
    """Wrap a function, or an `__init__`, so that an argument that does not fit its type hint raises ConfigError.

    Parameters
    ----------
    function : the function to wrap
    name : name of the function in error messages (default: its own name)
    when : when the hints are checked. "after": after the function has returned or failed. Use this for constructors,
        whose own checks come first because they raise more specific errors. "failed": only after the function has
        failed. Use this for calls with side effects. If the function raises an FsdpxError, this error is passed on and
        the hints are not checked
    """
    label = name or function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call_checked(*given: P.args, **options: P.kwargs) -> T:
        if when == "after":
            _refuse_huge_integers(function, label, given, options)
        try:
            result = function(*given, **options)
        except FsdpxError:
            raise
        except Exception as error:
            _require_arguments_fit_hints(function, label, given, options, error)
            raise
        if when == "after":
            _require_arguments_fit_hints(function, label, given, options)
        return result

    return call_checked


def require_arguments_match_type_hints(
    function: Callable[..., Any], given: tuple[Any, ...], options: Mapping[str, Any], name: str = ""
) -> None:
    """Raise ConfigError for the first argument that does not fit its type hint. Call this before `function(*given,
    **options)`."""
    label = name or function.__qualname__.removesuffix(".__init__")
    _refuse_huge_integers(function, label, given, options)
    _require_arguments_fit_hints(function, label, given, options)


def wrap_constructor_with_argument_check(cls: type) -> None:
    """Make the constructor of an fsdpx class check its arguments against their type hints. User-defined classes and
    inherited constructors are left unchanged."""
    if "__init__" in vars(cls) and cls.__module__.startswith("fsdpx."):
        cls.__init__ = wrap_with_type_hint_check(cls.__init__, cls.__name__)  # type: ignore[misc]


def _refuse_huge_integers(
    function: Callable[..., Any], label: str, given: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Raise ConfigError for an integer argument whose magnitude is `MAX_ARRAY_INTEGER` or more, since a loop with that
    many iterations would never end."""
    for name, value in [*zip(_get_hints_and_positional_names(function)[1], given, strict=False), *options.items()]:
        if type(value) is int and abs(value) >= MAX_ARRAY_INTEGER:
            raise ConfigError(f"{label}({name}={value}): the number is too large")


def _require_arguments_fit_hints(
    function: Callable[..., Any],
    label: str,
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    error: Exception | None = None,
) -> None:
    """Raise ConfigError for the first argument of the call `function(*given, **options)` that does not fit its type
    hint. `label` is the name of the function in the message.

    `error` is the exception that the call has raised, or None. If the call has failed, a 0-d array does not count as a
    number. The array may have caused the failure, because not all code accepts a 0-d array in place of a number."""
    hints, positional = _get_hints_and_positional_names(function)
    for name, value in [*zip(positional, given, strict=False), *options.items()]:
        hint = hints.get(name, Any)
        if not fits_hint(value, hint, failed=error is not None):
            needed = f"{describe_hint(hint)} is needed"
            raise ConfigError(f"{label}({name}={shorten_value(value)}): {needed}") from error


@cache
def _get_hints_and_positional_names(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the type hints of the parameters as {name: hint}, and the names of the positional parameters in order."""
    named = inspect.signature(function).parameters.values()
    positional = [one.name for one in named if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    single = [one.name for one in named if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    try:
        hints = get_type_hints(function)
    except NameError:  # some hints use names that are imported only under TYPE_CHECKING
        hints = {}
    return {name: hints[name] for name in single if name in hints}, positional


def fits_hint(value: Any, hint: Any, failed: bool = False) -> bool:
    """Return whether a value fits a type hint. NumPy scalars count as numbers, but bools do not. A list is accepted in
    place of a tuple.

    If `failed` is true, the call has already failed with this value. In that case a 0-d array does not count as a
    number, and an object of a user-defined class is not accepted in place of an fsdpx object.
    """
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
        # a string is also a Sequence[str]; the function's own check decides whether to accept one
        return origin not in (tuple, list) and inner == (str,)
    if origin in _SEQUENCES:
        return _is_sequence(value, origin) and all(
            fits_hint(one, kind, failed) for one, kind in _pair_elements_with_hints(value, inner)
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
_CHECKED_COLLECTIONS = (tuple, list, range, set, frozenset, np.ndarray)
MAX_CHECKED_ELEMENTS = 1000
"""Maximum length of a sequence whose elements are checked; longer sequences are assumed to be data."""


def _is_sequence(value: Any, collection_type: Any) -> bool:
    if isinstance(value, str | bytes | Mapping):
        return False
    if collection_type in (tuple, list):
        return isinstance(value, tuple | list)
    if isinstance(value, type) or len(getattr(value, "shape", "x")) != 1:  # only 1-D arrays count as sequences
        return False
    return isinstance(value, collection_type) or hasattr(value, "__getitem__")


def _pair_elements_with_hints(value: Any, inner: tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    """Return (element, type hint) pairs for the elements of the collection `value`. `inner` contains the arguments of
    the collection's own hint, such as `int` in `list[int]`. Return no pairs if the collection is too long to be
    checked."""
    if not inner or not isinstance(value, _CHECKED_COLLECTIONS) or len(value) > MAX_CHECKED_ELEMENTS:
        return ()
    if len(inner) == 1 or inner[1] is Ellipsis:
        return ((one, inner[0]) for one in value)
    return zip(value, inner, strict=False)


def describe_hint(hint: Any, plural: bool = False) -> str:
    """Return a type hint in words, such as "a whole number, or a tuple of whole numbers"."""
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
