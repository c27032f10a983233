"""A trainer for the ranks that are here now: who trains, from which step on, and in whose memory that step is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fsdpx.checkpoint.pieces import Held, held
from fsdpx.checkpoint.state import State, restore, state_of
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.fake import FakeCommunicator
from fsdpx.comm.survivors import Survivor
from fsdpx.elastic.copies import Copies
from fsdpx.elastic.descriptors import Descriptor, describe, missing, whole
from fsdpx.elastic.recut import recut
from fsdpx.elastic.seats import mesh_for, seated
from fsdpx.engine.engine import Engine
from fsdpx.errors import StateLost
from fsdpx.state.tuning import Tuning
from fsdpx.trainer.recipe import Recipe, begin
from fsdpx.watch.watchdog import Watchdog, watch

__all__ = ["Built", "Offer", "Standing", "build", "rebuild"]


@dataclass(frozen=True)
class Offer:
    """State as it was after step number `step` of this trainer, as far as it is in the memory of this rank."""

    step: int
    state: State
    parts: Sequence[Held]


class Told(NamedTuple):
    """An offer, as others hear of it."""

    step: int
    state: str
    parts: list[Descriptor]


class Standing(NamedTuple):
    """What a rank says of itself. born: its rank when the job began. seat: its rank among those that train, None if
    idle. fresh: step 0 of this trainer are the initial parameters."""

    born: int
    seat: int | None
    fresh: bool
    offers: list[Told]


@dataclass(frozen=True)
class Built:
    """What training goes on with. control: all ranks. born: of each of them. training: those of them that train.

    group: the latter, None on an idle rank, whose engine has no data. step: number of the last one that counts, 0 for
    initial parameters. copied: the copies of that step have arrived here.
    """

    control: Survivor
    born: list[int]
    training: list[int]
    group: Communicator | None
    engine: Engine
    copies: Copies
    step: int
    dog: Watchdog | None
    copied: bool = False

    def close(self) -> None:
        """Free what is no longer used, by those who live on. Collective."""
        self.copies.close()
        self.engine.close()
        if self.group is not None:
            self.group.close()


def build(recipe: Recipe, control: Survivor, tuning: Tuning, ranks: int | None, copies: int) -> Built:
    """At the begin of a run: initial parameters. Collective over `control`."""
    everyone = [Standing(rank, None, True, []) for rank in range(control.size)]
    return _build(recipe, control, tuning, everyone, ranks, copies, initial=True)


def rebuild(
    recipe: Recipe,
    control: Survivor,
    tuning: Tuning,
    standing: Standing,
    offers: Sequence[Offer],
    ranks: int | None,
    copies: int,
    say: Callable[[str], None],
    timeout: float | None,
) -> Built:
    """On other ranks than before: the newest step of which every element is in somebody's memory. Collective.

    StateLost, on all ranks, if there is none. Ends when the new ranks have copies of what they hold. timeout: of the
    watchdog before; that of a communicator which was watched is longer.
    """
    told = [Told(o.step, o.state.text(), [describe(part) for part in o.parts]) for o in offers]
    everyone: list[Standing] = control.all_gather_object(standing._replace(offers=told))
    say("recovery: all ranks have said what they hold")
    built = _build(recipe, control, tuning, everyone, ranks, copies, initial=False, timeout=timeout)
    say("recovery: the new trainer is there")
    newest = _newest(built.engine, everyone)
    if newest is None:
        begin(built.engine)
        return built
    step, text = newest
    mine = [part for offer in offers if offer.step == step for part in offer.parts]
    want = [] if built.group is None else list(held(built.engine))
    recut(control, mine, want)
    say("recovery: state has moved")
    restore(built.engine, State.parse(text, f"the state of step {step}"))
    if built.copies.needed:
        built.copies.take(state_of(built.engine, None, None), step)
        built.copies.wait()
        say("recovery: there are copies again")
    return replace(built, step=step, copied=built.copies.needed)


def _build(
    recipe: Recipe,
    control: Survivor,
    tuning: Tuning,
    everyone: list[Standing],
    ranks: int | None,
    copies: int,
    initial: bool,
    timeout: float | None = None,
) -> Built:
    most = control.size if ranks is None else min(ranks, control.size)
    mesh = mesh_for(recipe.mesh, recipe.strategy, most)
    training = seated([one.seat for one in everyone], mesh.size)
    trains = control.rank in training
    group = control.split(0 if trains else None, training.index(control.rank) if trains else 0)
    dog = watch(control, *([] if group is None else [group]), timeout=timeout)
    fitted = replace(recipe, mesh=mesh)
    if group is None:
        engine = replace(fitted, device="shape").engine(FakeCommunicator(0, mesh.size), tuning)
    else:
        engine = fitted.engine(group, tuning, initial)
    kept = Copies(control.subgroup(range(control.size)), engine, copies, trains)
    return Built(control, [one.born for one in everyone], training, group, engine, kept, 0, dog)


def _newest(engine: Engine, everyone: list[Standing]) -> tuple[int, str] | None:
    """The newest step that is whole in the memory of all ranks together, and its state; None for the very beginning,
    which needs no memory."""
    wanted = whole(engine.layout, engine.optimizer.slots)
    lost: dict[int, list[str]] = {}
    for step in sorted({offer.step for one in everyone for offer in one.offers}, reverse=True):
        offers = [offer for one in everyone for offer in one.offers if offer.step == step]
        lost[step] = missing([offer.parts for offer in offers], wanted)
        if not lost[step]:
            return step, offers[0].state
    if all(one.fresh for one in everyone):
        return None
    what = "; ".join(f"of step {step}: {_listed(names)}" for step, names in lost.items()) or "nobody has any"
    raise StateLost(
        f"the ranks that are left cannot go on from memory, parts of the state died with the others ({what}). Start "
        "again from the last checkpoint, or keep more copies: elastic=fsdpx.Elastic(copies=2)"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
