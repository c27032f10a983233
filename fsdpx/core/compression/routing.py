"""Choose the gradient codec for each parameter by name pattern, and by the mesh axis over which the gradient is summed.
Also look up codecs by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, get_args

from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.config import Precision, normalize_half_name
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.extensions import EXTENSIONS, import_extension_if_declared, list_extensions
from fsdpx.core.base.name_hints import did_you_mean, wrap_constructor_with_option_check
from fsdpx.core.base.option_names import CodecName
from fsdpx.core.compression.codec import Cast16, Codec, NoCompression, ReshardRule
from fsdpx.errors import ConfigError

__all__ = ["Choice", "CodecRoute", "CodecRules", "HierarchicalCompression", "list_codec_names", "make_gradient_codec"]

ANY_PARAMETER = "*"


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class HierarchicalCompression:
    """One gradient codec within replicas and another between them. With `strategy="hybrid"`, a replica is a host, so
    the codec `shard` is used within hosts and the codec `replica` between hosts.

    Parameters
    ----------
    replica : codec for sums over the replica axis (between replicas)
    shard : codec for sums over the shard axis (within a replica)
    """

    replica: CodecName | Codec
    shard: CodecName | Codec = "plain"


SingleChoice = CodecName | Codec | HierarchicalCompression
Choice = SingleChoice | Mapping[str, SingleChoice] | Sequence[tuple[str, SingleChoice]] | None


class CodecAxisMemory(NamedTuple):
    """An array that a gradient codec keeps between steps, for a gradient summed over one mesh axis.

    Attributes
    ----------
    name : name of the array as "axis/name"
    axis : mesh axis over which the gradient is summed
    elements : number of elements
    reshard_rule : how the array is redistributed when the number of ranks changes
    """

    name: str
    axis: str
    elements: int
    reshard_rule: ReshardRule


class CodecRoute(NamedTuple):
    """The codecs of a gradient, one for each mesh axis over which it is summed."""

    shard: Codec
    replica: Codec

    def bind_shapes(self, whole: Sequence[tuple[int, ...]], mine: Sequence[tuple[int, ...]]) -> CodecRoute:
        """Return the codecs for a flat gradient that consists of tensors of these shapes: `whole` lists the shapes of
        the tensors in the full gradient, and `mine` the shapes of the tensors in this rank's shard."""
        return CodecRoute(self.shard.for_shapes(whole), self.replica.for_shapes(mine))

    def iterate_memory(self, sizes: Mapping[str, int], single_rank: bool) -> Iterator[CodecAxisMemory]:
        """Yield the arrays that the codecs keep between steps for one gradient.

        The keys of `sizes` are the mesh axes over which the gradient is summed. Each value is the number of elements in
        the sum over this axis. If `single_rank` is true, each of these axes has only one rank, and arrays whose reshard
        rule is "reset" are not kept."""
        for axis, size in sizes.items():
            codec: Codec = getattr(self, axis)
            for name, elements in codec.memory_sizes(size).items():
                reshard_rule = self.get_reshard_rule(f"{axis}/{name}")
                if reshard_rule == "sum" and elements != size:
                    raise ConfigError(
                        f"codec memory {name!r} has {elements} elements for a gradient of {size}: its reshard rule is "
                        "'sum', "
                        "so there must be as many"
                    )
                if reshard_rule != "reset" or not single_rank:
                    yield CodecAxisMemory(f"{axis}/{name}", axis, elements, reshard_rule)

    def get_reshard_rule(self, kept: str) -> ReshardRule:
        """Return the rule for redistributing the codec array named `kept` ("axis/name") when the number of ranks
        changes. Raise ConfigError if the codec specifies an unknown rule."""
        axis, _, name = kept.partition("/")
        codec: Codec = getattr(self, axis)
        reshard_rule = codec.reshard_rules.get(name, "reset")
        if reshard_rule not in get_args(ReshardRule):
            kind = type(codec).__name__
            raise ConfigError(f"{kind}: reshard rule of {name!r} is {reshard_rule!r}: choose 'sum', 'same' or 'reset'")
        return reshard_rule


