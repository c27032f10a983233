"""Check that a model does not lose ghost cells. They are lost if a layer drops the ghost cells of an input, and this
layer or a later one pads the field where these cells were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.conv import WindowLayer
from fsdpx.ext.fields.resample import ConvTranspose
from fsdpx.nn.container import Container, list_input_names
from fsdpx.nn.layer import Layer, join_path
from fsdpx.nn.shard_specs import FieldPartition, Kind

__all__ = ["can_take_ghosts", "require_ghosts_are_not_ignored"]


class _GhostEnd(NamedTuple):
    """One end of the field, beyond which the arrays of a model input have ghost cells.

    Attributes
    ----------
    number : index of the model input
    dim : index of the cell dim
    side : 0 for the lower end, 1 for the upper end
    name : name of the dim for error messages
    periodic : whether the dim is periodic, so that padding of mode "circular" has the values of the ghost cells
    """

    number: int
    dim: int
    side: int
    name: str
    periodic: bool


@dataclass(frozen=True)
class _Value:
    """What is known about the ghost cells of one value (an input of the model, or an output of a layer). Only ghost
    cells beyond the ends of the field count. Ghost cells between two ranks' parts may be dropped, because later layers
    receive the same values from the neighboring rank.

    Attributes
    ----------
    kind : partition of the value, if it is an input or computed from inputs by layers that keep ghost cells; else None
    sources : ends of the field beyond which the value still has the ghost cells of a model input
    dropped : ends of the field where ghost cells of a model input were dropped -> description of the layer that dropped
        them
    """

    kind: Kind | None = None
    sources: frozenset[_GhostEnd] = frozenset()
    dropped: Mapping[_GhostEnd, str] = field(default_factory=dict)

    def without_ghosts(self, about: str) -> _Value:
        """Return what is known about this value after its ghost cells have been dropped. `about` describes the layer
        that drops them."""
        return _Value(dropped={**dict.fromkeys(self.sources, about), **self.dropped})


def can_take_ghosts(layer: Layer) -> bool:
    """Return whether a layer accepts inputs with ghost cells. A layer accepts them if it reads ghost cells, or if it
    acts on each element separately. In the second case, the output has ghost cells as well."""
    return layer.takes_ghosts or layer.acts_on == "element"


def require_ghosts_are_not_ignored(model: Layer, kinds: Sequence[Kind]) -> None:
    """Raise ConfigError if the ghost cells of a model input beyond an end of the field would be ignored. This is so if
    three conditions hold: a layer drops the ghost cells; this layer or a later one pads the field at this end, and is a
    convolution, a transposed convolution or a pool; and no convolution reads the ghost cells. A layer drops ghost cells
    if it does not accept inputs with ghost cells, or if it combines the input with a field that has different ghost
    cells or none. `kinds` says how the inputs of the model are distributed over the ranks."""
    read, padded = set[_GhostEnd](), dict[_GhostEnd, str]()
    values = [_Value(kind, _find_ghost_ends(i, kind)) for i, kind in enumerate(kinds)]
    if not any(value.sources for value in values):
        return
    _propagate_ghosts_through_layer(model, "", values, read, padded)
    names = list_input_names(model)
    for end in sorted(padded.keys() - read):
        same = "give all fields that are combined the same ghost cells, or " * ("combines it" in padded[end])
        raise ConfigError(
            f"the ghost cells of input {names[end.number]!r} would be ignored: {padded[end]}: {same}apply a "
            "convolution with padding to this input first, because it reads ghost cells instead of padding (for "
            "patches, kernel_size=stride + 2 and padding=1), or make the grid without ghosts"
        )


def _find_ghost_ends(number: int, kind: Kind) -> frozenset[_GhostEnd]:
    """Return the ends of the field beyond which model input `number` has ghost cells."""
    if not isinstance(kind, FieldPartition) or not kind.ghosts:
        return frozenset()
    rows = zip(kind.make_single_rank_partition().ghosts, kind.periods, strict=True)
    return frozenset(
        _GhostEnd(number, dim, side, kind.get_dim_name(dim), periodic)
        for dim, ((widths,), periodic) in enumerate(rows)
        for side in (0, 1)
        if widths[side]
    )


def _propagate_ghosts_through_layer(
    layer: Layer, path: str, values: Sequence[_Value], read: set[_GhostEnd], padded: dict[_GhostEnd, str]
) -> list[_Value]:
    """Return the outputs of a layer, given its inputs. Add to `read` each end of the field where the layer reads ghost
    cells of a model input. Add to `padded` each end where the layer pads the field because ghost cells were dropped
    earlier, with a description of how this happened."""
    if isinstance(layer, Container):
        found = dict(zip(layer.inputs, values, strict=True))
        for step in layer.steps:
            given = [found[name] for name in step.sources]
            outputs = _propagate_ghosts_through_layer(step.layer, join_path(path, step.name), given, read, padded)
            found.update(zip(step.gives, outputs, strict=True))
        return [found[name] for name in layer.outputs]
    text, scalars = f"{path!r} {layer!r}", getattr(layer, "scalar_inputs", ())
    fields = [value for i, value in enumerate(values) if i not in scalars]
    if isinstance(net := getattr(layer, "net", None), Layer):
        count = len(list_input_names(net))
        # inputs after those of `net` are boundary values; their ghost cells become the ghost cells of later states
        given = [_merge_values_of_same_kind([value, *values[count + i :][:1]]) for i, value in enumerate(values)]
        results = _propagate_ghosts_through_layer(net, path, given[:count], read, padded)
        return [result.without_ghosts(f"{text} drops them") for result in results]
    if can_take_ghosts(layer) and len({value.kind for value in fields}) > 1:
        about = f"{text} combines it with a field of other ghost cells or none"
        values = fields = [value.without_ghosts(about) for value in values]
    result = _merge_values_of_same_kind(fields) if fields else _Value()
    if isinstance(layer, WindowLayer | ConvTranspose):
        pads = _count_cells_read_beyond_ends(layer)
        reached = {end for end in (*result.sources, *result.dropped) if sum(pads[end.side][end.dim : end.dim + 1]) > 0}
        if can_take_ghosts(layer):
            read |= result.sources & reached
        else:
            result = result.without_ghosts(f"{text} drops them")
        for end in reached & result.dropped.keys():
            if not (end.periodic and "circular" in layer.window.modes[end.dim]):
                about = f"{result.dropped[end]}, and {text} pads the result along {end.name}"
                padded.setdefault(end, about)
    elif can_take_ghosts(layer):
        return [result] * layer.n_outputs
    return [result.without_ghosts(f"{text} drops them")] * layer.n_outputs


def _count_cells_read_beyond_ends(layer: WindowLayer | ConvTranspose) -> Sequence[Sequence[int]]:
    """For the lower and the upper end of each dim, return how many cells beyond this end the outputs depend on. Cells
    that the layer replaces with padding are also counted. A number of 0 or less means that there are none."""
    window = layer.window
    if isinstance(layer, WindowLayer):
        return window.low, window.high
    low = [n - s - pad for n, s, pad in zip(window.spans, window.stride, window.low, strict=True)]
    return low, [n + more for n, more in zip(low, layer.more, strict=True)]


def _merge_values_of_same_kind(values: Sequence[_Value]) -> _Value:
    """Return what is known about the ghost cells of a value that is computed from `values`, which are all of the same
    kind."""
    sources = frozenset[_GhostEnd]().union(*(value.sources for value in values))
    return _Value(values[0].kind, sources, {i: one for value in values for i, one in value.dropped.items()})
