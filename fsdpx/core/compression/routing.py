"""Which codec carries which gradients: by name pattern, by the axis over which they are summed, and by its own name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.base.config import half_name
from fsdpx.core.base.extensions import find_extension, name_extensions
from fsdpx.core.base.name_hints import knowing, meant
from fsdpx.core.compression.codec import Cast, Codec, Plain
from fsdpx.errors import ConfigError

__all__ = ["Between", "Choice", "Codecs", "Route", "codec"]

ANY = "*"


@knowing
@dataclass(frozen=True)
class Between:
    """Another codec between replicas than inside each: where a replica is a host, as with `strategy="hybrid"`, what
    travels inside hosts and what between them.

    codec : carries sums over the replica axis
    inside : carries sums over the shard axis"""

    codec: str | Codec
    inside: str | Codec = "plain"


One = str | Codec | Between
Choice = One | Mapping[str, One] | Sequence[tuple[str, One]] | None


class Route(NamedTuple):
    """The codec of a gradient for each axis."""

    shard: Codec
    replica: Codec


@dataclass(frozen=True)
class Codecs:
    """Rules in order: the first whose pattern (fnmatch) fits a name of a parameter carries its gradient."""

    rules: tuple[tuple[str, Route], ...]

    @classmethod
    def of(cls, choice: Choice, make: Callable[[str | Codec | None], Codec]) -> Codecs:
        """make: the codec behind a name, and the one for what no pattern fits, behind None."""

        def route(one: One | None) -> Route:
            if isinstance(one, Between):
                return Route(make(one.inside), make(one.codec))
            return Route(*[make(one)] * 2)

        if choice is None or isinstance(choice, str) or not isinstance(choice, Mapping | Sequence):
            return cls(((ANY, route(choice)),))
        rows: list[Any] = list(choice.items() if isinstance(choice, Mapping) else choice)
        for row in rows:
            if not isinstance(row, tuple) or len(row) != 2 or not isinstance(row[0], str):
                raise ConfigError(f"codec={choice!r}: {row!r} is no pair of a name pattern and a codec")
        return cls((*((pattern, route(one)) for pattern, one in rows), (ANY, route(None))))

    def number(self, names: Collection[str]) -> int:
        """The number of the first rule that fits a parameter with one of these names."""
        return next(i for i, (pattern, _) in enumerate(self.rules) if any(fnmatchcase(n, pattern) for n in names))

    def __iter__(self) -> Iterator[Codec]:
        return (codec for _, route in self.rules for codec in dict.fromkeys(route))

    def __repr__(self) -> str:
        ways = ((pattern, " inside, ".join(map(_words, dict.fromkeys(route)))) for pattern, route in self.rules)
        return "; ".join(f"{pattern}: {way}" for pattern, way in ways)


def _words(codec: Codec) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(codec).items()))
    return type(codec).__name__ + ("" if " at 0x" in options else f"({options})")


def codec(choice: str | Codec | None, reduce: str, compute: str) -> Codec:
    """The codec behind a name, or the one that a precision implies."""
    if choice is None:
        return Plain() if dtype_of(reduce).itemsize >= dtype_of(compute).itemsize else Cast(reduce)
    if isinstance(choice, str):
        if choice in ("plain", "ring"):
            return Plain("ring" if choice == "ring" else "library")
        if half_name(choice) in ("bf16", "float16"):
            return Cast(choice)
        if (make := find_extension("codec", choice)) is not None:
            made: Codec = make()
            return made
        others = name_extensions("codec")
        raise ConfigError(f"unknown codec {choice!r}: choose one of {_names()}, or pass a Codec{meant(choice, others)}")
    if not isinstance(choice, Codec):
        raise ConfigError(f"codec={choice!r} is no Codec: pass {_names()} or an object of a class of it")
    return choice


def _names() -> str:
    return ", ".join(["plain, ring, bf16, fp16", *name_extensions("codec")])
