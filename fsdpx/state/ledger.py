"""The ledger: what a rank holds, as a table of rows with their arrays.

Allocation, checkpoints, re-cuts, recovery and reports iterate these rows; none of them keeps a list of its own.
A feature that keeps something new adds rows (and a kind, if none fits)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fsdpx.layout.ranges import Range

__all__ = ["KINDS", "Key", "Kind", "Ledger", "LedgerRow", "Level", "Lifetime"]


@dataclass(frozen=True)
class Kind:
    """memory: under which a report counts it. slot: the kind of slot in which programs see it, if they do. saved: it
    belongs to the train state, so checkpoints hold it, re-cuts move it and recovery keeps copies of it; everything else
    can be made again from what is saved. prefix: of the name under which it is saved."""

    memory: str
    slot: str = ""
    saved: bool = False
    prefix: str = ""


KINDS = {
    "master": Kind("parameters", "shard", saved=True),  # the parameters that the optimiser updates
    "full": Kind("parameters"),  # gathered, in the format in which layers compute
    "grad": Kind("gradients"),  # of whole pages, as backward adds into them
    "part": Kind("gradients"),  # summed over ranks
    "slot": Kind("optimiser", "slots", saved=True),  # state of the optimiser
    "memory": Kind("codec memory", "memory", saved=True),  # of a codec, such as error feedback
    "trace": Kind("codec memory", "memory"),  # the same, zeroed after a load and on other ranks
    "statistic": Kind("state", saved=True),  # running statistics of layers
    "average": Kind("averages", "slots", saved=True),  # of parameters over time, which the optimiser moves
    "outer": Kind("outer parameters", "outer", saved=True),  # where replicas that train by themselves last met
    "velocity": Kind("outer optimiser", "velocity", saved=True, prefix="outer."),  # state of the optimiser between them
    "delta": Kind("gradients"),  # what a replica has moved since
    "sum": Kind("gradients", saved=True, prefix="delta"),  # of these over replicas, until the outer step
    "parcel": Kind("gradients"),  # of a codec, while they are under way
    "added": Kind("gradients"),  # of a step of all ranks, added up in a window
    "copy": Kind("copies for recovery"),  # of other ranks' saved rows, and of this rank's as they were
}

Owner = Literal["shard", "all", "data", "replica", "private"]
"""Which ranks hold the same elements: "shard", those that stand at this place of the shard axis; "all" ranks, where no
other axis cuts the tensor; "data", those at this place of the data axis: replicas share it out as well; "replica":
those of one replica as "shard", and each replica has contents of its own; "private", none: the contents belong to this
rank alone."""

Level = Literal["device", "host", "disk", "map", "rank"]
"""Where the bytes are: with the arrays that are computed on, in host memory, on disk, there as well but mapped, so that
the system keeps of it what memory has room for, or in the memory of another rank."""

Lifetime = Literal["run", "step", "pass", "use"]
"""How long the contents are good: as long as there is a trainer, until the next update, or while an action uses them.
Rows that live for a "use" have no memory of their own: programs plan where they lie. Rows that live for a "pass" are
valid as long as those of a step, but have memory only from their first use to the update: where activations lay that
are gone by then."""


class Key(NamedTuple):
    """What tells rows apart. page: None for a tensor by itself. name: of the slot or the tensor."""

    kind: str
    page: int | None
    name: str = ""


@dataclass(frozen=True)
class LedgerRow:
    """One array. span: its elements, in the page's (or the tensor's) numbers. times: how many such arrays lie behind
    each other (partial sums). inside, at: the row in whose memory it lies, and from which element on. sharers: ranks of
    this machine that have the memory in common."""

    key: Key
    dtype: Any
    span: Range
    owner: Owner = "shard"
    lifetime: Lifetime = "run"
    level: Level = "device"
    times: int = 1
    inside: Key | None = None
    at: int = 0
    sharers: int = 1

    @property
    def elements(self) -> int:
        return self.span.size * self.times

    @property
    def nbytes(self) -> int:
        return self.elements * int(self.dtype.itemsize)

    @property
    def kept(self) -> bool:
        """Whether it has memory between programs, once it is there."""
        return self.lifetime != "use" and self.level != "disk"

    @property
    def passing(self) -> bool:
        """Whether it has none after an update."""
        return self.lifetime == "pass"

    @property
    def saved(self) -> bool:
        return KINDS[self.key.kind].saved


class Ledger:
    """Rows in the order in which they were added, and the array of each row that is kept.

    slower: gives the array of a row that lies in a slower level, for as long as it is referenced. planned, most: bytes
    by kind of memory of the rows that it began with, and the most there ever were."""

    def __init__(self, rows: Iterable[LedgerRow] = (), slower: Callable[[LedgerRow], Any] | None = None) -> None:
        self.rows = {row.key: row for row in rows}
        self.arrays: dict[Key, Any] = {}
        self.sizes: dict[tuple[str, int], list[float]] = {}
        """(axis, page) -> of the last reduce there, for reports: see `state.gradients.Reduction`."""
        self._slower = slower
        self.planned = self.nbytes()
        self.most = Counter(self.planned)
        self._now = Counter(self.planned)

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(self.rows.values())

    def add(self, row: LedgerRow, array: Any) -> None:
        assert row.key not in self.rows, f"{row.key} is there already"
        self.rows[row.key], self.arrays[row.key] = row, array
        self._count(row, 1)

    def drop(self, key: Key) -> None:
        self._count(self.rows.pop(key), -1)
        self.arrays.pop(key, None)

    def _count(self, row: LedgerRow, sign: int) -> None:
        if row.kept and row.inside is None:
            kind = KINDS[row.key.kind].memory
            self._now[kind] += sign * (row.nbytes // row.sharers)
            self.most[kind] = max(self.most[kind], self._now[kind])

    def array(self, kind: str, page: int | None, name: str = "") -> Any:
        """The array of a row; None if there is no such row, or if programs plan where it lies."""
        row = self.rows.get(Key(kind, page, name))
        return None if row is None else self._at(row)

    def saved(self) -> Iterator[tuple[LedgerRow, Any]]:
        """The rows of the train state with their arrays."""
        return ((row, self._at(row)) for row in self if row.saved)

    def _at(self, row: LedgerRow) -> Any:
        if row.level == "disk" and self._slower is not None:
            return self._slower(row)
        return self.arrays.get(row.key)

    def nbytes(self) -> dict[str, int]:
        """Bytes by kind of memory of all rows that have memory of their own, those in common divided by the sharers."""
        total: Counter[str] = Counter()
        for row in self:
            if row.kept and row.inside is None and row.level != "map":
                total[KINDS[row.key.kind].memory] += row.nbytes // row.sharers
        return dict(total)

    def on_disk(self) -> dict[str, int]:
        """Bytes by kind of memory of all rows that lie on disk."""
        total: Counter[str] = Counter()
        for row in self:
            if row.level in ("disk", "map") and row.inside is None:
                total[KINDS[row.key.kind].memory] += row.nbytes
        return dict(total)

    def clear(self) -> None:
        self.rows.clear()
        self.arrays.clear()
