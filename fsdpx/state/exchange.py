"""The state shared by ranks that step at their own speed: parameters and the state of the optimiser in a window, with
counts of updates and clocks. Each rank makes its changes itself, under a lock: no rank serves others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from fsdpx.array.kernels import store
from fsdpx.comm.window import LINE, Window
from fsdpx.config import EASGD, Async, Gossip
from fsdpx.errors import ConfigError, DataError
from fsdpx.layout.pages import cut
from fsdpx.layout.ranges import Range
from fsdpx.optim import Segments
from fsdpx.optim.average import AVERAGE
from fsdpx.optim.segments import Peers
from fsdpx.state.ledger import Key, LedgerRow
from fsdpx.state.placement import Placement, segments_of

__all__ = ["Exchange", "Update"]

CLOCK, MET = 0, 1
"""Words at the start of each part: steps its rank has made since all met, and how many times it has waited for all."""
AWAY = 1 << 62
"""The clock of a rank that makes no steps until all meet."""
UPDATES, ADDED, WEIGHT = 0, 1, 2
"""Words in front of each page: updates made, ranks whose gradients are in the sum, and their weight (a float64)."""

Span = tuple[int, Range]
"""A rank, and the elements of a page that it holds."""


class Update(Protocol):
    """Updates elements of a page. weight: of the gradients of all ranks, None if it is that of this rank alone. lr:
    what the learning rate is multiplied by."""

    def __call__(
        self, master: Any, gradient: Any, slots: Mapping[str, Any], segments: Segments, step: int,
        weight: float | None, lr: float,
    ) -> None: ...  # fmt: skip


class Item(NamedTuple):
    """What a part of a page's memory is, and where it lies in the part of its rank, in bytes."""

    key: Key
    dtype: Any
    start: int
    elements: int

    @property
    def stop(self) -> int:
        return self.start + self.elements * int(np.dtype(self.dtype).itemsize)


