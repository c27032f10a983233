"""The facts on an architecture of another library: how its model is made here, and the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.models.fields import HARMLESS, PLAIN, ConfigField, checked, shown
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
    turned : patterns (fnmatch) of the names here of matrices that are stored transposed
    unused : patterns of names there that are needed for nothing
    fields : of the configuration, that the model is made of
    plain : fields that must have one of these values, or be left out: others are computed nowhere here
    harmless : fields that change nothing. Any other field, and none of all architectures', is an error
    same : other names of fields
    tied : a tensor -> the tensor that it is if `tie_word_embeddings` says so; the first of them is the head
    """

    make: Callable[..., Container]
    names: Mapping[str, str]
    base: str = ""
    turned: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    fields: Mapping[str, ConfigField] = field(default_factory=dict)
    plain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    same: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def settled(self, config: Config, where: str, parts: int) -> dict[str, Any]:
        """The values of `fields`; ConfigError for a field that may mean what is computed nowhere here."""
        values = dict(config)
        for alias, name in self.same.items():
            value = values.pop(alias, None)
            if value is not None and values.setdefault(name, value) != value:
                raise ConfigError(f"{where}: {alias}={shown(value)} and {name}={shown(values[name])} are one field")
        plain = {**PLAIN, **self.plain}
        for name, value in values.items():
            if name in self.fields or name in HARMLESS or name in self.harmless:
                continue
            if name in plain and value not in plain[name]:
                raise ConfigError(f"{where}: {name}={shown(value)} is computed nowhere here, {plain[name][0]!r} is")
            if name not in plain and value is not None:
                raise ConfigError(
                    f"{where}: {name}={shown(value)}: this field is not known, and may mean what is computed nowhere "
                    "here; take it out of the file if the model is the same without it"
                )
        return checked(values, self.fields, where, parts)

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
