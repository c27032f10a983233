"""The user's options for an elastic run."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

from fsdpx.config import python_fields
from fsdpx.errors import ConfigError

__all__ = ["Elastic"]


@dataclass(frozen=True)
class Elastic:
    """For `distribute(..., elastic=Elastic(...))`; elastic=True is all defaults.

    Parameters
    ----------
    copies : ranks that keep a copy of each rank's state, beside replicas: any of this number may die at once
    every : steps between two copies; up to this many may have to be repeated (default: at about 1 % of the time)
    ranks : how many train at first (default: all that the mesh can use); the others are idle and follow
    resize : a file; whenever its text is another number, that many ranks train from the next step on
    """

    copies: int = 1
    every: int | None = None
    ranks: int | None = None
    resize: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        python_fields(self)
        for name, least in (("copies", 0), ("every", 1), ("ranks", 1)):
            value = getattr(self, name)
            if not (value is None and name != "copies") and (type(value) is not int or value < least):
                raise ConfigError(f"Elastic({name}={value!r}): a whole number, {least} or more")

    @classmethod
    def of(cls, choice: Any) -> Elastic | None:
        """From what `distribute(elastic=...)` was given; None for a run that is not elastic."""
        if isinstance(choice, cls):
            return choice
        if isinstance(choice, bool) or choice is None:
            return cls() if choice else None
        raise ConfigError(f"elastic={choice!r}: True, False or fsdpx.Elastic(...)")
