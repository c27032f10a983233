"""What an option may be, declared with it: a field of a dataclass, checked before the dataclass is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from fsdpx.errors import ConfigError

__all__ = ["demand_kinds", "flag", "option", "positive", "values_of", "whole"]


def positive(value: object) -> bool:
    """Whether `value` is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def whole(least: int) -> Callable[[Any], bool]:
    """Whether a value is a whole number, at least this one."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def flag(value: Any) -> bool:
    """Whether a value is True or False."""
    return value is True or value is False


def option(default: Any, fits: Callable[[Any], bool], words: str) -> Any:
    """A field of a dataclass: an option of `distribute` with what it may be, also in words. None fits if it is the
    default."""
    return field(default=default, metadata={"fits": fits, "words": words})


def demand_kinds(owner: Any) -> None:
    """ConfigError for an `option` of a dataclass whose value is of another kind than it takes."""
    for one in fields(owner):
        value, fits = getattr(owner, one.name), one.metadata.get("fits")
        if fits is not None and not (value is None and one.default is None) and not fits(value):
            raise ConfigError(f"{one.name}={value!r}: {one.metadata['words']}")


def values_of(kind: type[Any], owner: Any) -> dict[str, Any]:
    """The fields of one dataclass, by name, as another one that has them too has their values."""
    return {one.name: getattr(owner, one.name) for one in fields(kind)}
