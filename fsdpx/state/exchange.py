"""The protocol of ranks that step at their own speed: they pull, push and mix the state they share, and count steps and
updates. Each rank makes its changes itself, under a lock: no rank serves others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from fsdpx.array.kernels import store
from fsdpx.config import Async, Gossip
from fsdpx.errors import DataError
from fsdpx.optim import Segments
from fsdpx.state.common import CommonMemory
from fsdpx.state.ledger import Key
from fsdpx.state.placement import Placement

__all__ = ["Exchange", "Update"]

CLOCK, MET = 0, 1
"""Words at the start of each part: steps its rank has made since all met, and how many times it has waited for all."""
AWAY = 1 << 62
"""The clock of a rank that makes no steps until all meet."""
UPDATES, ADDED, WEIGHT = 0, 1, 2
"""Words in front of each page: updates made, ranks whose gradients are in the sum, and their weight (a float64)."""


class Update(Protocol):
    """Updates elements of a page. weight: of the gradients of all ranks, None if it is that of this rank alone. lr:
    what the learning rate is multiplied by."""

    def __call__(
        self, master: Any, gradient: Any, slots: Mapping[str, Any], segments: Segments, step: int,
        weight: float | None, lr: float,
    ) -> None: ...  # fmt: skip


class Exchange:
    """One rank's side. Made collectively; after that only `close` is collective.

    clock: steps of this rank since all met. taken: staleness, as updates made since something was read -> how often
    this rank has updated it then."""

    def __init__(self, placement: Placement) -> None:
        self.placement, world = placement, placement.axes.world
        self.choice, self.rank, self.size = placement.apart, world.rank, world.size
        self.memory = CommonMemory(placement)
        self.window = self.memory.window
        self.clock = self._met = 0
        self._read: dict[tuple[int, int], int] = {}  # (rank, page) -> updates there, when it was read
        self.taken: dict[int, int] = {}

    @property
    def together(self) -> bool:
        """Whether all ranks step together."""
        return isinstance(self.choice, Async) and self.choice.staleness == 0

    def _note(self, call: str, elements: int, dtype: Any) -> None:
        self.placement.axes.counters.add("world", call, elements * int(np.dtype(dtype).itemsize))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def pull(self, page: int, full: Any) -> None:
        """Read a page as it is now, once the slowest rank is not too far behind."""
        self._keep_pace()
        with self.window.turn("pull"):
            for rank, span in self.memory.holders(page):
                with self.memory.open(rank, Key("words", page), Key("master", page), write=False) as (words, master):
                    self._read[rank, page] = int(words[UPDATES])
                    store(np, master, full[span.start : span.stop])
                if rank != self.rank:
                    self._note("pull", span.size, master.dtype)

    def _keep_pace(self) -> None:
        bound = self.choice.staleness if isinstance(self.choice, Async) else None
        if bound is not None:
            first = self.clock - bound
            self.window.wait(
                lambda: [r for r in self._others if self.window.word(r, CLOCK) < first and not self.window.gone(r)],
                f"step {first} of the slowest rank, staleness={bound}",
            )

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def push(self, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Bring this rank's gradient of a page to where it is held, and update what is there."""
        for rank, span in self.memory.holders(page):
            own = gradient[span.start : span.stop]
            if self.together:
                self._add(rank, page, own, weight, update)
                continue
            with self.window.turn("push"), self.memory.open_to_update(rank, page) as (words, master, slots):
                late = int(words[UPDATES]) - self._read[rank, page]
                self.taken[late] = self.taken.get(late, 0) + 1
                lr = 1 / (1 + late) if isinstance(self.choice, Async) and self.choice.by_staleness else 1.0
                words[UPDATES] += 1
                update(master, own, slots, self.memory.segments_of(rank, page), int(words[UPDATES]), None, lr)
            if rank != self.rank:
                self._note("push", span.size, own.dtype)

    def _add(self, rank: int, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Gradients of a step are added in rank order, as synchronous training adds them; the last rank updates."""
        self.window.wait(
            lambda: self._before_me(rank, page), f"the gradients of earlier ranks in step {self.clock}, staleness=0"
        )
        with self.window.turn("push"):
            with self.memory.open(rank, Key("words", page), Key("added", page)) as (words, total):
                weights = words[WEIGHT : WEIGHT + 1].view(np.float64)
                if self.rank == 0:
                    total[...], weights[...] = gradient, weight
                else:
                    total += gradient
                    weights += weight
                words[ADDED] = (self.rank + 1) % self.size
                whole, shared = total, float(weights[0])
            if self.rank == self.size - 1:
                with self.memory.open_to_update(rank, page) as (words, master, slots):
                    words[UPDATES] += 1
                    update(master, whole, slots, self.memory.segments_of(rank, page), int(words[UPDATES]), shared, 1.0)
        if rank != self.rank:
            self._note("push", gradient.size, gradient.dtype)

    def _before_me(self, rank: int, page: int) -> list[int]:
        """The rank that adds next, unless it is this one."""
        turn = self.memory.word(rank, page, ADDED)
        if turn != self.rank and (self.window.word(turn, CLOCK) == AWAY or self.window.gone(turn)):
            raise DataError(f"rank {turn} takes no more steps, and staleness=0 needs all ranks in each")
        return [] if turn == self.rank else [turn]

    def mix(self, page: int, step: int) -> None:
        """Draw this rank's model and those of others near each other, after step number `step`."""
        assert isinstance(self.choice, Gossip)
        if step % self.choice.every == 0:
            with self.window.turn("mix"):
                self._average(page, step)

    def _average(self, page: int, step: int) -> None:
        """With another rank, the same one for all pages of a step; the mean of all models stays what it is."""
        key, drawn = Key("master", page), random.Random(f"{self.placement.options.seed} {self.rank} {step}")
        others = [rank for rank in drawn.sample(self._others, self.size - 1) if not self.window.gone(rank)]
        if not others:
            return
        with ExitStack() as both:
            one, two = (both.enter_context(self.memory.open(r, key))[0] for r in sorted((self.rank, others[0])))
            one += two
            one *= 0.5
            two[...] = one
        self._note("mix", 2 * one.size, one.dtype)

    def tick(self) -> None:
        """This rank has made a step."""
        self.clock += 1
        self.window.say(CLOCK, self.clock)

    # -- between steps -------------------------------------------------------------------------------------------------

    def begin(self, steps: int) -> None:
        """All parameters have been set, after `steps` steps. All ranks call it; none may step before all have."""
        updates = steps * (self.size if isinstance(self.choice, Async) and not self.together else 1)
        for key in self.memory.keys:
            if key.kind == "words":
                self.memory.own(key)[...] = 0
                self.memory.own(key)[UPDATES] = updates

    def lost(self) -> list[int]:
        """Other ranks that are known here to have died."""
        return [rank for rank in self._others if self.window.gone(rank)]

    def meet(self) -> None:
        """Return when all living ranks are here; until then no step of another rank waits for this one. From then on
        all clocks are equal."""
        self.window.say(CLOCK, AWAY)
        self.window.leave()
        self._await()
        self.clock = 0
        self.window.say(CLOCK, 0)
        self._await()  # a rank not yet back from the first wait is still AWAY

    def _await(self) -> None:
        self._met += 1
        self.window.say(MET, self._met)
        self.window.meet(
            lambda: [r for r in self._others if self.window.word(r, MET) < self._met and not self.window.gone(r)],
            "the last steps of the others",
        )

    def whole(self, key: Key) -> Any:
        """All elements of a page of what the ranks have in common: of its shards, or the mean of all models; and of the
        state of the optimiser. On this rank alone."""
        here = self.placement.pages[_page(key)]
        if isinstance(self.choice, Async):
            if self.together:
                self._keep_pace()
            return self.memory.put_together(key, self.memory.holders(here.page.index), here.size)
        living = [rank for rank in range(self.size) if rank == self.rank or not self.window.gone(rank)]
        dtype = self.memory.dtype(key)
        if dtype != self.placement.formats.master:  # codes have no mean
            living = living[:1]
        total = np.zeros(self.memory.own(key).size)
        for rank in living:
            with self.memory.open(rank, key, write=False) as (values,):
                total += values
        return (total / len(living)).astype(dtype)

    def common(self, kinds: Sequence[str]) -> Callable[[], Callable[[], None]] | None:
        """Read what the ranks have in common of these kinds of rows. What is returned puts it where this rank has its
        own, once all have read, and returns what puts that back."""
        if isinstance(self.choice, Async):
            return None
        rows = [(self.memory.own(key), self.whole(key)) for key in self.memory.keys if key.kind in kinds]

        def put() -> Callable[[], None]:
            before = [(own, own.copy()) for own, _ in rows]
            for own, whole in rows:
                own[...] = whole

            def put_back() -> None:
                for own, values in before:
                    own[...] = values

            return put_back

        return put

    def remember(self) -> Callable[[], None]:
        """Copy this rank's elements of what the ranks have in common; what is returned puts them back."""
        mine = {p: self.placement.pages[p].mine for p in self.placement.pages}
        copies = {p: self.whole(Key("master", p))[span.start : span.stop] for p, span in mine.items()}

        def restore() -> None:
            for p, values in copies.items():
                self.memory.own(Key("master", p))[...] = values

        return restore

    def close(self) -> None:
        """Let go of the window. Collective."""
        self.window.close()


def _page(key: Key) -> int:
    assert key.page is not None
    return key.page
