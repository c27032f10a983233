"""A model for ranks that have parts of each field: the walk that cuts its layers, and moves fields between them."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.halo_slabs import Shift
from fsdpx.nn.container import ChildCall, Container, free, input_names
from fsdpx.nn.layer import Layer
from fsdpx.nn.sequence import Framed
from fsdpx.nn.sharding import Kind, Parts
from fsdpx.nn.tensor_plan import LayerMove, Walk

__all__ = ["over_parts"]


def over_parts(model: Layer, parts: Parts) -> tuple[Layer, Parts]:
    """`model` for ranks that have parts of each field: its inputs are cut as `parts`, and its output as the second
    result says; as the inputs, if it has as many cells. ConfigError, with the path of the layer, for what cannot work
    on a part. Communicates nothing."""
    takes = isinstance(model, Container) or _takes_ghosts(model)
    frame = Shift(parts, parts.bare()) if parts.ghosts and not takes else None
    inputs = [parts if frame is None else parts.bare()] * len(input_names(model))
    made, kinds = Walk(1, None, {}, (_drop_ghosts, _align)).visit(model, "", inputs)
    if frame is not None:
        made = Framed(made, frame, None)
    if len(kinds) != 1 or not isinstance(kinds[0], Parts):
        raise ConfigError(f"space=: {type(model).__name__} gives {', '.join(map(str, kinds))}: it must give one field")
    given, wanted = kinds[0], parts.bare()
    if given == wanted or given.shape != wanted.shape:
        return made, given
    shift = Shift(given, wanted)
    if not isinstance(made, Container):
        return Framed(made, None, shift), wanted
    name = free(made, "shift")
    return made.rewired([*made.steps, ChildCall(name, shift, made.outputs, (name,))], (name,)), wanted


def _drop_ghosts(reader: Layer, kinds: Sequence[Kind]) -> list[LayerMove | None]:
    """Fields lose their ghost cells before a layer that does not read these, or beside fields without any."""
    takes = isinstance(reader, Container) or (_takes_ghosts(reader) and len({*kinds}) == 1)
    return [
        LayerMove("interior", Shift(kind, kind.bare()), kind.bare())
        if isinstance(kind, Parts) and kind.ghosts and not takes
        else None
        for kind in kinds
    ]


def _align(reader: Layer, kinds: Sequence[Kind]) -> list[LayerMove | None]:
    """Fields of one shape that are cut in two ways, as after odd strides, come to lie as the one of them does whose
    largest part is the smallest, the first of equals."""
    first = min((kind for kind in kinds if isinstance(kind, Parts)), key=lambda kind: kind.largest, default=None)
    return [
        LayerMove("shift", Shift(kind, first), first)
        if first is not None and isinstance(kind, Parts) and kind != first and kind.shape == first.shape
        else None
        for kind in kinds
    ]


def _takes_ghosts(layer: Layer) -> bool:
    """Whether ghost cells go into a layer: it reads them, or makes those of its result of them, cell by cell."""
    return layer.takes_ghosts or layer.acts_on == "element"
