"""Activation checkpointing within a memory budget: choose the units (groups of layers) whose forward pass is recomputed
in the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from fsdpx.core.array import shapes as xp
from fsdpx.core.array.random import Random
from fsdpx.core.engine import compute_verbs
from fsdpx.core.engine.activations import iterate_storage_ids_and_sizes
from fsdpx.core.program import Action, Stage
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Microbatch
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import LayerContext, find_sequence_length

__all__ = ["choose_recomputed_units"]


def choose_recomputed_units(
    placement: Placement, orders: Sequence[Sequence[Action]], batch: Microbatch | None
) -> frozenset[int]:
    """Return the indices, in the full model, of the units (groups of layers) whose forward pass is recomputed in the
    backward pass.

    Parameters
    ----------
    placement : placement of this rank
    orders : for each pipeline rank, the order of the actions (forward or backward of a unit) in a step
    batch : a microbatch with the size of the largest microbatch on any rank, so that all ranks make the same choice;
        None if no batch is known
    """
    choice, stages = placement.options.recompute, placement.stages
    if choice.budget is not None and batch is not None:
        ranks = zip(stages, orders, strict=True)
        chosen = [
            _choose_units_to_recompute_within_budget(choice.budget, placement, stage, order, batch)
            for stage, order in ranks
        ]
        return frozenset().union(*chosen)
    step = choice.every
    return frozenset(u for s in stages for u in _list_backward_units(s)[step - 1 :: step]) if step else frozenset()


def _list_backward_units(stage: Stage) -> list[int]:
    """Return the indices of the units (groups of layers) of this pipeline rank that keep activations for backward."""
    return [u for u in stage.own_units if u in stage.units_with_backward]


@dataclass(frozen=True)
class UnitBytes:
    """Activation memory of a unit (group of layers) for one microbatch, in bytes.

    Attributes
    ----------
    kept : bytes kept from forward to backward
    kept_if_recomputed : bytes kept from forward to backward if the unit is recomputed: only its inputs
    kept_until_weight_gradient : bytes kept from the input-gradient half of backward (I) to the weight-gradient half (W)
    """

    kept: int
    kept_if_recomputed: int
    kept_until_weight_gradient: int


def _choose_units_to_recompute_within_budget(
    budget: int, placement: Placement, stage: Stage, order: Sequence[Action], batch: Microbatch
) -> frozenset[int]:
    """Choose which units (groups of layers) of one pipeline rank to recompute, so that the activations of that rank
    fit into `budget` bytes. Choose as few units as possible, beginning with those that save the most bytes. Raise
    ConfigError if recomputing all units is not enough."""
    sizes = {u: count_unit_activation_bytes(placement, stage, u, batch) for u in _list_backward_units(stage)}
    chosen: set[int] = set()
    for u in sorted(sizes, key=lambda u: sizes[u].kept_if_recomputed - sizes[u].kept):
        if _compute_peak_bytes(stage, order, sizes, chosen) <= budget:
            return frozenset(chosen)
        chosen.add(u)
    least = _compute_peak_bytes(stage, order, sizes, chosen)
    if least > budget:
        where = f" on rank {stage.rank} of the pipe" if len(placement.stages) > 1 else ""
        raise ConfigError(
            f"recompute: {budget:,} bytes are not enough{where}: with every unit recomputed {least:,} are kept for "
            "backward; use more microbatches, or allow more"
        )
    return frozenset(chosen)


def _compute_peak_bytes(
    stage: Stage, order: Sequence[Action], sizes: Mapping[int, UnitBytes], chosen: Collection[int]
) -> int:
    """Return the peak activation memory of one pipeline rank during a step, in bytes. The rank runs its actions in the
    given `order`, and recomputes the units (groups of layers) in `chosen`."""
    parts = dict(stage.own_stages)
    kept = {u: size.kept_if_recomputed if u in chosen else size.kept for u, size in sizes.items()}
    now = most = 0
    for action in order:
        assert action.unit is not None
        for u in parts[action.unit] if action.op == "F" else reversed(parts[action.unit]):
            op = stage.get_unit_op_for_stage_op(action.op, u) if u in sizes else None
            if op == "F":
                now += kept[u]
            if op in ("B", "I"):
                most = max(most, now - kept[u] + sizes[u].kept)  # recomputing a unit allocates its activations again
                now += (sizes[u].kept_until_weight_gradient if op == "I" else 0) - kept[u]
            if op == "W":
                now -= sizes[u].kept_until_weight_gradient
            most = max(most, now)
    return most


def count_unit_activation_bytes(placement: Placement, stage: Stage, unit: int, batch: Microbatch) -> UnitBytes:
    """Return how many bytes of activations a unit (group of layers) keeps. The result is the maximum over the tensor
    ranks, so that all tensor ranks choose the same units to recompute."""
    bytes_by_tensor_rank = [
        _count_kept_bytes_on_tensor_rank(placement, stage, unit, batch, tensor)
        for tensor in range(placement.axes.tensor.size)
    ]
    return UnitBytes(*map(max, zip(*map(astuple, bytes_by_tensor_rank), strict=True)))


def _count_kept_bytes_on_tensor_rank(
    placement: Placement, stage: Stage, unit: int, batch: Microbatch, tensor: int
) -> UnitBytes:
    """Return how many bytes of activations a unit (group of layers) keeps on the tensor rank `tensor`. To find out, run
    the forward pass and the input-gradient half of the backward pass on arrays that have shapes but no data."""
    recomputed_unit, row = placement.layout.units[unit], stage.units[unit]
    spread = replace(placement.layout.spread, rank=tensor)
    values = {v: xp.ShapeArray(*placement.value_shapes.shape_of(v, batch, tensor)) for v in (*row.takes, *row.reads)}
    read = list(values.values())
    axes, cores = placement.value_shapes.make_fake_mesh_axes_for_tensor_rank(tensor), placement.options.recompute.cores
    dtype, time = placement.formats.compute, find_sequence_length(batch.inputs)
    root = LayerContext(xp, axes, Random(0), True, recompute=cores, time=time, dtype=dtype)
    envs = [root.child(node.path) for node in recomputed_unit.nodes]
    params = [
        {name: xp.ShapeArray(spread.local_shape_of(spec), dtype) for name, spec in node.layer.specs().items()}
        for node in recomputed_unit.nodes
    ]
    saved = compute_verbs.run_unit_forward(recomputed_unit, envs, params, values, True, stage.constant)
    parameter_storages = {key for p in params for key, _ in iterate_storage_ids_and_sizes(p)}
    whole = _sum_storage_bytes(iterate_storage_ids_and_sizes(saved), parameter_storages)
    inputs = _sum_storage_bytes(iterate_storage_ids_and_sizes(read), parameter_storages)
    dvalues = {v: xp.zeros(values[v].shape, dtype=values[v].dtype) for v in row.gives if v not in stage.constant}
    late = compute_verbs.run_unit_backward_input(recomputed_unit, envs, params, saved, dvalues, stage.constant)
    return UnitBytes(whole, inputs, _sum_storage_bytes(iterate_storage_ids_and_sizes(late), parameter_storages))


def _sum_storage_bytes(storages: Iterable[tuple[int, int]], excluded: set[int]) -> int:
    """Return the total size in bytes of the `storages`, which are (key, bytes) pairs. Each key counts once, and keys
    in `excluded` do not count."""
    return sum(nbytes for key, nbytes in dict(storages).items() if key not in excluded)
