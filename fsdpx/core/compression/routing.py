"""Which codec carries which gradients: by name pattern, by the axis over which they are summed, and by its own name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, get_args

from fsdpx.core.array.namespace import parse_dtype as dtype_of
from fsdpx.core.base.config import Precision, normalize_half_name
from fsdpx.core.base.extensions import EXTENSIONS, find_extension, list_extensions
from fsdpx.core.base.name_hints import did_you_mean, suggest_options
from fsdpx.core.compression.codec import Cast16, Codec, NoCompression, ReshardRule
from fsdpx.errors import ConfigError

__all__ = ["Choice", "CodecRoute", "CodecRules", "HierarchicalCompression", "codec_names", "make_codec"]

ANY = "*"


@suggest_options
@dataclass(frozen=True)
class HierarchicalCompression:
    """Another codec between replicas than inside each: where a replica is a host, as with `strategy="hybrid"`, what
    travels inside hosts and what between them.

    replica : carries sums over the replica axis
    shard : carries sums over the shard axis"""

    replica: str | Codec
    shard: str | Codec = "plain"


One = str | Codec | HierarchicalCompression
Choice = One | Mapping[str, One] | Sequence[tuple[str, One]] | None


class CodecAxisMemory(NamedTuple):
    """What a codec keeps of a gradient over an axis. name: "axis/name". recut: how it reaches other ranks."""

    name: str
    axis: str
    elements: int
    recut: ReshardRule


class CodecRoute(NamedTuple):
    """The codec of a gradient for each axis."""

    shard: Codec
    replica: Codec

    def with_shapes(self, whole: Sequence[tuple[int, ...]], mine: Sequence[tuple[int, ...]]) -> CodecRoute:
        """The same for a gradient that holds tensors of these shapes, whole and in this rank's part."""
        return CodecRoute(self.shard.for_shapes(whole), self.replica.for_shapes(mine))

    def iterate_memory(self, sizes: Mapping[str, int], alone: bool) -> Iterator[CodecAxisMemory]:
        """What is kept of a gradient. sizes: axes over which it is summed, and its elements there. alone: no other rank
        sums; then memory whose recut is "reset" is not kept."""
        for axis, size in sizes.items():
            codec: Codec = getattr(self, axis)
            for name, elements in codec.memory_sizes(size).items():
                recut = self.recut_of(f"{axis}/{name}")
                if recut == "sum" and elements != size:
                    raise ConfigError(
                        f"codec memory {name!r} has {elements} elements for a gradient of {size}: its recut is 'sum', "
                        "so there must be as many"
                    )
                if recut != "reset" or not alone:
                    yield CodecAxisMemory(f"{axis}/{name}", axis, elements, recut)

    def recut_of(self, kept: str) -> ReshardRule:
        """How a memory, "axis/name", reaches other ranks."""
        axis, _, name = kept.partition("/")
        codec: Codec = getattr(self, axis)
        reshard_rule = codec.reshard_rules.get(name, "reset")
        if reshard_rule not in get_args(ReshardRule):
            kind = type(codec).__name__
            raise ConfigError(f"{kind}: recut of {name!r} is {reshard_rule!r}: choose 'sum', 'same' or 'reset'")
        return reshard_rule


