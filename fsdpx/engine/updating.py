"""Changes of parameters by an optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsdpx.engine.run import ProgramRun, Values, number_of
from fsdpx.optim import Segments
from fsdpx.program import Action
from fsdpx.shapes.work import note

__all__ = ["left_alone", "move", "update"]


def update(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    p, scale, (master, slots) = number_of(action), read[0], added
    if run.place.imaginary:
        for axis, call, nbytes in run.place.parts_moved(p):
            run.place.axes.counters.add(axis, call, nbytes)
        note(master, taken[0], *slots.values(), master, *slots.values())  # all are read, and written but the gradient
    if not scale.skip:
        move(run, master, taken[0], slots, run.place.segments[p], run.step + 1, scale.rate, scale.factor)
    return (master, slots)


def move(
    run: ProgramRun, master: Any, gradient: Any, slots: Any, segments: Segments, step: int, lr: float, factor: float
) -> None:
    """Run the optimiser on elements of a page."""
    place = run.place
    with left_alone(run, segments, master, slots):
        place.optimizer.update(place.xp, master, gradient, slots, lr=lr, step=step, segments=segments, scale=factor)


@contextmanager
def left_alone(
    run: ProgramRun, segments: Segments, master: Any, slots: Mapping[str, Any]
) -> Iterator[None]:
    """Keep temporarily frozen parameters as they are: weight decay and momentum need no gradient."""
    still = [slice(s.start, s.stop) for s in segments.items if s.name in run.views.frozen]
    kept = [(array[at], array[at].copy()) for array in (master, *slots.values()) for at in still]
    yield
    for now, before in kept:
        now[...] = before
