"""How ranks at their own speed use the parameters they have in common: read them, update them, move towards them."""

from __future__ import annotations

from typing import Any

from fsdpx.engine.run import ProgramRun, Values, number_of
from fsdpx.engine.updating import move
from fsdpx.optim import Segments
from fsdpx.program import Action

__all__ = ["mix", "pull", "push", "tick"]


def pull(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """full parameters as they are now: n - n/N elements read."""
    p = number_of(action)
    full = run.workspace.full(p)
    run.exchange.pull(p, full)
    return (run.views.page(run.place.pages[p].page, full),)


def push(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """This rank's gradient, n - n/N elements, into the shards of all."""
    (gradient,), (mean, scale) = taken, read

    def change(
        master: Any, gradient: Any, slots: Any, segments: Segments, step: int, weight: float | None, lr: float
    ) -> None:
        factor = scale.factor if weight is None else 1.0 / (weight * run.scaler.value)
        move(run, master, gradient, slots, segments, step, scale.rate * lr, factor)

    run.exchange.push(number_of(action), gradient.at(0), mean.shared, change)
    return (True,)


def tick(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    run.exchange.tick()
    return ()


def mix(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    run.exchange.mix(number_of(action), run.step + 1)
    return ()
