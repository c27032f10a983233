"""Computes the costs of individual layers, and a lower bound on the step time. If the lower bound of a configuration is
too high, the search skips the configuration without a full prediction. Costs and bound come from one dry run of the
layers, which is reused for many configurations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from math import prod
from typing import NamedTuple

from fsdpx.core.array.shapes.flop_counter import WorkCount
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.state.placement import PipelineChoice
from fsdpx.core.state.units import require_enough_layers, split_into_stages
from fsdpx.nn.layer_list import LayerList, linearize
from fsdpx.nn.shape_inference import get_or_memoize
from fsdpx.plan.costing import ActionCost
from fsdpx.plan.machine import Machine
from fsdpx.plan.world_step import WorldStep

__all__ = ["LayerPrediction", "compute_lower_bound_seconds", "predict_cost_by_layer"]

STEP_PARTS = {"F": 0, "C": 0, "LOSS": 0, "B": 1, "I": 1, "R": 2, "W": 3}
"""The part of a step that each operation belongs to. 0: forward pass. 1: backward pass up to the gradients that other
ranks wait for. 2: recomputation. 3: the rest of the backward pass."""
LAYERS_ONLY_OPTIONS = {
    "strategy": "ddp", "schedule": "1f1b", "group_bytes": 0, "compression": None, "offload": None,
    "reproducible_chunks": None,
}  # fmt: skip
"""Options for a dry run that measures nothing but the layers."""
MICROBATCHES_RUN = 2
"""Number of microbatches in the dry run. Only the costs of the last microbatch are used, since the first microbatch
costs more than the others."""
LayerCostList = list[tuple[int, int, ActionCost, int]]


def compute_lower_bound_seconds(step: WorldStep, machine: Machine) -> float:
    """Return a lower bound on the time of a step in seconds. The bound includes only computation and the communication
    that layers wait for.

    Each pipeline rank computes its stages for all microbatches. A rank can begin only when the first microbatch has
    passed forward through all earlier stages (the stages before the rank's lowest stage). At the end, the last
    microbatch must pass backward through these earlier stages; meanwhile, the rank may still be computing parameter
    gradients. The bound is 0 if the option `stages` is given."""
    pipe = PipelineChoice(step.options["schedule"], step.mesh.width_of("pipe"))
    m, options = step.microbatches, step.options
    rows = step.count_samples_of_group(step.sample_group_count - 1) // m
    if not rows or options.get("stages") is not None:
        return 0.0
    require_enough_layers(get_or_memoize(("ordered", step.model), lambda: linearize(step.model)), pipe.width, "")
    split = pipe.width > 1 and any(action.op == "W" for action in pipe.get_schedule(m).ranks[0])
    home, (model, layers) = pipe.get_stage_ranks(m), _run_layers_and_list_costs(step, rows, split)
    starts = split_into_stages(model, len(home), None, options.get("costs"), pipe.describe_stages_per_rank(home))
    each: list[list[list[ActionCost]]] = [[[], [], [], []] for _ in home]
    for layer, part, cost, _ in layers:
        each[bisect_right(starts, layer) - 1][part].append(cost)
    times = step.make_time_model(machine)

    def sum_seconds(costs: Iterable[ActionCost]) -> float:
        own, moving = times.predict_action_seconds(_sum_costs(costs))
        return own + sum(moving.values())

    stages = [[sum_seconds(part) for part in stage] for stage in each]
    coming, going = ([0.0, *accumulate(stage[part] for stage in stages)] for part in (0, 1))
    found = 0.0
    for rank in range(pipe.width):
        own = [stage for stage, at in zip(stages, home, strict=True) if at == rank]
        *most, later = (m * sum(part) for part in zip(*own, strict=True))
        low = home.index(rank)
        found = max(found, coming[low] + sum(most) + max(later, going[low]))
    return machine.compute.overhead + found


class LayerPrediction(NamedTuple):
    """Predicted cost of one layer on one rank.

    Attributes
    ----------
    forward : time in seconds of all forward passes of the layer in a step, including recomputation and communication
        inside the layer
    backward : time in seconds of all backward passes of the layer in a step
    nbytes : bytes of activations that the forward pass of one microbatch keeps, minus the bytes that it frees
    """

    forward: float
    backward: float
    nbytes: int


def predict_cost_by_layer(step: WorldStep, machine: Machine) -> dict[str, LayerPrediction]:
    """Return a dict that maps each layer's path to its predicted cost. The cost of a layer without parameters is added
    to the next layer, and the cost of the loss to the last layer. The dict is empty if a data rank has fewer samples
    than microbatches."""
    m, times, found = step.microbatches, step.make_time_model(machine), dict[str, LayerPrediction]()
    rows = step.count_samples_of_group(step.sample_group_count - 1) // m
    if not rows:
        return found
    model, layers = _run_layers_and_list_costs(step, rows, split=False)
    for layer, part, cost, kept in layers:
        path, (own, moving) = model.nodes[layer].path, times.predict_action_seconds(cost)
        forward, backward, nbytes = found.get(path, LayerPrediction(0.0, 0.0, 0))
        seconds, is_backward = m * (own + sum(moving.values())), part == STEP_PARTS["B"]
        both = (forward, backward + seconds) if is_backward else (forward + seconds, backward)
        found[path] = LayerPrediction(*both, nbytes + kept * (part == STEP_PARTS["F"]))
    return found


def _run_layers_and_list_costs(step: WorldStep, rows: int, split: bool) -> tuple[LayerList, LayerCostList]:
    """Run all layers on shape-only arrays, and return the layers and the costs of one microbatch. Each cost belongs to
    one action of a unit (group of layers), and is given as (index of the last layer of the unit, part of the step as
    numbered in `STEP_PARTS`, cost of the action, change in the bytes of kept activations).

    `rows` is the number of samples of a microbatch. If `split` is true, two pipeline ranks each run half of the layers,
    with a schedule that divides the backward pass into input gradients (I) and parameter gradients (W)."""
    options, grid, pipe = step.options, step.mesh.domain, 2 if split else 1
    recompute = options["recompute"] if options["recompute"] in ("all", "attention") else None
    mesh = Mesh(pipe=pipe, replica=prod(grid), shard=1, tensor=step.mesh.width_of("tensor"))
    alone = LAYERS_ONLY_OPTIONS | {"mesh": mesh, "recompute": recompute, "microbatches": MICROBATCHES_RUN}
    alone |= {"schedule": "zb-h1"} if split else {}

    def run_on_shapes() -> tuple[LayerList, LayerCostList]:
        batch = tuple(((rows * MICROBATCHES_RUN, *shape[1:]), dtype) for shape, dtype in step.batch)
        found = WorldStep.from_options(step.model, batch, mesh.size, options | alone)
        made, costs = None, LayerCostList()
        for run in found.dry_run_pipe_ranks(0, MICROBATCHES_RUN):
            place = run.session.state.placement
            last = [*accumulate((len(unit.nodes) for unit in place.layout.units), initial=-1)][1:]
            kept = [after for _, after in run.alive]
            each = zip(run.costs.items(), kept, [0, *kept], strict=False)
            costs += [(last[-1 if a.unit is None else a.unit], STEP_PARTS[a.op], cost, after - before)
                      for (a, cost), after, before in each
                      if a.mb == MICROBATCHES_RUN - 1 and a.op in STEP_PARTS]  # fmt: skip
            made = place.model
        assert made is not None
        return made, costs

    space = options.get("domain") or grid
    key = "layers", step.model, step.options["loss"], mesh.shape, space, rows, recompute, str(options["precision"])
    return get_or_memoize(key, run_on_shapes)


def _sum_costs(costs: Iterable[ActionCost]) -> ActionCost:
    found, calls = WorkCount(), list[tuple[str, str, int, int]]()
    for cost in costs:
        found.add_work(cost.work)
        calls += cost.calls
    return ActionCost(found, tuple(calls))
