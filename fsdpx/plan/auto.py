"""strategy="auto": rank 0 plans for the ranks that there are, and all of them take what it has chosen."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.base.config import byte_count
from fsdpx.core.base.messages import bytes_text, line
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import carrier_of, node_of
from fsdpx.core.state.footprint import memory_limits
from fsdpx.core.trainer.agreement import agree
from fsdpx.core.trainer.recipe import Recipe, demand
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.plan.machine import Level, Machine
from fsdpx.plan.result import Plan
from fsdpx.plan.searching import search
from fsdpx.plan.world_step import batch_of

__all__ = ["MACHINE", "planned"]

MACHINE = Path("machine.toml")
"""Where `measure-machine` writes what it has found, and where it is looked for."""
APART = ("model", "strategy", "planned", "device", "device_map", "backend", "check", "tune", "trace")
"""What a plan does not depend on, or decides."""


def planned(
    recipe: Recipe,
    world: Communicator,
    batch: Any = None,
    memory: int | str | None = None,
    machine: str | PathLike[str] | Machine | None = None,
) -> Recipe:
    """The recipe with the quickest choices that fit; those that the user has made stay. Collective.

    Parameters
    ----------
    batch : inputs and targets of the whole global batch, as for `fsdpx.plan`
    memory : bytes that a rank may take; by default its share of what its host has free, of a GPU what `machine` says
    machine : by default `machine.toml` where rank 0 is, else a laptop's figures for these hosts

    Raises
    ------
    ConfigError : nothing fits; the same on all ranks
    """
    demand("strategy='auto'", recipe.training.loss, recipe.training.optimizer)
    if batch is None:
        raise ConfigError(
            "strategy='auto' plans a step of a batch that it must know: say batch=(((64, 1024), 'int64'), ((64, 1024), "
            "'int64')), the shape and dtype of inputs and targets of the whole global batch, or such arrays"
        )
    shapes, imagined = batch_of(batch), isinstance(world, FakeCommunicator)
    agree(world, {"batch": shapes, "memory": memory, "machine": machine})
    limit = _limit(recipe, world) if memory is None else byte_count(memory, "memory")
    found: Any = None
    if world.rank == 0 or imagined:
        try:
            fixed = _fixed(recipe)
            where, source = _machine(machine, world, recipe.machinery.device)
            made = search(
                recipe.training.model, batch=shapes, ranks=world.size, machine=where, memory=limit, say=line,
                **fixed,
            )  # fmt: skip
            chosen = {name: value for name, value in made.best.options.items() if name not in fixed}
            found = chosen, _words(made, source)
        except FsdpxError as error:
            found = error
    if not imagined:
        found = world.all_gather_plain(found)[0]
    if isinstance(found, FsdpxError):
        raise found
    options, words = found
    if world.rank == 0:
        line(f"fsdpx: strategy='auto': {words}")
    return recipe.changed({**options, "planned": words})


def _fixed(recipe: Recipe) -> dict[str, Any]:
    """What the user has chosen. The precision is not searched: a plan changes no result. Neither are group_bytes, which
    are measured, and a folder for what is offloaded."""
    found = {
        "precision": recipe.training.precision, "group_bytes": recipe.machinery.group_bytes,
        "offload": recipe.distribution.offload,
    }  # fmt: skip
    for part in (recipe.training, recipe.distribution, recipe.machinery):
        for one in fields(part):
            value = getattr(part, one.name)
            if one.name not in APART and (one.default is MISSING or value != one.default):
                found[one.name] = value
    return found


def _here(world: Communicator) -> tuple[int, int]:
    """Ranks of the largest host, and hosts."""
    node = node_of(world)
    if node is None:
        return (world.size, 1) if carrier_of(world) is None else (1, world.size)
    return max(map(len, node.machines)), len(node.machines)


def _limit(recipe: Recipe, world: Communicator) -> int | None:
    """The least of all ranks. Collective."""
    if recipe.machinery.device == "cuda" or isinstance(world, FakeCommunicator):
        return None
    own = memory_limits(0, _here(world)[0])[1]
    known = [one for one in world.all_gather_plain(own) if one is not None]
    return min(known, default=None)


def _machine(asked: str | PathLike[str] | Machine | None, world: Communicator, device: str) -> tuple[Machine, str]:
    """The machine, and where it is from."""
    if asked is not None or MACHINE.exists():
        found = Machine.load(MACHINE if asked is None else asked)
        return found, f"{found.name}" if asked is not None else f"{found.name} ({MACHINE})"
    measure = f"there is no {MACHINE}, which python -m fsdpx measure-machine writes"
    if device == "cuda":
        return Machine.load("a100-dgx-200g"), f"a100-dgx-200g ({measure})"
    laptop, network, (ranks, hosts) = Machine.load("laptop"), Machine.load("ethernet-10g"), _here(world)
    levels: list[Level] = [replace(laptop.levels[0], ranks=ranks if hosts > 1 else inf)]
    levels += [network.levels[-1]] if hosts > 1 else []
    return Machine("laptop", tuple(levels), replace(laptop.compute, capacity=None)), f"laptops ({measure})"


def _words(found: Plan, source: str) -> str:
    best, limit = found.best, "" if found.memory is None else f" within {bytes_text(found.memory)} of a rank"
    others = [one for kind, one in found.kinds.items() if kind != best.kind]
    second = min(others, key=lambda one: one.prediction.seconds, default=None)
    after = "" if second is None else f"; next {second.kind}, {second.prediction.seconds:.4g} s"
    return (
        f"{best.words}; predicted are {best.prediction.seconds:.4g} s a step and {bytes_text(best.prediction.memory)} "
        f"of a rank, for a batch of {found.samples} on {found.ranks} ranks of {source}; the quickest of "
        f"{len(found.found)} configurations{limit}{after}"
    )
