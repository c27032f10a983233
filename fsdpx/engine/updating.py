"""Changes of parameters: updates, and the outer steps by which replicas that train by themselves come together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsdpx.array.sums import exact_sum
from fsdpx.comm.calls import Transfer
from fsdpx.comm.communicator import DONE, split_evenly
from fsdpx.engine.run import ProgramRun, RoundShare, Values, demand_alike, number_of, words
from fsdpx.optim import Segments, rate
from fsdpx.optim.optimizer import Kept, kept_of, places, scheduled
from fsdpx.program import Action

__all__ = ["adopt", "delta", "mix", "move", "outer", "pull", "push", "share", "tick", "update"]


def update(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    p, scale, (master, slots) = number_of(action), read[0], added
    if run.place.imaginary:
        for axis, call, nbytes in run.place.parts_moved(p):
            run.place.axes.counters.add(axis, call, nbytes)
    if not scale.skip:
        move(run, master, taken[0], slots, run.place.segments[p], run.step + 1, scale.rate, scale.factor)
    return (master, slots)


def move(
    run: ProgramRun, master: Any, gradient: Any, slots: Any, segments: Segments, step: int, lr: float, factor: float
) -> None:
    """Run the optimiser on elements of a page."""
    place = run.place
    with _left_alone(run, place.optimizer, segments, master, slots):
        place.optimizer.update(place.xp, master, gradient, slots, lr=lr, step=step, segments=segments, scale=factor)


@contextmanager
def _left_alone(
    run: ProgramRun, optimizer: Any, segments: Segments, master: Any, slots: Mapping[str, Any]
) -> Iterator[None]:
    """Keep temporarily frozen parameters as they are: weight decay and momentum need no gradient."""
    forms, frozen = kept_of(optimizer), run.views.frozen
    own = [(master, Kept()), *((array, forms[name]) for name, array in slots.items())] if frozen else []
    kept = [(part, part.copy()) for array, form in own for part in _still(array, form, segments, frozen)]
    yield
    for now, before in kept:
        now[...] = before


def _still(array: Any, form: Kept, segments: Segments, frozen: frozenset[str]) -> list[Any]:
    """The frozen parameters' elements of an array."""
    own = zip(segments.items, places(form, segments), strict=True)
    return [array[at] for s, at in own if s.name in frozen]


def share(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """One message with the amount of data each replica has trained on in this round, and its loss; and with what the
    schedules say of this step and of the outer one that begins with it, which replicas must find alike."""
    (mean, weights), place, rounds = read, run.place, run.place.rounds
    assert rounds is not None
    number = rounds.number(min(run.outer.deltas), run.step + 1 + rounds.half)
    (known,) = (w for w, pages in zip(weights, rounds.fragments, strict=True) if pages & run.outer.deltas)
    replicas = place.axes.mesh.line(place.axes.coordinates, ("replica",))

    def of(rows: list[list[float]]) -> RoundShare:
        demand_alike(run, place.axes.world, rows, {3: "learning rate", 4: "learning rate of the outer optimiser"})
        trained, total, weight = (exact_sum([rows[rank][i] for rank in replicas]) for i in range(3))
        return RoundShare(rows[place.axes.world.rank][0] / (trained or 1.0), total / (weight or 1.0))

    numbers = [known + mean.shared, mean.total, mean.weight, mean.rate, *scheduled(place.outer, number)[:1]]
    return (place.telling(numbers, "SHARE (samples, loss)", of),)


def delta(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """outer gradient = reduce-scatter of share (outer parameters - parameters): n - n/R elements per rank."""
    p, place, (master, start, mine), kept = number_of(action), run.place, read, added[0] if added else {}
    buffer, replica = run.workspace.delta(p), place.axes.replica
    if not place.imaginary:
        place.xp.subtract(start, master, out=buffer)
        buffer *= buffer.dtype.type(mine.own)
    if replica.size == 1:
        return (Transfer(DONE, lambda: buffer), *added)
    counts = split_evenly(buffer.size, replica.size)
    total = buffer[: counts[replica.rank]]
    memory = {name.partition("/")[2]: array for name, array in kept.items() if name.startswith("replica/")}
    parcel = run.workspace.scratch("parcel", p)
    handle = place.route(p).replica.reduce(
        replica, buffer, total, counts, parcel, memory, what=words(run, action)
    )  # fmt: skip
    return (Transfer(handle, lambda: total), *added)


def outer(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """One step of the outer optimiser on this replica's part, then outer parameters = all-gather of the parts: n - n/R
    elements per rank."""
    p, place, (gradient,), (whole, slots) = number_of(action), run.place, taken, added
    rounds, segments, optimizer = place.rounds, place.outer_segments[p], place.outer
    assert rounds is not None
    part, first, replica = place.replica_part(p), place.pages[p].mine.start, place.axes.replica
    own, number = whole[part.start - first : part.stop - first], rounds.number(p, run.step + 1)
    with _left_alone(run, optimizer, segments, own, slots):
        optimizer.update(
            place.xp, own, gradient, slots, lr=rate(optimizer, number), step=number, segments=segments, scale=1.0
        )
    if replica.size == 1:
        return (Transfer(DONE, lambda: whole), whole, slots)
    handle = replica.all_gather(own, whole, split_evenly(whole.size, replica.size), what=words(run, action))
    return (Transfer(handle, lambda: whole), whole, slots)


def adopt(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """parameters = mix parameters + (1 - mix) outer parameters."""
    (found,), (master,), local = taken, added, run.place.options.local
    assert local is not None
    if not local.mix:
        master[...] = found
    elif not run.place.imaginary:
        master *= master.dtype.type(local.mix)
        master += found * master.dtype.type(1.0 - local.mix)
    return (master,)


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
