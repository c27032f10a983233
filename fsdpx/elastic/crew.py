"""The ranks of an elastic run: what they agree on, who trains, who keeps copies, and how they come together anew."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fsdpx import environment, errors
from fsdpx.checkpoint.state import State, state_of
from fsdpx.comm.survivors import Survivor
from fsdpx.elastic import follow
from fsdpx.elastic.descriptors import live
from fsdpx.elastic.options import Elastic
from fsdpx.elastic.rebuild import Built, Offer, Standing, build, rebuild
from fsdpx.elastic.recut import let_go
from fsdpx.elastic.seats import mesh_for
from fsdpx.errors import CheckpointError, ConfigError, DataError, FsdpxError, MeshError, RankLost
from fsdpx.state.tuning import tune_for
from fsdpx.trainer.recipe import Recipe
from fsdpx.watch.watchdog import Watchdog, unwatch

__all__ = ["Crew", "Recovery"]

FINE, ARRIVED, CALM = 1, 2, 4
"""What a rank says at each agreement, and what holds if all say it: no rank was lost; copies under way have arrived;
nobody asks for another number of ranks."""
RARE, RAREST = 3, 10
"""From bit RARE on: copies every 1, 2, 4, ... 2^RAREST steps are cheap enough. The first that all say is taken."""
COST = 0.01
"""Share of the time that copies may take, where nobody says how often they are made."""
SENT = 3.0
"""How much longer than copying here it takes to send a copy and to receive one, on the cores that also compute."""


@dataclass(frozen=True)
class Recovery:
    """What happened between two steps. step: the last one that counted. lost: ranks that died, as they were numbered
    when the job began. ranks: how many train now. replayed: steps that had to be made again. seconds: from the moment
    this rank noticed until it went on, replayed steps not included."""

    step: int
    lost: tuple[int, ...]
    ranks: int
    replayed: int
    seconds: float

    def __str__(self) -> str:
        who = f"lost rank{'s' * (len(self.lost) > 1)} {', '.join(map(str, self.lost))}; " if self.lost else ""
        again = f", {self.replayed} made again" if self.replayed else ""
        now = "1 rank trains" if self.ranks == 1 else f"{self.ranks} ranks train"
        return f"{who}{now} on from step {self.step}{again} ({1000 * self.seconds:.0f} ms)"


class Refused(RankLost):
    """The agreement itself said that a rank was lost: all ranks know it."""


@dataclass(frozen=True)
class Failure:
    """An error of the ranks that train, for those that follow."""

    kind: str
    text: str
    agreed: bool


class Crew:
    """All living ranks of a run. step: number of the last step that counts. kept: of the newest one that will never be
    made again."""

    def __init__(self, recipe: Recipe, control: Survivor, elastic: Elastic) -> None:
        """Collective over `control`."""
        wanted = environment.read().tune if recipe.tune is None else recipe.tune
        self.recipe, self.elastic, self.tuning = recipe, elastic, tune_for(control, wanted, np)
        self.ranks = elastic.ranks
        self.recoveries: list[Recovery] = []
        self._born = control.rank
        self._every = elastic.every or 1
        self._refused: int | None = None  # a number of ranks that the mesh cannot use
        self._given_up: list[tuple[Survivor, Watchdog]] = []
        self._adopt(build(recipe, control, self.tuning, self.ranks, elastic.copies))

    def _adopt(self, built: Built) -> None:
        self.built, self.step, self.kept = built, built.step, built.step
        self.control, self.engine, self.copies = built.control, built.engine, built.copies
        self.asked = False  # somebody wants another number of ranks
        self._updating = False  # between the agreement on a step and its end
        self._under_way: int | None = None  # step of the copies that have not arrived
        if built.copied:
            self.copies.promote()
        self._last, self._takes = perf_counter(), 0
        self._steps: deque[float] = deque(maxlen=9)  # seconds of the last ones
        self._note()

    @property
    def trains(self) -> bool:
        return self.control.rank in self.built.training

    # -- agreements ----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """All living ranks have come here; RankLost on all of them if one was lost on the way."""
        flags = FINE | (ARRIVED if self.copies.arrived() else 0)
        flags |= CALM if self._request() in (self.ranks, self._refused) else 0
        said = self.control.agree(flags | self._cheap() << RARE)
        if not said & FINE:
            raise Refused("a rank was lost before all had come to the agreement")
        if said & ARRIVED and self._under_way is not None:
            self.kept, self._under_way = self._under_way, None
            self.copies.promote()
        self.asked = not said & CALM
        all_say = said >> RARE
        self._every = self.elastic.every or all_say & -all_say

    def commit(self) -> None:
        """Agree on a step; what follows is this rank's own."""
        self.agree()
        self._updating = True

    def committed(self) -> None:
        """After a step that counts. Needs nobody, and decides by what was agreed on alone: another rank may be hearing
        of a loss just now."""
        now = perf_counter()
        self._steps.append(now - self._last)
        self._last = now
        self._updating = False
        self.step += 1
        self._note()
        if not self.copies.needed:
            self.kept = self.step
        elif self._under_way is None and self.step - self.kept >= self._every:
            self._under_way, self._takes = self.step, self._takes + 1
            self.copies.take(self._state, self.step)

    def _cheap(self) -> int:
        """How seldom copies must be made to cost COST of the time here: all powers of two from there on, as bits."""
        least = 1.0
        if self._takes > 2 and self._steps:  # the first ones also make their buffers
            cost = self.copies.copying * (1 + SENT * self.elastic.copies)
            least = max(cost / (COST * median(self._steps)), 1.0)
        level = min(ceil(log2(least)), RAREST)
        return (1 << RAREST + 1) - (1 << level)

    def _note(self) -> None:
        """What a step changes beside parameters and slots, for the next one may change it and come to nothing."""
        self._state: State = state_of(self.engine, None, None)
        self._moving = {name: array.copy() for name, array in self.engine.state.items()} if self.trains else {}

    def _request(self) -> int | None:
        """How many ranks are asked for; the lowest rank looks."""
        if self.elastic.resize is None or self.control.rank > 0:
            return self.ranks
        try:
            return max(int(Path(self.elastic.resize).read_text()), 1)
        except (OSError, ValueError):  # not there, or being written
            return self.ranks

    def request(self) -> int | None:
        """The same, on all ranks, None if the mesh cannot use so many. Collective."""
        found: int | None = self.control.all_gather_object(self._request())[0]
        try:
            mesh_for(self.recipe.mesh, self.recipe.strategy, min(found or self.control.size, self.control.size))
        except MeshError as error:
            self._refused = found
            if self.control.rank == 0:
                print(f"fsdpx: {self.elastic.resize} asks for {found} ranks: {error}", file=sys.stderr, flush=True)
            return None
        return found

    # -- another state -------------------------------------------------------------------------------------------------

    def secure(self) -> None:
        """The ranks that train hold another state: make copies of it, and return when they have arrived."""
        if self.copies.needed:
            self.copies.abandon()
            self._under_way = self.step + 1
            self.copies.take(state_of(self.engine, None, None), self._under_way)
            self.copies.wait()

    def replaced(self) -> None:
        """All agree that there is another state; it counts like a step."""
        self.step += 1
        self.kept, self._under_way = self.step, None
        self._note()

    # -- those who follow ----------------------------------------------------------------------------------------------

    def tell(self, value: Any) -> None:
        """To idle ranks; the lowest rank that trains speaks."""
        training = self.built.training
        if self.control.rank == training[0]:
            follow.tell(self.control, [r for r in range(self.control.size) if r not in training], value)

    def hear(self) -> Any:
        """What is told; an error of those that train is raised here, too."""
        value = follow.hear(self.control, self.built.training[0])
        if isinstance(value, Failure):
            if value.agreed:
                self.agree()
            raise getattr(errors, value.kind, FsdpxError)(value.text)
        return value

    def tell_of_failure(self, error: FsdpxError) -> None:
        """What all ranks that train raise together is raised when all have agreed that it was not a loss that some of
        them met. What one rank alone finds ends the job."""
        agreed = isinstance(error, ConfigError | DataError | CheckpointError)
        self.tell(Failure(type(error).__name__, str(error), agreed))
        if agreed:
            self.agree()

    # -- other ranks than before ---------------------------------------------------------------------------------------

    def recover(self, error: RankLost) -> Recovery:
        """After a loss that this rank noticed: give up what is under way, come together, go on with those that live."""
        begin, before, members = perf_counter(), self.step, self.built.born
        self.say("recovery: begins")
        self.control.revoke()
        if not isinstance(error, Refused):  # the others come to the next agreement, and hear of it there
            self.control.agree(0)
        self._settle()
        control, offers, tried = self.control, self._offers(), []
        while True:
            control = control.shrink()
            self.say("recovery: the others are found")
            built = None
            try:
                built = self._rebuilt(control, offers, self.ranks)
            except RankLost:
                control.revoke()
            if control.agree(FINE if built else 0):
                break
            control.revoke()
            tried.append(control)
        assert built is not None
        for one in (self.control, *tried):
            self._give_up(one)
        return self._go_on(built, begin, before, members)

    def close(self) -> None:
        """Nobody goes on. Collective."""
        self._give_up(self.control)
        self.built.close()
        self.control.close()

    def resize(self, ranks: int | None) -> Recovery:
        """At the boundary of two steps: train on that many ranks; RankLost if one was lost on the way."""
        begin, before = perf_counter(), self.step
        built = self._rebuilt(self.control, self._offers(), ranks)
        self.agree()
        self.ranks = ranks
        return self._go_on(built, begin, before, self.built.born)

    def _give_up(self, control: Survivor) -> None:
        """Nobody meets there again. A rank may die before it has given up the same: its record goes next time."""
        if (dog := unwatch(control)) is not None:
            self._given_up.append((control, dog))
        for before, dog in self._given_up:
            dog.bury(before.lost())

    def _rebuilt(self, control: Survivor, offers: list[Offer], ranks: int | None) -> Built:
        seat = self.built.training.index(self.control.rank) if self.trains else None
        standing = Standing(self._born, seat, self.kept == 0, [])
        timeout = None if self.built.dog is None else self.built.dog.timeout
        return rebuild(
            self.recipe, control, self.tuning, standing, offers, ranks, self.elastic.copies, self.say, timeout
        )  # fmt: skip

    def _go_on(self, built: Built, begin: float, before: int, members: list[int]) -> Recovery:
        built.engine.observers, old = self.engine.observers, self.built
        self._adopt(built)
        if built.control is old.control:
            old.close()
        lost = tuple(sorted(set(members) - set(built.born)))
        done = Recovery(self.engine.steps, lost, len(built.training), before - self.step, perf_counter() - begin)
        self.recoveries.append(done)
        if self.control.rank == 0:
            print(f"fsdpx: {done}", file=sys.stderr, flush=True)
        return done

    def _offers(self) -> list[Offer]:
        """What this rank has in memory: its own state, unless it is half updated, and the copies it keeps."""
        offers = [Offer(g.step, g.state, g.parts) for g in self.copies.generations()]
        if self.trains and not self._updating:
            offers.insert(0, Offer(self.step, self._state, list(live(self.engine, self._moving))))
        return offers

    def _settle(self) -> None:
        """Transfers of the broken program end, for their buffers are used again."""
        engine = self.engine
        let_go([*(transfer.handle for _, transfer in engine.flying), *engine.sends])
        engine.flying.clear()
        engine.sends.clear()
        self.copies.abandon()
        self.copies.trim()

    def say(self, what: str) -> None:
        """To observers of actions."""
        for observe in self.engine.observers:
            observe(what)  # type: ignore[arg-type]
