"""The facts on an architecture of another library: how its model is made here, and the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn.container import Container

__all__ = ["Architecture", "Config"]

Config = Mapping[str, Any]
"""`config.json`."""


@dataclass(frozen=True)
class Architecture:
    """One line of the table.

    Parameters
    ----------
    make : from the configuration and options of the caller to the model
    names : the name of a parameter here, or its beginning (ending in a dot) -> the same there; * is the number of a
        block. With # there, tensors of that name with 0, 1, ... in its place are the parameter's parts along its first
        dim. The first that fits counts
    base : the beginning of names that files of the model without its head leave out
    turned : patterns (fnmatch) of the names here of matrices that are stored the other way round
    unused : patterns of names there that are needed for nothing
    plain : options of the configuration that must have these values, or be left out: others are computed nowhere here
    """

    make: Callable[..., Container]
    names: Mapping[str, str]
    base: str = ""
    turned: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    plain: Mapping[str, Any] = field(default_factory=dict)

    def theirs(self, name: str, rows: int) -> tuple[str, ...]:
        """The names of a parameter there: one tensor, or one for each of its `rows`."""
        found = self._there(name)
        return tuple(found.replace("#", str(row)) for row in range(rows)) if "#" in found else (found,)

    def _there(self, name: str) -> str:
        for ours, theirs in self.names.items():
            pattern = re.escape(ours).replace(r"\*", r"(\d+)") + ("(.*)" if ours.endswith(".") else "")
            if match := re.fullmatch(pattern, name):
                groups = list(match.groups())
                rest = groups.pop() if ours.endswith(".") else ""
                return (theirs.replace("*", groups[0]) if groups else theirs) + rest
        raise ConfigError(f"{name} has no name in the files of this architecture")

    def is_turned(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.turned)

    def is_unused(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.unused)