@dataclass(frozen=True)
class CodecRules:
    """Rules that choose gradient codecs by parameter name. The first rule whose pattern (fnmatch) matches the name
    applies."""

    rules: tuple[tuple[str, CodecRoute], ...]

    @classmethod
    def from_choice(cls, choice: Choice, make: Callable[[str | Codec | None], Codec]) -> CodecRules:
        """Build the rules from the `compression` option. The function `make` converts an entry of the option (a codec
        or the name of a codec) to a codec. For parameters that match no pattern, `make` is called with None."""

        def make_route(one: SingleChoice | None) -> CodecRoute:
            if isinstance(one, HierarchicalCompression):
                return CodecRoute(make(one.shard), make(one.replica))
            return CodecRoute(*[make(one)] * 2)

        if choice is None or isinstance(choice, str) or not isinstance(choice, Mapping | Sequence):
            return cls(((ANY_PARAMETER, make_route(choice)),))
        rows: list[Any] = list(choice.items() if isinstance(choice, Mapping) else choice)
        for row in rows:
            if not isinstance(row, tuple) or len(row) != 2 or not isinstance(row[0], str):
                raise ConfigError(f"compression={choice!r}: {row!r} is no pair of a name pattern and a codec")
        return cls((*((pattern, make_route(one)) for pattern, one in rows), (ANY_PARAMETER, make_route(None))))

    @classmethod
    def from_user_choice(cls, choice: Choice, precision: Precision, outer: Codec | None = None) -> CodecRules:
        """Build the rules from the `compression` option, with default codecs for this precision. Raise ConfigError if a
        codec does not support the gradient dtype of this precision.

        If replicas train independently, `outer` is the codec for sums between them."""
        codecs = cls.from_choice(
            choice, lambda one: make_gradient_codec(one, precision.reduce_dtype, precision.gradient_dtype)
        )
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

    def find_rule(self, names: Collection[str]) -> tuple[int, bool]:
        """Return the index of the first rule whose pattern matches one of a parameter's `names`. Also return whether
        this rule contains a codec that is not elementwise. The results of such a codec depend on which parameters share
        a flat buffer."""
        rules = enumerate(self.rules)
        number, route = next((i, r) for i, (pattern, r) in rules if any(fnmatchcase(n, pattern) for n in names))
        return number, not all(codec.elementwise for codec in route)

    def get_codec_route(self, rule: int) -> CodecRoute:
        """Return the codecs of the rule with index `rule`, one for each mesh axis."""
        return self.rules[rule][1]

    @property
    def patterns(self) -> list[str]:
        """Name patterns that the user passed, excluding the default rule for all other parameters."""
        return [pattern for pattern, _ in self.rules[:-1]]  # the last rule is for all other parameters

    @property
    def rounding_codec_description(self) -> str:
        """Phrase for error messages that names the first codec that rounds or compresses gradients; "" if there is
        none."""
        return next((f"codec {type(codec).__name__}" for codec in self if not isinstance(codec, NoCompression)), "")

    def make_warm_up_calls(self, dtype: Any) -> list[Callable[[], None]]:
        """Return one function per codec that compiles or loads its CPU kernels for gradients of `dtype`."""
        return [partial(codec.warm_up, dtype) for codec in dict.fromkeys(self)]

    def iterate_user_notes(self, shapes: Sequence[tuple[int, Mapping[str, tuple[int, ...]]]]) -> Iterator[str]:
        """Yield each codec's note for users (`Codec.get_user_note`) about the parameters that the codec reduces.
        `shapes` contains pairs (index of a rule, dict). The dict maps the names of the parameters that use this rule to
        their shapes."""
        for codec in dict.fromkeys(self):
            own_shapes = (some for rule, some in shapes if codec in self.get_codec_route(rule))
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


def make_gradient_codec(choice: str | Codec | None, reduce: str, compute: str) -> Codec:
    """Return the gradient codec named `choice`, or `choice` itself if it is a codec. If `choice` is None, the precision
    determines the codec: a 16-bit codec if the dtype `reduce` is narrower than `compute`, and no compression
    otherwise."""
    if choice is None:
        return NoCompression() if parse_dtype(reduce).itemsize >= parse_dtype(compute).itemsize else Cast16(reduce)
    if isinstance(choice, str):
        for name, known in CODECS.items():
            if normalize_half_name(name) == normalize_half_name(choice):
                return known()
        if (make := import_extension_if_declared("codec", choice)) is not None:
            new_codec: Codec = make()
            return new_codec
        others = list_extensions("codec")
        raise ConfigError(
            f"unknown codec {choice!r}: choose one of {_format_codec_names()}, or pass a Codec"
            f"{did_you_mean(choice, others)}"
        )
    if not isinstance(choice, Codec):
        raise ConfigError(
            f"compression={choice!r} is no Codec: pass {_format_codec_names()} or an object of a class of it"
        )
    return choice


CODECS: dict[str, Callable[[], Codec]] = {
    "plain": NoCompression,
    "ring": partial(NoCompression, "ring"),
    "bf16": partial(Cast16, "bf16"),
    "fp16": partial(Cast16, "fp16"),
}
"""Codecs by name; extensions add more."""


def list_codec_names() -> list[str]:
    """Return the names of all codecs, including those of extensions."""
    return [*CODECS, *EXTENSIONS["codec"]]


def _format_codec_names() -> str:
    return ", ".join([*CODECS, *list_extensions("codec")])
