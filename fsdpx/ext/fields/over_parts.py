"""Conversion of a model of full fields into the model that each rank runs on its part, with halo exchanges and changes
of partition where needed."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.halo_slabs import RepartitionField
from fsdpx.nn.container import ChildCall, Container, list_input_names, make_unused_name
from fsdpx.nn.layer import Layer
from fsdpx.nn.sequence import WithInputOutput
from fsdpx.nn.shard_specs import FieldPartition, Kind
from fsdpx.nn.tensor_plan import Redistribution, ShardingWalk

__all__ = ["partition_model"]


def partition_model(model: Layer, parts: FieldPartition) -> tuple[Layer, FieldPartition]:
    """Convert `model`, which takes full fields, to the model that each rank runs on its part. Return the converted
    model and the partition of its output. Communicates nothing.

    `parts` is the partition of the input; an output with the same number of cells gets the same partition. Raises
    ConfigError with the path of the first layer that cannot run on a part."""
    takes = isinstance(model, Container) or _can_take_ghosts(model)
    frame = RepartitionField(parts, parts.without_ghosts()) if parts.ghosts and not takes else None
    inputs = [parts if frame is None else parts.without_ghosts()] * len(list_input_names(model))
    made, kinds = ShardingWalk(1, None, {}, (_plan_ghost_drops, _plan_redistributions)).shard_layer(model, "", inputs)
    if frame is not None:
        made = WithInputOutput(made, frame, None)
    if len(kinds) != 1 or not isinstance(kinds[0], FieldPartition):
        raise ConfigError(f"domain=: {type(model).__name__} gives {', '.join(map(str, kinds))}: it must give one field")
    given, wanted = kinds[0], parts.without_ghosts()
    if given == wanted or given.shape != wanted.shape:
        return made, given
    shift = RepartitionField(given, wanted)
    if not isinstance(made, Container):
        return WithInputOutput(made, None, shift), wanted
    name = make_unused_name(made, "shift")
    return made.with_steps([*made.steps, ChildCall(name, shift, made.outputs, (name,))], (name,)), wanted


def _plan_ghost_drops(reader: Layer, kinds: Sequence[Kind]) -> list[Redistribution | None]:
    """Return, for each input of `reader`, the layer that drops its ghost cells, or None if they may stay.

    `kinds` says how each input is distributed over the ranks. Ghost cells are dropped if `reader` cannot use them, or
    if its inputs have different partitions."""
    takes = isinstance(reader, Container) or (_can_take_ghosts(reader) and len({*kinds}) == 1)
    return [
        Redistribution("interior", RepartitionField(kind, kind.without_ghosts()), kind.without_ghosts())
        if isinstance(kind, FieldPartition) and kind.ghosts and not takes
        else None
        for kind in kinds
    ]


def _plan_redistributions(reader: Layer, kinds: Sequence[Kind]) -> list[Redistribution | None]:
    """Return, for each input of `reader`, the redistribution to a common partition, or None if the input already has
    this partition.

    `kinds` says how each input is distributed over the ranks. Fields of the same shape can have different partitions,
    for example after odd strides. The common partition is the one whose largest part is smallest; of several such
    partitions, it is the first."""
    first = min(
        (kind for kind in kinds if isinstance(kind, FieldPartition)),
        key=lambda kind: kind.largest_part_cells,
        default=None,
    )
    return [
        Redistribution("shift", RepartitionField(kind, first), first)
        if first is not None and isinstance(kind, FieldPartition) and kind != first and kind.shape == first.shape
        else None
        for kind in kinds
    ]


def _can_take_ghosts(layer: Layer) -> bool:
    """Return whether a layer accepts inputs with ghost cells. It does if it reads ghost cells, or if it acts on each
    element separately and so keeps them in its output."""
    return layer.takes_ghosts or layer.acts_on == "element"
