"""Options with checks: a dataclass field is declared together with a check of its value. The check runs before the
dataclass is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from fsdpx.errors import ConfigError

__all__ = [
    "get_field_values", "is_bool", "is_positive_number", "make_min_int_predicate", "make_option_field",
    "make_type_predicate", "require_valid_options",
]  # fmt: skip


def is_positive_number(value: object) -> bool:
    """Return whether `value` is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def make_min_int_predicate(minimum: int) -> Callable[[Any], bool]:
    """Return a function that checks whether its argument is an integer of at least `minimum`."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def make_type_predicate(option_type: type) -> Callable[[Any], bool]:
    """Return a function that checks whether its argument is an instance of `option_type`."""
    return lambda value: isinstance(value, option_type)


def is_bool(value: Any) -> bool:
    """Return whether `value` is True or False."""
    return value is True or value is False


def make_option_field(default: Any, fits: Callable[[Any], bool], description: str) -> Any:
    """Return a dataclass field for an option of `distribute`. `fits` returns whether a value is valid, and
    `description` describes the valid values in words. If the default is None, None is valid as well."""
    return field(default=default, metadata={"fits": fits, "words": description})


def require_valid_options(owner: Any) -> None:
    """Raise ConfigError if one of the fields of `owner` that were made by `make_option_field` has an invalid value."""
    for option_field in fields(owner):
        value, fits = getattr(owner, option_field.name), option_field.metadata.get("fits")
        if fits is not None and not (value is None and option_field.default is None) and not fits(value):
            raise ConfigError(f"{option_field.name}={value!r}: {option_field.metadata['words']}")


def get_field_values(dataclass_type: type[Any], owner: Any) -> dict[str, Any]:
    """Return the attributes of `owner` that are fields of the dataclass `dataclass_type`, as a dict {name: value}."""
    return {one.name: getattr(owner, one.name) for one in fields(dataclass_type)}
