"""The state that ranks at their own speed have in common, and how they exchange it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from fsdpx.array.kernels import store
from fsdpx.comm.windows import LINE, Window
from fsdpx.config import Async, Gossip
from fsdpx.errors import ConfigError, DataError
from fsdpx.layout.pages import Range
from fsdpx.optim import Segments
from fsdpx.optim.average import AVERAGE
from fsdpx.optim.segments import Peers
from fsdpx.state.ledger import Key, LedgerRow
from fsdpx.state.placement import Placement, segments_of

__all__ = ["CommonMemory", "Exchange", "Span", "Update"]

Span = tuple[int, Range]
"""A rank, and the elements of a page that it holds."""


class Item(NamedTuple):
    """What a part of a page's memory is, and where it lies in the part of its rank, in bytes."""

    key: Key
    dtype: Any
    start: int
    elements: int

    @property
    def stop(self) -> int:
        return self.start + self.elements * int(np.dtype(self.dtype).itemsize)


class CommonMemory:
    """One rank's view of the window, in which each rank has a part of its own. Collective to make.

    Kinds of keys: "words" (counts, in front of each page), "master", "slot", "average", and where the choice needs them
    "added" (the sum of gradients)."""

    def __init__(self, placement: Placement) -> None:
        self.placement, world = placement, placement.axes.world
        self.rank, self.size = world.rank, world.size
        self._items = [_items(placement, rank) for rank in range(self.size)]
        ends = [max(item.stop for item in found.values()) for found in self._items]
        self.window: Window = world.window(ends[self.rank])
        self._segments: dict[tuple[int, int], Segments] = {}

    @property
    def keys(self) -> Collection[Key]:
        """All that lies in this rank's part."""
        return self._items[self.rank]

    def dtype(self, key: Key) -> Any:
        """The format of a key's arrays."""
        return self._items[self.rank][key].dtype

    def own(self, key: Key) -> Any:
        """The array of a key in this rank's part."""
        item = self._items[self.rank][key]
        return self.window.own[item.start : item.stop].view(item.dtype)

    def rows(self) -> Iterator[LedgerRow]:
        """Rows of what lies in this rank's part and is in no other ledger row."""
        for item in self._items[self.rank].values():
            if item.key.kind == "added":
                yield LedgerRow(item.key, item.dtype, Range(0, item.elements), "private")

    def arrays(self) -> Iterator[tuple[Key, Any]]:
        """Key and array of everything in this rank's part but the words."""
        for item in self._items[self.rank].values():
            if item.key.kind != "words":
                yield item.key, self.own(item.key)

    @contextmanager
    def open(self, rank: int, *keys: Key, write: bool = True) -> Iterator[list[Any]]:
        """Arrays in the part of a rank, which is this rank's alone while the block runs."""
        items = [self._items[rank][key] for key in keys]
        first, last = min(i.start for i in items), max(i.stop for i in items)
        with self.window.open(rank, first, last, write) as block:
            yield [block[i.start - first : i.stop - first].view(i.dtype) for i in items]

    @contextmanager
    def open_to_update(self, rank: int, page: int) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        """The words, master parameters and optimiser slots of a page in the part of a rank."""
        keys = [key for key in self._items[rank] if key.page == page and key.kind in ("slot", "average")]
        with self.open(rank, Key("words", page), Key("master", page), *keys) as (words, master, *slots):
            yield words, master, {key.name: array for key, array in zip(keys, slots, strict=True)}

    def word(self, rank: int, page: int, at: int) -> int:
        """Word number `at` of a page in the part of a rank, read without a lock."""
        return self.window.word(rank, self._items[rank][Key("words", page)].start // 8 + at)

    def holders(self, page: int) -> Sequence[Span]:
        """Whose parts a page is read from and updated in: from this rank on, so that ranks start at different parts."""
        turned = [
            (self.rank + i) % self.size for i in range(self.size if isinstance(self.placement.apart, Async) else 1)
        ]
        return [(rank, _held(self.placement, page, rank)) for rank in turned]

    def put_together(self, key: Key, spans: Sequence[Span], size: int) -> Any:
        """All `size` elements of a page, from the parts of the ranks that hold them."""
        full = np.empty(size, self.dtype(key))
        for rank, span in spans:
            with self.open(rank, key, write=False) as (values,):
                full[span.start : span.stop] = values
        return full

    def segments_of(self, rank: int, page: int) -> Segments:
        """What a rank holds of a page, in the optimiser's terms."""
        if (rank, page) not in self._segments:
            here, mine = self.placement.pages[page], _held(self.placement, page, rank)
            others = () if mine.size == here.size else (_refuse, Peers(_refuse, rank, _refuse))
            self._segments[rank, page] = Segments(segments_of(here.page, mine, self.placement.layout.specs), *others)
        return self._segments[rank, page]


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
    mine = _held(placement, p, rank)
    yield Key("words", p), np.dtype(np.int64), LINE // 8
    if page.page.trainable and isinstance(choice, Async) and choice.staleness == 0:
        yield Key("added", p), placement.formats.gradients, mine.size
    yield Key("master", p), master, mine.size
    if not page.page.trainable:
        return
    segments = segments_of(page.page, mine, placement.layout.specs)
    for name, kept in placement.kept.items():
        key = Key("average" if name == AVERAGE else "slot", p, name)
        yield key, placement.slot_format(name), sum(kept.count(s) for s in segments)


def _held(placement: Placement, page: int, rank: int) -> Range:
    """The elements of a page in the part of a rank: its shard where all update one model, else all of its own model."""
    here = placement.pages[page]
    return here.shards[rank] if isinstance(placement.apart, Async) else here.mine


def _refuse(*asked: Any) -> Any:
    raise ConfigError(
        "this optimizer needs norms of whole parameters, which asynchronous ranks have in shards: use optim.AdamW or "
        "optim.SGD, or strategy='gossip'"
    )


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
