"""Memory that ranks at their own speed read and change without each other's help, and what lies where in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fsdpx.comm.windows import LINE, Window
from fsdpx.errors import ConfigError
from fsdpx.layout.pages import Range
from fsdpx.optim import Segments
from fsdpx.optim.average import AVERAGE
from fsdpx.optim.segments import Peers
from fsdpx.state.ledger import Key
from fsdpx.state.placement import Placement, segments_of

__all__ = ["CommonMemory", "Span"]

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

    Kinds of keys: "words" (counts, in front of each page), "master", "slot", "average", and if wanted "added" (the sum
    of gradients). sharded: all ranks update one model, of which each holds a shard; else each rank holds its own."""

    def __init__(self, placement: Placement, sharded: bool, added: bool) -> None:
        self.placement, world = placement, placement.axes.world
        self.rank, self.size = world.rank, world.size
        self.sharded = sharded
        self._items = [_items(placement, rank, sharded, added) for rank in range(self.size)]
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
        turned = [(self.rank + i) % self.size for i in range(self.size if self.sharded else 1)]
        return [(rank, _held(self.placement, page, rank, self.sharded)) for rank in turned]

    def segments_of(self, rank: int, page: int) -> Segments:
        """What a rank holds of a page, in the optimiser's terms."""
        if (rank, page) not in self._segments:
            here, mine = self.placement.pages[page], _held(self.placement, page, rank, self.sharded)
            others = () if mine.size == here.size else (_refuse, Peers(_refuse, rank, _refuse))
            self._segments[rank, page] = Segments(segments_of(here.page, mine, self.placement.layout.specs), *others)
        return self._segments[rank, page]


def _items(placement: Placement, rank: int, sharded: bool, added: bool) -> dict[Key, Item]:
    """What lies in the part of a rank, the same on all ranks: after the words of its clock, page by page."""
    found: dict[Key, Item] = {}
    at = LINE
    for p in placement.pages:
        for key, dtype, elements in _of_page(placement, p, _held(placement, p, rank, sharded), added):
            found[key] = item = Item(key, dtype, at, elements)
            at = -(-item.stop // LINE) * LINE
    return found


def _of_page(placement: Placement, p: int, mine: Range, added: bool) -> Iterator[tuple[Key, Any, int]]:
    page, master = placement.pages[p], placement.formats.master
    yield Key("words", p), np.dtype(np.int64), LINE // 8
    if page.page.trainable and added:
        yield Key("added", p), placement.formats.gradients, mine.size
    yield Key("master", p), master, mine.size
    if not page.page.trainable:
        return
    segments = segments_of(page.page, mine, placement.layout.specs)
    for name, kept in placement.kept.items():
        key = Key("average" if name == AVERAGE else "slot", p, name)
        yield key, placement.slot_format(name), sum(kept.count(s) for s in segments)


def _held(placement: Placement, page: int, rank: int, sharded: bool) -> Range:
    """The elements of a page in the part of a rank."""
    here = placement.pages[page]
    return here.shards[rank] if sharded else here.mine


def _refuse(*asked: Any) -> Any:
    raise ConfigError(
        "this optimizer needs norms of whole parameters, which asynchronous ranks have in shards: use optim.AdamW or "
        "optim.SGD, or strategy='gossip'"
    )