@dataclass(frozen=True)
class CodecRules:
    """Rules in order: the first whose pattern (fnmatch) fits a name of a parameter carries its gradient."""

    rules: tuple[tuple[str, CodecRoute], ...]

    @classmethod
    def from_choice(cls, choice: Choice, make: Callable[[str | Codec | None], Codec]) -> CodecRules:
        """make: the codec behind a name, and the one for what no pattern fits, behind None."""

        def make_route(one: One | None) -> CodecRoute:
            if isinstance(one, HierarchicalCompression):
                return CodecRoute(make(one.shard), make(one.replica))
            return CodecRoute(*[make(one)] * 2)

        if choice is None or isinstance(choice, str) or not isinstance(choice, Mapping | Sequence):
            return cls(((ANY, make_route(choice)),))
        rows: list[Any] = list(choice.items() if isinstance(choice, Mapping) else choice)
        for row in rows:
            if not isinstance(row, tuple) or len(row) != 2 or not isinstance(row[0], str):
                raise ConfigError(f"compression={choice!r}: {row!r} is no pair of a name pattern and a codec")
        return cls((*((pattern, make_route(one)) for pattern, one in rows), (ANY, make_route(None))))

    @classmethod
    def from_user_choice(cls, choice: Choice, precision: Precision, outer: Codec | None = None) -> CodecRules:
        """What a user chose, for the formats of a precision; ConfigError where it cannot carry them.

        outer: between replicas that train by themselves."""
        codecs = cls.from_choice(choice, lambda one: make_codec(one, precision.reduce_dtype, precision.gradient_dtype))
        if outer is not None:
            codecs = cls(tuple((pattern, route._replace(replica=outer)) for pattern, route in codecs.rules))
        for axis_codec in codecs:
            axis_codec.check(precision.gradient_dtype)
            if axis_codec.feedback and precision.loss_scale == "dynamic":
                raise ConfigError(
                    f"codec {type(axis_codec).__name__} keeps what it lost in units of the loss scale, which is "
                    "dynamic: "
                    "choose a fixed loss_scale, or precision='bf16'"
                )
        return codecs

    def rule_of(self, names: Collection[str]) -> tuple[int, bool]:
        """The number of the first rule that fits a parameter with one of these names, and whether elements are carried
        together, so that it matters which of them are."""
        rules = enumerate(self.rules)
        number, route = next((i, r) for i, (pattern, r) in rules if any(fnmatchcase(n, pattern) for n in names))
        return number, not all(codec.elementwise for codec in route)

    def get_route(self, rule: int) -> CodecRoute:
        """What carries the gradients for which this rule is."""
        return self.rules[rule][1]

    @property
    def patterns(self) -> list[str]:
        """The name patterns that a user gave."""
        return [pattern for pattern, _ in self.rules[:-1]]  # the last one is for parameters that no other fits

    @property
    def find_rounding_codec(self) -> str:
        """The first codec that does not add gradients as they are, in words; "" if there is none."""
        return next((f"codec {type(codec).__name__}" for codec in self if not isinstance(codec, NoCompression)), "")

    def warm_calls(self, dtype: Any) -> list[Callable[[], None]]:
        """Calls that make ready what codecs compute with on the CPU, for gradients of `dtype`."""
        return [partial(codec.warm_up, dtype) for codec in dict.fromkeys(self)]

    def iterate_remarks(self, shapes: Sequence[tuple[int, Mapping[str, tuple[int, ...]]]]) -> Iterator[str]:
        """What users should know of how their parameters are carried. shapes: of the parameters, by rule."""
        for codec in dict.fromkeys(self):
            own_shapes = (some for rule, some in shapes if codec in self.get_route(rule))
            if text := codec.get_user_note(dict(pair for some in own_shapes for pair in some.items())):
                yield text

    def __iter__(self) -> Iterator[Codec]:
        return (codec for _, route in self.rules for codec in dict.fromkeys(route))

    def __repr__(self) -> str:
        ways = (
            (pattern, " inside, ".join(map(_describe_codec, dict.fromkeys(route)))) for pattern, route in self.rules
        )
        return "; ".join(f"{pattern}: {way}" for pattern, way in ways)


def _describe_codec(codec: Codec) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(codec).items()))
    return type(codec).__name__ + ("" if " at 0x" in options else f"({options})")


def make_codec(choice: str | Codec | None, reduce: str, compute: str) -> Codec:
    """The codec behind a name, or the one that a precision implies."""
    if choice is None:
        return NoCompression() if dtype_of(reduce).itemsize >= dtype_of(compute).itemsize else Cast16(reduce)
    if isinstance(choice, str):
        for name, known in CODECS.items():
            if normalize_half_name(name) == normalize_half_name(choice):
                return known()
        if (make := find_extension("codec", choice)) is not None:
            new_codec: Codec = make()
            return new_codec
        others = list_extensions("codec")
        raise ConfigError(
            f"unknown codec {choice!r}: choose one of {_list_names()}, or pass a Codec{did_you_mean(choice, others)}"
        )
    if not isinstance(choice, Codec):
        raise ConfigError(f"compression={choice!r} is no Codec: pass {_list_names()} or an object of a class of it")
    return choice


CODECS: dict[str, Callable[[], Codec]] = {
    "plain": NoCompression,
    "ring": partial(NoCompression, "ring"),
    "bf16": partial(Cast16, "bf16"),
    "fp16": partial(Cast16, "fp16"),
}
"""By name; extensions have more."""


def codec_names() -> list[str]:
    """The names of our codecs, those of extensions among them."""
    return [*CODECS, *EXTENSIONS["codec"]]


def _list_names() -> str:
    return ", ".join([*CODECS, *list_extensions("codec")])
