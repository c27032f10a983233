"""Check for lost ghost cells: a layer drops the ghost cells of an input, and a later convolution would have read these
cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.conv import WindowLayer
from fsdpx.nn.container import Container, list_input_names
from fsdpx.nn.layer import Layer, join_path
from fsdpx.nn.shard_specs import Kind

__all__ = ["can_take_ghosts", "require_readable_ghosts"]


@dataclass(frozen=True)
class _Value:
    """What is known about the ghost cells of a value, which is an input of the model or an output of a layer.

    Attributes
    ----------
    kind : partition of the value, if it is an input or computed from inputs by layers that keep ghost cells; else None
    sources : indices of the model inputs whose ghost cells the value still has
    dropped : index of each model input whose ghost cells were dropped -> description of the layer that dropped them, by
        combining the input with a field that has other ghost cells or none
    """

    kind: Kind | None = None
    sources: frozenset[int] = frozenset()
    dropped: Mapping[int, str] = field(default_factory=dict)


def can_take_ghosts(layer: Layer) -> bool:
    """Return whether a layer accepts inputs with ghost cells. A layer does if it reads ghost cells, or if it acts on
    each element separately, so that the output has ghost cells as well."""
    return layer.takes_ghosts or layer.acts_on == "element"


def require_readable_ghosts(model: Layer, kinds: Sequence[Kind]) -> None:
    """Raise ConfigError if the ghost cells of a model input would be ignored. This is so if three conditions hold: a
    layer combines the input with a field that has other ghost cells or none, a convolution reads the result, and no
    layer reads the ghost cells of the input. `kinds` says how the inputs of the model are distributed over the
    ranks."""
    read, padded = set[int](), dict[int, str]()
    values = [_Value(kind, frozenset({i} if getattr(kind, "ghosts", ()) else ())) for i, kind in enumerate(kinds)]
    if not any(value.sources for value in values):
        return
    _propagate_ghosts_through_layer(model, "", values, read, padded)
    names = list_input_names(model)
    for i in sorted(padded.keys() - read):
        raise ConfigError(
            f"the ghost cells of input {names[i]!r} would be ignored: {padded[i]}: give all fields that are combined "
            "the same ghost cells, or apply a convolution to this input first, or make the grid without ghosts"
        )


def _propagate_ghosts_through_layer(
    layer: Layer, path: str, values: Sequence[_Value], read: set[int], padded: dict[int, str]
) -> list[_Value]:
    """Return the outputs of a layer, given its inputs. If the layer reads the ghost cells of a model input, add the
    index of this input to `read`. If the layer would have read ghost cells that were dropped earlier, add the index of
    their input to `padded`, with a description."""
    if isinstance(layer, Container):
        found = dict(zip(layer.inputs, values, strict=True))
        for step in layer.steps:
            given = [found[name] for name in step.sources]
            outputs = _propagate_ghosts_through_layer(step.layer, join_path(path, step.name), given, read, padded)
            found.update(zip(step.gives, outputs, strict=True))
        return [found[name] for name in layer.outputs]
    text, scalars = f"{path!r} {layer!r}", getattr(layer, "scalar_inputs", ())
    fields = [value for i, value in enumerate(values) if i not in scalars]
    result = _Value()
    if can_take_ghosts(layer) and fields:
        if len({value.kind for value in fields}) > 1:
            about = f"{text} combines it with a field of other ghost cells or none"
            values = fields = [_Value(dropped={**dict.fromkeys(one.sources, about), **one.dropped}) for one in values]
        if hasattr(layer, "net"):
            count = len(list_input_names(layer.net))
            # the ghost cells of boundary values, an input after those of `net`, become ghost cells of later states
            given = [_merge_values_of_same_kind([values[0], *values[count:]]), *values[1:count]]
            _propagate_ghosts_through_layer(layer.net, path, given, read, padded)
        elif not isinstance(layer, WindowLayer):
            result = _merge_values_of_same_kind(fields)
        elif max(layer.window.kernel) > 1:
            read |= fields[0].sources
            for i, one in fields[0].dropped.items():
                padded.setdefault(i, f"{one}, and {text} reads the result")
    return [result] * layer.n_outputs


def _merge_values_of_same_kind(values: Sequence[_Value]) -> _Value:
    """Return what is known about the ghost cells of a value computed from values of the same kind."""
    sources = frozenset[int]().union(*(value.sources for value in values))
    return _Value(values[0].kind, sources, {i: one for value in values for i, one in value.dropped.items()})
