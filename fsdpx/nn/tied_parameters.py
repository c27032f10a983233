"""Tied parameters: several names for one parameter."""

from collections.abc import Mapping
from typing import Any

from fsdpx.errors import ConfigError

__all__ = ["get_canonical_name", "resolve_ties_to_canonical_names"]


def resolve_ties_to_canonical_names(owner: str, ties: Mapping[str, str], specs: Mapping[str, Any]) -> dict[str, str]:
    """Return `ties` with every alias mapped to its canonical name, even if it is an alias of an alias. Raise
    ConfigError unless both names of each tie exist and belong to parameters of the same shape."""
    for name in [*ties, *ties.values()]:
        if name not in specs:
            raise ConfigError(f"{owner}: tie names {name!r}, which is no parameter; there are {', '.join(specs)}")
    resolved = {alias: _follow_aliases(owner, alias, ties) for alias in ties}
    for alias, name in resolved.items():
        if specs[alias].shape != specs[name].shape:
            raise ConfigError(
                f"{owner}: cannot tie {alias!r} {specs[alias].shape} to {name!r} {specs[name].shape}: "
                "tied parameters must have the same shape"
            )
    return resolved


def get_canonical_name(ties: Mapping[str, str], name: str) -> str:
    """Return the canonical name of a parameter: follow `ties` to a name that is not an alias."""
    while name in ties:
        name = ties[name]
    return name


def _follow_aliases(owner: str, alias: str, ties: Mapping[str, str]) -> str:
    walk = [alias]
    while walk[-1] in ties:
        name = ties[walk[-1]]
        if name in walk:
            raise ConfigError(f"{owner}: ties lead in a circle: {' -> '.join([*walk, name])}")
        walk.append(name)
    return walk[-1]
