"""Which codec carries which gradients: by name pattern, by the axis over which they are summed, and by its own name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, get_args

from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.base.config import Precision, half_name
from fsdpx.core.base.extensions import TABLE, find_extension, name_extensions
from fsdpx.core.base.name_hints import knowing, meant
from fsdpx.core.compression.codec import Cast, Codec, Plain, Recut
from fsdpx.errors import ConfigError

__all__ = ["Between", "Choice", "Codecs", "Route", "codec", "codec_names"]

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


class MemoryOnAxis(NamedTuple):
    """What a codec keeps of a gradient over an axis. name: "axis/name". recut: how it reaches other ranks."""

    name: str
    axis: str
    elements: int
    recut: Recut


class Route(NamedTuple):
    """The codec of a gradient for each axis."""

    shard: Codec
    replica: Codec

    def shaped(self, whole: Sequence[tuple[int, ...]], mine: Sequence[tuple[int, ...]]) -> Route:
        """The same for a gradient that holds tensors of these shapes, whole and in this rank's part."""
        return Route(self.shard.shaped(whole), self.replica.shaped(mine))

    def kept(self, sizes: Mapping[str, int], alone: bool) -> Iterator[MemoryOnAxis]:
        """What is kept of a gradient. sizes: axes over which it is summed, and its elements there. alone: no other rank
        sums; then memory whose recut is "reset" is not kept."""
        for axis, size in sizes.items():
            codec: Codec = getattr(self, axis)
            for name, elements in codec.memory(size).items():
                recut = self.recut_of(f"{axis}/{name}")
                if recut == "sum" and elements != size:
                    raise ConfigError(
                        f"codec memory {name!r} has {elements} elements for a gradient of {size}: its recut is 'sum', "
                        "so there must be as many"
                    )
                if recut != "reset" or not alone:
                    yield MemoryOnAxis(f"{axis}/{name}", axis, elements, recut)

    def recut_of(self, kept: str) -> Recut:
        """How a memory, "axis/name", reaches other ranks."""
        axis, _, name = kept.partition("/")
        codec: Codec = getattr(self, axis)
        found = codec.recut.get(name, "reset")
        if found not in get_args(Recut):
            kind = type(codec).__name__
            raise ConfigError(f"{kind}: recut of {name!r} is {found!r}: choose 'sum', 'same' or 'reset'")
        return found


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

    @classmethod
    def chosen(cls, choice: Choice, precision: Precision, outer: Codec | None = None) -> Codecs:
        """What a user chose, for the formats of a precision; ConfigError where it cannot carry them.

        outer: between replicas that train by themselves."""
        found = cls.of(choice, lambda one: codec(one, precision.sums, precision.gradients))
        if outer is not None:
            found = cls(tuple((pattern, route._replace(replica=outer)) for pattern, route in found.rules))
        for one in found:
            one.check(precision.gradients)
            if one.feedback and precision.loss_scale == "dynamic":
                raise ConfigError(
                    f"codec {type(one).__name__} keeps what it lost in units of the loss scale, which is dynamic: "
                    "choose a fixed loss_scale, or precision='bf16'"
                )
        return found

    def rule_of(self, names: Collection[str]) -> tuple[int, bool]:
        """The number of the first rule that fits a parameter with one of these names, and whether elements are carried
        together, so that it matters which of them are."""
        rules = enumerate(self.rules)
        number, route = next((i, r) for i, (pattern, r) in rules if any(fnmatchcase(n, pattern) for n in names))
        return number, not all(codec.elementwise for codec in route)

    def route(self, rule: int) -> Route:
        """What carries the gradients for which this rule is."""
        return self.rules[rule][1]

    @property
    def patterns(self) -> list[str]:
        """The name patterns that a user gave."""
        return [pattern for pattern, _ in self.rules[:-1]]  # the last one is for parameters that no other fits

    @property
    def rounding(self) -> str:
        """The first codec that does not add gradients as they are, in words; "" if there is none."""
        return next((f"codec {type(codec).__name__}" for codec in self if not isinstance(codec, Plain)), "")

    def warm_calls(self, dtype: Any) -> list[Callable[[], None]]:
        """Calls that make ready what codecs compute with on the CPU, for gradients of `dtype`."""
        return [partial(codec.warm, dtype) for codec in dict.fromkeys(self)]

    def remarks(self, shapes: Sequence[tuple[int, Mapping[str, tuple[int, ...]]]]) -> Iterator[str]:
        """What users should know of how their parameters are carried. shapes: of the parameters, by rule."""
        for codec in dict.fromkeys(self):
            mine = (some for rule, some in shapes if codec in self.route(rule))
            if text := codec.remark(dict(pair for some in mine for pair in some.items())):
                yield text

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
        for name, known in CODECS.items():
            if half_name(name) == half_name(choice):
                return known()
        if (make := find_extension("codec", choice)) is not None:
            made: Codec = make()
            return made
        others = name_extensions("codec")
        raise ConfigError(f"unknown codec {choice!r}: choose one of {_names()}, or pass a Codec{meant(choice, others)}")
    if not isinstance(choice, Codec):
        raise ConfigError(f"codec={choice!r} is no Codec: pass {_names()} or an object of a class of it")
    return choice


CODECS: dict[str, Callable[[], Codec]] = {
    "plain": Plain,
    "ring": partial(Plain, "ring"),
    "bf16": partial(Cast, "bf16"),
    "fp16": partial(Cast, "fp16"),
}
"""By name; extensions have more."""


def codec_names() -> list[str]:
    """The names of our codecs, those of extensions among them."""
    return [*CODECS, *TABLE["codec"]]


def _names() -> str:
    return ", ".join([*CODECS, *name_extensions("codec")])