class Exchange:
    """One rank's side. Made collectively; after that only `close` is collective.

    clock: steps of this rank since all met. taken: staleness, as updates made since something was read -> how often
    this rank has updated it then."""

    def __init__(self, placement: Placement) -> None:
        self.placement, world = placement, placement.axes.world
        self.choice, self.rank, self.size = placement.apart, world.rank, world.size
        self._items = [_items(placement, rank) for rank in range(self.size)]
        ends = [max(item.stop for item in found.values()) for found in self._items]
        self.window: Window = world.window(ends[self.rank])
        self.clock = self._met = 0
        self._read: dict[tuple[int, int], int] = {}  # (rank, page) -> updates there, when it was read
        self.taken: dict[int, int] = {}

    @property
    def together(self) -> bool:
        """Whether all ranks step together."""
        return isinstance(self.choice, Async) and self.choice.staleness == 0

    # -- memory --------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[LedgerRow]:
        """Rows of what lies in this rank's part and is in no other ledger row."""
        for item in self._items[self.rank].values():
            if item.key.kind in ("added", "centre"):
                yield LedgerRow(item.key, item.dtype, Range(0, item.elements), "private")

    def arrays(self) -> Iterator[tuple[Key, Any]]:
        """The rows of this rank that lie in its part."""
        for item in self._items[self.rank].values():
            if item.key.kind != "words":
                yield item.key, self.window.own[item.start : item.stop].view(item.dtype)

    @contextmanager
    def _open(self, rank: int, *keys: Key, write: bool = True) -> Iterator[list[Any]]:
        """Arrays in the part of a rank, which is this rank's alone while the block runs."""
        items = [self._items[rank][key] for key in keys]
        first, last = min(i.start for i in items), max(i.stop for i in items)
        with self.window.open(rank, first, last, write) as block:
            yield [block[i.start - first : i.stop - first].view(i.dtype) for i in items]

    def _word(self, rank: int, page: int, at: int) -> int:
        return self.window.word(rank, self._items[rank][Key("words", page)].start // 8 + at)

    def _holders(self, page: int) -> Sequence[Span]:
        """Whose parts a page is read from and updated in: from this rank on, so that ranks start at different parts."""
        here = self.placement.pages[page]
        if not isinstance(self.choice, Async):
            return [(self.rank, here.mine)]
        turned = [(self.rank + i) % self.size for i in range(self.size)]
        return [(rank, here.shards[rank]) for rank in turned]

    @cached_property
    def _segments(self) -> dict[tuple[int, int], Segments]:
        return {}

    def _segments_of(self, rank: int, page: int) -> Segments:
        """What a rank holds of a page, in the optimiser's terms."""
        if (rank, page) not in self._segments:
            here = self.placement.pages[page]
            mine = here.shards[rank] if isinstance(self.choice, Async) else here.mine
            others = () if mine.size == here.size else (_refuse, Peers(_refuse, rank, _refuse))
            self._segments[rank, page] = Segments(segments_of(here.page, mine), *others)
        return self._segments[rank, page]

    def _note(self, call: str, elements: int, dtype: Any) -> None:
        self.placement.axes.counters.add("world", call, elements * int(np.dtype(dtype).itemsize))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def pull(self, page: int, full: Any) -> None:
        """Read a page as it is now, once the slowest rank is not too far behind."""
        self._keep_pace()
        with self.window.turn("pull"):
            for rank, span in self._holders(page):
                with self._open(rank, Key("words", page), Key("master", page), write=False) as (words, master):
                    self._read[rank, page] = int(words[UPDATES])
                    store(np, master, full[span.start : span.stop])
                if rank != self.rank:
                    self._note("pull", span.size, master.dtype)

    def _keep_pace(self) -> None:
        bound = self.choice.staleness if isinstance(self.choice, Async) else None
        if bound is not None:
            first = self.clock - bound
            self.window.wait(
                lambda: all(self.window.word(r, CLOCK) >= first or self.window.gone(r) for r in self._others),
                f"step {first} of the slowest rank, staleness={bound}",
            )

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def push(self, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Bring this rank's gradient of a page to where it is held, and update what is there."""
        for rank, span in self._holders(page):
            own = gradient[span.start : span.stop]
            if self.together:
                self._add(rank, page, own, weight, update)
                continue
            with self.window.turn("push"), self._opened_to_update(rank, page) as (words, master, slots):
                late = int(words[UPDATES]) - self._read[rank, page]
                self.taken[late] = self.taken.get(late, 0) + 1
                lr = 1 / (1 + late) if isinstance(self.choice, Async) and self.choice.by_staleness else 1.0
                words[UPDATES] += 1
                update(master, own, slots, self._segments_of(rank, page), int(words[UPDATES]), None, lr)
            if rank != self.rank:
                self._note("push", span.size, own.dtype)

    @contextmanager
    def _opened_to_update(self, rank: int, page: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        keys = [key for key in self._items[rank] if key.page == page and key.kind in ("slot", "average")]
        with self._open(rank, Key("words", page), Key("master", page), *keys) as (words, master, *slots):
            yield words, master, {key.name: array for key, array in zip(keys, slots, strict=True)}

    def _add(self, rank: int, page: int, gradient: Any, weight: float, update: Update) -> None:
        """Gradients of a step are added in rank order, as synchronous training adds them; the last rank updates."""
        self.window.wait(
            lambda: self._comes_to_me(rank, page), f"the gradients of earlier ranks in step {self.clock}, staleness=0"
        )
        with self.window.turn("push"):
            with self._open(rank, Key("words", page), Key("added", page)) as (words, total):
                weights = words[WEIGHT : WEIGHT + 1].view(np.float64)
                if self.rank == 0:
                    total[...], weights[...] = gradient, weight
                else:
                    total += gradient
                    weights += weight
                words[ADDED] = (self.rank + 1) % self.size
                whole, shared = total, float(weights[0])
            if self.rank == self.size - 1:
                with self._opened_to_update(rank, page) as (words, master, slots):
                    words[UPDATES] += 1
                    update(master, whole, slots, self._segments_of(rank, page), int(words[UPDATES]), shared, 1.0)
        if rank != self.rank:
            self._note("push", gradient.size, gradient.dtype)

    def _comes_to_me(self, rank: int, page: int) -> bool:
        turn = self._word(rank, page, ADDED)
        if turn != self.rank and (self.window.word(turn, CLOCK) == AWAY or self.window.gone(turn)):
            raise DataError(f"rank {turn} takes no more steps, and staleness=0 needs all ranks in each")
        return turn == self.rank

    def mix(self, page: int, step: int) -> None:
        """Draw this rank's model and those of others near each other, after step number `step`."""
        assert isinstance(self.choice, Gossip | EASGD)
        if step % self.choice.every:
            return
        with self.window.turn("mix"):
            if isinstance(self.choice, Gossip):
                self._average(page, step)
            else:
                self._to_centre(page, 0.9 / self.size if self.choice.pull is None else self.choice.pull)

    def _average(self, page: int, step: int) -> None:
        """With another rank, the same one for all pages of a step; the mean of all models stays what it is."""
        key, drawn = Key("master", page), random.Random(f"{self.placement.options.seed} {self.rank} {step}")
        others = [rank for rank in drawn.sample(self._others, self.size - 1) if not self.window.gone(rank)]
        if not others:
            return
        with ExitStack() as both:
            one, two = (both.enter_context(self._open(r, key))[0] for r in sorted((self.rank, others[0])))
            one += two
            one *= 0.5
            two[...] = one
        self._note("mix", 2 * one.size, one.dtype)

    def _to_centre(self, page: int, pull: float) -> None:
        mine, key = self._own(Key("master", page)), Key("centre", page)
        for rank, span in _over(self.placement, page, self.size):
            with self._open(rank, key) as (centre,):
                x = mine[span.start : span.stop]
                apart = (x - centre) * x.dtype.type(pull)
                x -= apart
                centre += apart
            if rank != self.rank:
                self._note("mix", 2 * span.size, x.dtype)

    def _own(self, key: Key) -> Any:
        item = self._items[self.rank][key]
        return self.window.own[item.start : item.stop].view(item.dtype)

    def tick(self) -> None:
        """This rank has made a step."""
        self.clock += 1
        self.window.say(CLOCK, self.clock)

    # -- between steps -------------------------------------------------------------------------------------------------

    def begin(self, steps: int) -> None:
        """All parameters have been set, after `steps` steps. All ranks call it; none may step before all have."""
        updates = steps * (self.size if isinstance(self.choice, Async) and not self.together else 1)
        for key in self._items[self.rank]:
            if key.kind == "words":
                self._own(key)[...] = 0
                self._own(key)[UPDATES] = updates
            if key.kind == "centre":
                span = _over(self.placement, _page(key), self.size)[self.rank][1]
                self._own(key)[...] = self._own(Key("master", key.page))[span.start : span.stop]

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
        self.window.poll(
            lambda: all(self.window.word(r, MET) >= self._met or self.window.gone(r) for r in self._others),
            "the last steps of the others",
        )

    def whole(self, key: Key) -> Any:
        """All elements of a page of what the ranks have in common: of its shards, of the centre, or the mean of all
        models; and of the state of the optimiser. On this rank alone."""
        here = self.placement.pages[_page(key)]
        centre = Key("centre", key.page)
        if isinstance(self.choice, EASGD) and key.kind == "master" and centre in self._items[self.rank]:
            return self._put_together(centre, _over(self.placement, here.page.index, self.size), here.size)
        if isinstance(self.choice, Async):
            if self.together:
                self._keep_pace()
            return self._put_together(key, self._holders(here.page.index), here.size)
        living = [rank for rank in range(self.size) if rank == self.rank or not self.window.gone(rank)]
        dtype = self._items[self.rank][key].dtype
        if dtype != self.placement.formats.master:  # codes have no mean
            living = living[:1]
        total = np.zeros(self._items[self.rank][key].elements)
        for rank in living:
            with self._open(rank, key, write=False) as (values,):
                total += values
        return (total / len(living)).astype(dtype)

    def _put_together(self, key: Key, spans: Sequence[Span], size: int) -> Any:
        full = np.empty(size, self._items[self.rank][key].dtype)
        for rank, span in spans:
            with self._open(rank, key, write=False) as (values,):
                full[span.start : span.stop] = values
        return full

    def common(self, kinds: Sequence[str]) -> Callable[[], Callable[[], None]] | None:
        """Read what the ranks have in common of these kinds of rows. What is returned puts it where this rank has its
        own, once all have read, and returns what puts that back."""
        if isinstance(self.choice, Async):
            return None
        rows = [(self._own(key), self.whole(key)) for key in self._items[self.rank] if key.kind in kinds]

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
                self._own(Key("master", p))[...] = values

        return restore

    def close(self) -> None:
        """Let go of the window. Collective."""
        self.window.close()


def _items(placement: Placement, rank: int) -> dict[Key, Item]:
    """What lies in the part of a rank, the same on all ranks: after the words of its clock, page by page."""
    found: dict[Key, Item] = {}
    at = LINE
    for p in placement.pages:
        for key, dtype, elements in _of_page(placement, p, rank):
            found[key] = item = Item(key, dtype, at, elements)
            at = -(-item.stop // LINE) * LINE
    return found


def _of_page(placement: Placement, p: int, rank: int) -> Iterator[tuple[Key, Any, int]]:
    choice, page, master = placement.apart, placement.pages[p], placement.formats.master
    shards = isinstance(choice, Async)
    mine = page.shards[rank] if shards else page.mine
    yield Key("words", p), np.dtype(np.int64), LINE // 8
    if page.page.trainable and isinstance(choice, Async) and choice.staleness == 0:
        yield Key("added", p), placement.formats.gradients, mine.size
    yield Key("master", p), master, mine.size
    if not page.page.trainable:
        return
    segments = segments_of(page.page, mine)
    for name, kept in placement.kept.items():
        key = Key("average" if name == AVERAGE else "slot", p, name)
        yield key, placement.slot_format(name), sum(kept.count(s) for s in segments)
    if isinstance(choice, EASGD):
        width = placement.axes.world.size
        yield Key("centre", p), master, _over(placement, p, width)[rank][1].size


def _over(placement: Placement, page: int, width: int) -> list[Span]:
    """A page cut over all ranks."""
    return list(enumerate(cut(placement.pages[page].page, width)))


def _page(key: Key) -> int:
    assert key.page is not None
    return key.page


def _refuse(*asked: Any) -> Any:
    raise ConfigError(
        "this optimizer needs norms of whole parameters, which asynchronous ranks have in shards: use optim.AdamW or "
        "optim.SGD, or strategy='gossip'"
    )
