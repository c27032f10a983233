"""strategy="auto": rank 0 searches for the fastest configuration for this job, and all ranks use the configuration that
rank 0 finds."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.base.config import parse_byte_count
from fsdpx.core.base.messages import format_bytes, format_count, log_line, reporting_if_slow
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import find_node_communicator, unwrap_message_backend
from fsdpx.core.state.footprint import find_memory_budget
from fsdpx.core.trainer.agreement import agree_on_choices
from fsdpx.core.trainer.recipe import Recipe, require_loss_and_optimizer
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.plan.machine import Machine, NetworkLevel
from fsdpx.plan.result import Plan
from fsdpx.plan.searching import search
from fsdpx.plan.world_step import get_batch_shapes_and_dtypes

__all__ = ["MACHINE_FILE", "fill_in_fastest_configuration"]

MACHINE_FILE = Path("machine.toml")
"""Path of the file, in the working folder, that `measure-machine` writes and strategy="auto" reads."""
NOT_PLANNED_OPTIONS = ("model", "strategy", "planned", "device", "device_map", "backend", "check", "tune", "trace")
"""Fields of a recipe that are not passed to the search. The model is passed separately. The other fields have no effect
on a plan, or are chosen by the search."""


def fill_in_fastest_configuration(
    recipe: Recipe,
    world: Communicator,
    batch: Any = None,
    memory: int | str | None = None,
    machine: str | PathLike[str] | Machine | None = None,
) -> Recipe:
    """Search for the fastest configuration that fits into memory, and return the recipe with the options of this
    configuration filled in. Options that the user has chosen are kept. Collective.

    Parameters
    ----------
    recipe : the user's choices, with strategy="auto"
    world : communicator of all ranks
    batch : inputs and targets of the global batch, as for `fsdpx.plan`
    memory : bytes that a rank may use (default: its share of the host's free memory; for a GPU, the capacity given by
        `machine`)
    machine : the machine to plan for (default: `machine.toml` in the working folder of rank 0; without this file,
        `a100-dgx-200g` for device="cuda", and hosts of the type `laptop` for device="cpu")

    Returns
    -------
    Recipe : the completed recipe, identical on all ranks

    Raises
    ------
    ConfigError : if no configuration fits, or if `batch`, loss or optimizer is missing; raised on all ranks
    """
    require_loss_and_optimizer("strategy='auto'", recipe.training.loss, recipe.training.optimizer)
    if batch is None:
        raise ConfigError(
            "strategy='auto' plans a step of a batch that it must know: say batch=(((64, 1024), 'int64'), ((64, 1024), "
            "'int64')), the shape and dtype of inputs and targets of the whole global batch, or such arrays"
        )
    shapes, imagined = get_batch_shapes_and_dtypes(batch), isinstance(world, FakeCommunicator)
    agree_on_choices(world, {"batch": shapes, "memory": memory, "machine": machine})
    limit = _agree_on_memory_limit(recipe, world) if memory is None else parse_byte_count(memory, "memory")
    found: Any = None
    if world.rank == 0 or imagined:
        try:
            fixed = _get_fixed_options(recipe)
            where, source = _find_machine_and_source(machine, world, recipe.runtime.device)
            model = recipe.training.model
            with reporting_if_slow(not imagined, "searching:", None) as count:
                made = search(
                    model, batch=shapes, ranks=world.size, machine=where, memory=limit, say=count, **fixed
                )
            chosen = {name: value for name, value in made.best_candidate.options.items() if name not in fixed}
            found = chosen, _describe_plan(made, source)
        except FsdpxError as error:
            found = error
    if not imagined:
        found = world.all_gather_value(found)[0]
    if isinstance(found, FsdpxError):
        raise found
    options, words = found
    if world.rank == 0:
        log_line(f"fsdpx: strategy='auto': {words}")
    return recipe.with_options({**options, "planned": words})


def _get_fixed_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options that the search must not change: the options that the user has set, and in any case the
    precision, `group_bytes` and `offload`.

    The precision is kept because a plan must not change results, `group_bytes` because it is measured at runtime, and
    `offload` because it needs a folder."""
    found = {
        "precision": recipe.training.precision, "group_bytes": recipe.runtime.group_bytes,
        "offload": recipe.distribution.offload,
    }  # fmt: skip
    for part in (recipe.training, recipe.distribution, recipe.runtime):
        for one in fields(part):
            value = getattr(part, one.name)
            if one.name not in NOT_PLANNED_OPTIONS and (one.default is MISSING or value != one.default):
                found[one.name] = value
    return found


def _count_ranks_per_host_and_hosts(world: Communicator) -> tuple[int, int]:
    """Return the number of ranks on the host with the most ranks, and the number of hosts."""
    node = find_node_communicator(world)
    if node is None:
        return (world.size, 1) if unwrap_message_backend(world) is None else (1, world.size)
    return max(map(len, node.ranks_by_host)), len(node.ranks_by_host)


def _agree_on_memory_limit(recipe: Recipe, world: Communicator) -> int | None:
    """Return the smallest memory limit of all ranks in bytes, or None if no limit is known, as on GPUs. Collective."""
    if recipe.runtime.device == "cuda" or isinstance(world, FakeCommunicator):
        return None
    own = find_memory_budget(0, _count_ranks_per_host_and_hosts(world)[0])[1]
    known = [one for one in world.all_gather_value(own) if one is not None]
    return min(known, default=None)


def _find_machine_and_source(
    asked: str | PathLike[str] | Machine | None, world: Communicator, device: str
) -> tuple[Machine, str]:
    """Return the machine to plan for, and a description of it: its name, and the file or default that defines it."""
    if asked is not None or MACHINE_FILE.exists():
        found = Machine.load(MACHINE_FILE if asked is None else asked)
        return found, f"{found.name}" if asked is not None else f"{found.name} ({MACHINE_FILE})"
    measure = f"there is no {MACHINE_FILE}, which python -m fsdpx measure-machine writes"
    if device == "cuda":
        return Machine.load("a100-dgx-200g"), f"a100-dgx-200g ({measure})"
    laptop, network = Machine.load("laptop"), Machine.load("ethernet-10g")
    ranks, hosts = _count_ranks_per_host_and_hosts(world)
    levels: list[NetworkLevel] = [replace(laptop.levels[0], ranks=ranks if hosts > 1 else inf)]
    levels += [network.levels[-1]] if hosts > 1 else []
    return Machine("laptop", tuple(levels), replace(laptop.compute, capacity=None)), f"laptops ({measure})"


def _describe_plan(found: Plan, source: str) -> str:
    """Return one sentence that states the chosen options, the predicted time and memory, and the best configuration
    with another kind of parallelism."""
    best = found.best_candidate
    limit = "" if found.memory is None else f" within {format_bytes(found.memory)} per rank"
    others = [one for kind, one in found.best_by_kind.items() if kind != best.summary]
    second = min(others, key=lambda one: one.prediction.seconds, default=None)
    after = "" if second is None else f"; next {second.summary}, {second.prediction.seconds:.4g} s"
    return (
        f"{best.python_text}; predicted: {best.prediction.seconds:.4g} s per step and "
        f"{format_bytes(best.prediction.memory)} per rank, for a batch of {found.samples} on "
        f"{format_count(found.rank_count, 'rank')} of {source}; the fastest of "
        f"{len(found.candidates)} configurations{limit}{after}"
    )
