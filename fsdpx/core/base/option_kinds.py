"""What an option may be, declared with it: a field of a dataclass, checked before the dataclass is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from fsdpx.errors import ConfigError

__all__ = ["demand_kinds", "is_bool", "is_int_at_least", "is_positive_number", "make_option_field", "values_of"]


def is_positive_number(value: object) -> bool:
    """Whether `value` is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def is_int_at_least(least: int) -> Callable[[Any], bool]:
    """Whether a value is a whole number, at least this one."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_bool(value: Any) -> bool:
    """Whether a value is True or False."""
    return value is True or value is False


def make_option_field(default: Any, fits: Callable[[Any], bool], words: str) -> Any:
    """A field of a dataclass: an option of `distribute` with what it may be, also in words. None fits if it is the
    default."""
    return field(default=default, metadata={"fits": fits, "words": words})


def demand_kinds(owner: Any) -> None:
    """ConfigError for an `option` of a dataclass whose value is of another kind than it takes."""
    for option_field in fields(owner):
        value, fits = getattr(owner, option_field.name), option_field.metadata.get("fits")
        if fits is not None and not (value is None and option_field.default is None) and not fits(value):
            raise ConfigError(f"{option_field.name}={value!r}: {option_field.metadata['words']}")


def values_of(kind: type[Any], owner: Any) -> dict[str, Any]:
    """The fields of one dataclass, by name, as another one that has them too has their values."""
    return {one.name: getattr(owner, one.name) for one in fields(kind)}
