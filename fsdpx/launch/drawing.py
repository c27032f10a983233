"""The picture of a simulated step: what `show` and `plan` draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdpx.comm.mesh import AXES
from fsdpx.observe.plots import StepLanes, figure, save
from fsdpx.plan.prediction import Dry, Prediction
from fsdpx.program import VERBS, Event

__all__ = ["draw_step", "lanes"]

EACH = 4
"""Ranks without a pipe up to which each has a row; else one of those that do the same."""


def lanes(dry: Dry, found: Prediction, title: str) -> StepLanes:
    """The simulated step for `fsdpx.observe.plots.figure`. title: "name: about"."""
    mesh, held, pipe = found.mesh, dry.held(found), found.mesh.width("pipe")
    places, each = [mesh.coordinates(rank).pipe for rank in range(mesh.size)], pipe == 1 and mesh.size <= EACH
    rows = range(mesh.size) if each else [places.index(stage) for stage in range(pipe)]
    more = f"\nand {mesh.size // pipe - 1} more" * (not each and mesh.size > pipe)

    def moves(event: Event) -> bool:
        lane = VERBS[event.action.op].lane
        return lane not in AXES or mesh.width(lane) > 1

    events = [
        replace(event, rank=row)
        for row, rank in enumerate(rows)
        for event in found.events
        if event.rank == places[rank] and moves(event)
    ]
    names, numbered = [f"rank {rank}{more}" for rank in rows], "mb" if pipe > 1 else "unit"
    return StepLanes(title, events, names, [held[places[rank]] for rank in rows], numbered, second=1.0)


def draw_step(dry: Dry, found: Prediction, title: str, path: str) -> str:
    """Draw it into this file, and say what is drawn."""
    drawn = len({event.action.mb for event in found.events} - {None})
    of = f", {drawn} of {found.microbatches} microbatches" if drawn < found.microbatches else ""
    save(figure([lanes(dry, found, title + of)]), Path(path))
    return f"drawn: {path}, a step of {found.mesh.size} ranks of {found.machine.name}{of}: {found}"
