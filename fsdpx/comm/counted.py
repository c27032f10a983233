"""How many calls and bytes went over which axis: counters, and the communicator that counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdpx.comm.calls import Call, Handle
from fsdpx.comm.communicator import Communicator, Wrapper
from fsdpx.comm.verbs import moved

__all__ = ["Count", "Counted", "Counters"]


@dataclass(slots=True)
class Count:
    """Calls, and the bytes that this rank must send or receive with an optimal algorithm."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Counters:
    """Counts by (axis, verb), for one rank. total: all bytes so far. tallies: what layers count themselves, by path."""

    table: dict[tuple[str, str], Count] = field(default_factory=dict)
    total: int = field(default=0, compare=False)
    tallies: dict[str, list[int]] = field(default_factory=dict, compare=False)

    def add(self, axis: str, verb: str, nbytes: int, calls: int = 1) -> None:
        """Note `calls` calls of `verb` on `axis` that moved `nbytes` in all."""
        count = self.table.get((axis, verb))
        if count is None:
            count = self.table[axis, verb] = Count()
        count.calls += calls
        count.bytes += nbytes
        self.total += nbytes

    def tally(self, name: str, numbers: Sequence[int]) -> None:
        """Add to the numbers that a layer counts."""
        before = self.tallies.get(name, [0] * len(numbers))
        self.tallies[name] = [a + b for a, b in zip(before, numbers, strict=True)]

    def of(self, axis: str | None = None, verb: str | None = None) -> Count:
        """The sum over what matches; None matches everything."""
        found = [count for key, count in self.table.items() if axis in (None, key[0]) and verb in (None, key[1])]
        return Count(sum(count.calls for count in found), sum(count.bytes for count in found))

    def copy(self) -> Counters:
        """These counts as they are now."""
        return Counters({key: Count(count.calls, count.bytes) for key, count in self.table.items()})

    def since(self, earlier: Counters) -> Counters:
        """The counts added since `earlier` was copied; entries without new calls are left out."""
        later = Counters()
        for (axis, verb), count in self.table.items():
            before = earlier.table.get((axis, verb), Count())
            if count.calls > before.calls:
                later.add(axis, verb, count.bytes - before.bytes, count.calls - before.calls)
        return later

    def clear(self) -> None:
        """Forget all."""
        self.table.clear()
        self.tallies.clear()

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        """(axis, verb, calls, bytes), sorted by axis and verb."""
        for (axis, verb), count in sorted(self.table.items()):
            yield axis, verb, count.calls, count.bytes


class Counted(Wrapper):
    """A communicator that notes each call under its axis, with the bytes that `moved` says. One rank counts nothing."""

    def __init__(self, comm: Communicator, axis: str, counters: Counters) -> None:
        super().__init__(comm)
        self.axis, self.counters = axis, counters

    def __repr__(self) -> str:
        return f"Counted({self.comm!r}, {self.axis!r})"

    def issue(self, call: Call) -> Handle:
        handle = self.comm.issue(call)
        if self.size > 1:
            self.counters.add(self.axis, call.verb, moved(self, call))
        return handle

    def wrap(self, group: Communicator) -> Communicator:
        return Counted(group, self.axis, self.counters)
