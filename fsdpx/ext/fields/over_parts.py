"""Converts a model of full fields into the model that each rank runs on its part, and adds halo exchanges and
redistributions as needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.ghost_checks import can_take_ghosts, require_ghosts_are_not_ignored
from fsdpx.ext.fields.halo_slabs import RepartitionField
from fsdpx.nn.container import ChildCall, Container, list_input_names, make_unused_name
from fsdpx.nn.layer import Layer, LayerContext, Params
from fsdpx.nn.sequence import WithInputOutput
from fsdpx.nn.shard_specs import FieldPartition, Kind, Replicated
from fsdpx.nn.tensor_plan import Redistribution, ShardingWalk

__all__ = [
    "PartitionedModel", "TakesScalars", "TakesSeveralGrids", "find_scalar_inputs", "partition_model",
    "partition_model_of_fields", "require_all_fields_or_all_scalars",
]  # fmt: skip


class TakesScalars:
    """Base class for layers that take scalars in addition to a field. The scalars form an array (samples, n), which
    every rank of the field holds in full."""

    scalar_inputs: tuple[int, ...] = ()
    """Indices of the inputs that are scalars."""


class TakesSeveralGrids:
    """Base class for layers whose inputs may lie on different grids, each with its own ghost cells."""


class PartitionedModel(NamedTuple):
    """The model that each rank runs on its part of the fields.

    Attributes
    ----------
    model : the converted model
    inputs, outputs : distribution of each input and output: the partition of a field, or `Replicated` for scalars,
        which every rank holds in full
    """

    model: Layer
    inputs: tuple[Kind, ...]
    outputs: tuple[Kind, ...]


def partition_model(model: Layer, parts: FieldPartition) -> tuple[Layer, FieldPartition]:
    """Convert `model`, which takes full fields, into the model that each rank runs on its part. Return the converted
    model and the partition of its only output. Does not communicate.

    `parts` is the partition of the input. If the output has the same number of cells, it gets the same partition.
    Raises ConfigError if a layer cannot run on a part (the message contains the path of the first such layer), or if
    the output is not a single field."""
    made, _, kinds = partition_model_of_fields(model, (parts,))
    if len(kinds) != 1 or not isinstance(kinds[0], FieldPartition):
        raise ConfigError(f"domain=: {type(model).__name__} must return one field, not {', '.join(map(str, kinds))}")
    return made, kinds[0]


def partition_model_of_fields(
    model: Layer, parts: Sequence[FieldPartition], known: Sequence[FieldPartition] = (), outputs: Sequence[Kind] = ()
) -> PartitionedModel:
    """Like `partition_model`, but allow several inputs and outputs, which may be fields or scalars.

    `parts` are the partitions of the inputs that are fields: one partition shared by all, or one per input. Each output
    gets a partition from `parts` or `known` with as many cells along each dim as the output. If several partitions
    match, the output keeps its current partition if that is among them, and otherwise gets the first match. `outputs`
    holds preferred partitions for the first outputs, which take precedence if they match."""
    scalars = find_scalar_inputs(model)
    fields = scalars.count(False)
    if len(parts) not in (1, fields):
        raise ConfigError(f"domain=: grid.with_inputs has {len(parts)} grids, and the model reads {fields} fields")
    each = iter(parts if len(parts) == fields else [parts[0]] * fields)
    inputs = tuple(Replicated() if scalar else next(each) for scalar in scalars)
    require_ghosts_are_not_ignored(model, inputs)
    drops = _plan_ghost_drops(model, inputs)
    kinds: Sequence[Kind] = [kind if drop is None else drop.kind for kind, drop in zip(inputs, drops, strict=True)]
    functions = (require_all_fields_or_all_scalars, _plan_ghost_drops, _plan_redistributions_of_layer_inputs)
    made, kinds = ShardingWalk(1, None, {}, functions).shard_layer(model, "", kinds)
    if any(drops):
        made = WithInputOutput(made, _join_layers([drop and drop.layer for drop in drops]), None)
    choices = [one.without_ghosts() for one in (*parts, *known)]
    given = zip_longest(kinds, outputs[: len(kinds)])
    chosen = tuple([_choose_output_partition(kind, own, choices) for kind, own in given])
    shifts = {
        i: RepartitionField(kind, output)
        for i, (kind, output) in enumerate(zip(kinds, chosen, strict=True))
        if kind != output and isinstance(kind, FieldPartition) and isinstance(output, FieldPartition)
    }
    return PartitionedModel(_append_layers_to_outputs(made, shifts), inputs, chosen)


def _choose_output_partition(kind: Kind, own: Kind | None, choices: Sequence[FieldPartition]) -> Kind:
    """Return the distribution that an output of the model should have. `kind` is its present distribution. If `kind` is
    a partition, the result is a partition of a field of the same shape: `own` if it is one, and otherwise one of
    `choices`. If there is none, or if `kind` is not a partition, the result is `kind`."""
    if not isinstance(kind, FieldPartition):
        return kind
    if isinstance(own, FieldPartition) and own.shape == kind.shape:
        return own.without_ghosts()
    same = [one for one in choices if one.shape == kind.shape]
    return next((one for one in same if one.cuts == kind.cuts), same[0] if same else kind)


class _LayerPerInput(Layer):
    """Applies a separate layer to each input. Inputs without a layer are left unchanged."""

    takes = "passed"

    def __init__(self, layers: Sequence[Layer | None]) -> None:
        self.layers = tuple(layers)
        self.n_inputs = self.n_outputs = len(self.layers)

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Any, Any]:
        pairs = zip(self.layers, x, strict=True)
        return tuple(a if layer is None else layer.forward(env, {}, a)[0] for layer, a in pairs), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Any) -> tuple[Any, Any]:
        pairs = zip(self.layers, dy, strict=True)
        found = (d if layer is None or d is None else layer.backward_input(env, {}, (), d)[0] for layer, d in pairs)
        return tuple(found), ()


def _join_layers(layers: Sequence[Layer | None]) -> Layer | None:
    """Return a layer that applies each of `layers` to the input with the same index. An input whose layer is None is
    left unchanged."""
    return layers[0] if len(layers) == 1 else _LayerPerInput(layers)


def _append_layers_to_outputs(model: Layer, shifts: Mapping[int, Layer]) -> Layer:
    """Return a model that applies layers to some outputs of `model`. `shifts` maps the index of an output to its
    layer."""
    if not isinstance(model, Container):
        layers = [shifts.get(i) for i in range(model.n_outputs)]
        return WithInputOutput(model, None, _join_layers(layers)) if shifts else model
    steps, names = list(model.steps), list(model.outputs)
    for i, shift in shifts.items():
        name = make_unused_name(model, "shift" if len(names) == 1 else f"shift_{i}")
        steps.append(ChildCall(name, shift, (names[i],), (name,)))
        names[i] = name
    return model.with_steps(steps, names) if shifts else model


def find_scalar_inputs(model: Layer) -> tuple[bool, ...]:
    """Return one bool per model input: True if the input consists of scalars, which every rank holds in full, and False
    if it is a field.

    An input is assumed to consist of scalars if the layer that reads it, directly or through elementwise layers, cannot
    run on a part of a field (such as `Linear`) or expects scalars (such as `FiLM`). If all inputs would be scalars by
    this rule, return False for all of them. The sharding of the model then raises an error, which names the layer that
    cannot run on a part."""
    count = len(list_input_names(model))
    found = tuple(_make_scalar_input_flags(model, count, [False] * model.n_outputs))
    return (False,) * count if all(found) else found


def _make_scalar_input_flags(layer: Layer, count: int, wanted: Sequence[bool]) -> Iterable[bool]:
    """Return one bool for each of the layer's `count` inputs: whether the input must consist of scalars. `wanted` holds
    one bool per output: whether the output must consist of scalars."""
    if isinstance(layer, Container):
        reads = dict(zip(layer.outputs, wanted, strict=True))
        for step in reversed(layer.steps):
            given = [reads.get(name, False) for name in step.gives]
            flags = _make_scalar_input_flags(step.layer, len(step.sources), given)
            for source, scalar in zip(step.sources, flags, strict=True):
                reads[source] = reads.get(source, False) or scalar
        return [reads.get(name, False) for name in layer.inputs]
    if isinstance(layer, TakesScalars):
        return [i in layer.scalar_inputs for i in range(count)]
    if layer.fields or layer.acts_on == "element":
        return [wanted[0]] * count
    # a layer with a `parts` attribute can run on a part of a field, so its inputs need not be scalars
    return [not (layer.takes_ghosts or hasattr(layer, "parts"))] * count


def require_all_fields_or_all_scalars(reader: Layer, kinds: Sequence[Kind]) -> list[Redistribution | None]:
    """Raise ConfigError if `reader` cannot combine its inputs because some are fields and others are scalars, or if it
    would compute statistics of scalars over ranks that all hold the same scalars."""
    fields = sum(isinstance(kind, FieldPartition) for kind in kinds)
    if 0 < fields < len(kinds) and not isinstance(reader, Container | TakesScalars):
        got = ", ".join(map(str, kinds))
        raise ConfigError(
            f"{reader!r} reads {got} together: combine scalars, which each rank has in full, with fields in nn.FiLM or "
            "nn.ConcatScalars"
        )
    if kinds and not fields and reader.collective and not isinstance(reader, Container):
        raise ConfigError(f"{reader!r} takes statistics of scalars, which several ranks hold: use LayerNorm")
    return [None] * len(kinds)


def _plan_ghost_drops(reader: Layer, kinds: Sequence[Kind]) -> list[Redistribution | None]:
    """Return one entry per input of `reader`: the redistribution that drops its ghost cells, or None if it has no ghost
    cells or may keep them.

    `kinds` describes the distribution of each input over the ranks. Ghost cells are dropped if `reader` cannot take
    them, or if its inputs have different partitions."""
    partitions = {kind for kind in kinds if isinstance(kind, FieldPartition)}
    takes = isinstance(reader, Container | TakesSeveralGrids) or (can_take_ghosts(reader) and len(partitions) == 1)
    return [
        Redistribution("interior", RepartitionField(kind, kind.without_ghosts()), kind.without_ghosts())
        if isinstance(kind, FieldPartition) and kind.ghosts and not takes
        else None
        for kind in kinds
    ]


def _plan_redistributions_of_layer_inputs(reader: Layer, kinds: Sequence[Kind]) -> list[Redistribution | None]:
    """Return one entry per input of `reader`: the redistribution to a common partition, or None if no redistribution is
    needed.

    `kinds` describes the distribution of each input over the ranks. Fields of the same shape can have different
    partitions, for example after odd strides. The common partition is the one with the smallest maximum part size. In a
    tie, the first partition is chosen. All entries are None for a container, because this function is called separately
    for each of the container's steps."""
    if isinstance(reader, Container | TakesSeveralGrids):
        return [None] * len(kinds)
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
