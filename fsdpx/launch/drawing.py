"""A simulated step as a picture and as a trace: what `show` and `plan` draw and write."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdpx.comm.mesh import AXES
from fsdpx.engine.recording import Acted, TransferSpan, Turn
from fsdpx.observe.chrome import TraceHeader, TracePlace, write_simulated
from fsdpx.observe.plots import StepLanes, figure, save
from fsdpx.plan.prediction import Dry, Prediction
from fsdpx.program import VERBS, Event

__all__ = ["draw_step", "lanes", "trace_step"]

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
    ranks = f"{found.mesh.size} rank{'s' * (found.mesh.size > 1)}"
    return f"drawn: {path}, a step of {ranks} of {found.machine.name}{of}: {found}"


def trace_step(dry: Dry, found: Prediction, path: str) -> str:
    """Write it as a trace for Perfetto, a rank of each stage of the pipe, and say what is written."""
    ranks = []
    for stage, (run, held) in enumerate(zip(dry.runs, dry.held(found), strict=True)):
        axes, rank = run.session.state.placement.axes, run.found.rank
        host, place = f"{found.machine.name}, simulated", axes.coordinates._asdict()
        header = TraceHeader(rank, found.mesh.size, str(axes.mesh), place, host, 0.0, [])
        row = [event for event in found.events if event.rank == stage]
        turn = _turn(run, row, held["activations"], run.programs[dry.few])
        ranks.append((header, turn, TracePlace.of(axes)))
    write_simulated(Path(path), ranks)
    return f"traced: {path}, {len(ranks)} of {found.mesh.size} ranks of {found.machine.name}, simulated"


def _turn(run: Any, row: Sequence[Event], alive: Sequence[tuple[float, int]], program: Any) -> Turn:
    """The events as if a rank had recorded them. Its number is that of no measured one."""
    turn, free = Turn(-1, 0, program, []), 0.0
    times = [time for time, _ in alive]
    for event in row:
        cost = run.costs.get(event.action)
        nbytes = sum(n for _, _, _, n in cost.calls) if cost is not None else 0
        if VERBS[event.action.op].moves:
            turn.flights.append(TransferSpan(event.action, free, event.end))
            begin = ready = free
        else:
            begin, ready, free = free, event.start, event.end
        now = alive[bisect_right(times, free) - 1][1]
        turn.acted.append(Acted(event.action, begin, ready, free, nbytes, now))
    return turn
