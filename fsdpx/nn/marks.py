"""Marks: how a user wants layers to be cut over the tensor axis; and the layers that their name patterns match."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer, dotted
from fsdpx.nn.moe import MoE
from fsdpx.words import demand_match

__all__ = ["Column", "Mark", "Own", "Row", "Vocab", "matched", "paths"]


@dataclass(frozen=True)
class Column:
    """A Linear becomes a `ColumnLinear`: activations after it are cut along the features until a Row sums them.

    Without options it takes those that the plan of the layer around it has for this Linear.

    Parameters
    ----------
    gather_output : all-gather them at once instead
    blocks, grain : for results of equal blocks, or with features that must stay on one rank, see `Cut`
    """

    gather_output: bool = False
    blocks: int = 1
    grain: int = 1


@dataclass(frozen=True)
class Row:
    """A Linear that reads cut features becomes a `RowLinear`."""


@dataclass(frozen=True)
class Vocab:
    """An Embedding or TokenEmbedding is cut by rows. A Linear that ends the model returns logits that are cut by
    classes for `CrossEntropy` and all-gathered for any other loss."""


@dataclass(frozen=True)
class Own:
    """The layer's own plan: MultiHeadAttention is cut by heads, MLP by hidden features, MoE by experts, and so are
    those inside the layer; in a GPT the embedding and the head are cut by vocabulary too."""


Mark = Column | Row | Vocab | Own


def matched(model: Layer, plan: Mapping[str, Any] | None) -> tuple[dict[str, Mark], set[str]]:
    """Path -> mark of the layers that patterns match, and the paths of the layers that follow their own plan.

    plan: pattern (fnmatch on dotted paths, where `*` also matches dots; the first that matches wins) -> mark, a class
    or an instance; None: all layers follow their own plan."""
    if plan is not None and not isinstance(plan, Mapping):
        raise ConfigError(
            f"tensor_plan={plan!r}: give a dict of path patterns and marks, for example "
            '{"0": nn.Column, "2": nn.Row}, or None for the model\'s own plan'
        )
    patterns = {pattern: _mark(pattern, mark) for pattern, mark in (plan or {}).items()}
    layers = dict(paths(model))
    demand_match("tensor_plan", patterns, layers, "layer")
    marks: dict[str, Mark] = {}
    for path in layers:
        found = next((mark for pattern, mark in patterns.items() if fnmatchcase(path, pattern)), None)
        if found is not None:
            marks[path] = found
    own = _own(model, "", marks, plan is None)
    return marks, own


def paths(layer: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Every layer with its dotted path; that of the model itself is empty."""
    yield path, layer
    for name, child in layer.children().items():
        yield from paths(child, dotted(path, name))


def _own(layer: Layer, path: str, marks: dict[str, Mark], inside: bool) -> set[str]:
    """The paths at and below `path` that follow their own plan. The marks of plans of layers go into `marks`."""
    if isinstance(marks.get(path), Own):
        if not inside and not any(_has_plan(found) for _, found in paths(layer)):
            raise ConfigError(
                f"tensor_plan: {path!r} {layer!r} has no plan of its own, attention, MLPs and models have: choose "
                "nn.Column, nn.Row or nn.Vocab"
            )
        inside = True
        del marks[path]
    for name, mark in layer.plan.items():
        given = marks.get(dotted(path, name), Own())
        if inside if isinstance(given, Own) else given == Column() and isinstance(mark, Column):
            marks[dotted(path, name)] = mark
    found = {path} if inside else set()
    for name, child in layer.children().items():
        found |= _own(child, dotted(path, name), marks, inside)
    return found


def _has_plan(layer: Layer) -> bool:
    return isinstance(layer, MoE) or bool(layer.plan)


def _mark(pattern: Any, mark: Any) -> Mark:
    if not isinstance(pattern, str):
        raise ConfigError(f"tensor_plan: the pattern {pattern!r} must be text, the dotted path of a layer")
    made = mark() if isinstance(mark, type) and issubclass(mark, Mark) else mark
    if not isinstance(made, Mark):
        raise ConfigError(
            f"tensor_plan[{pattern!r}] = {mark!r}: choose nn.Column, nn.Row, nn.Vocab or nn.Own, or one of these "
            "with options"
        )
    return made
