"""The ledger: the rows of what a rank holds, and where each of them lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fsdpx.core.state.flat_parameters import ElementRange, ShardedPage
from fsdpx.core.state.placement import Placement
from fsdpx.nn.layer import ParameterSpec
from fsdpx.optim.optimizer import AVERAGE_SLOT

__all__ = [
    "LEDGER_KINDS",
    "Ledger",
    "LedgerKey",
    "LedgerKind",
    "LedgerRow",
    "Level",
    "Lifetime",
    "get_saved_format",
    "list_rows",
    "list_saved_tensors",
    "make_local_gradient_row",
    "of_replica",
    "saved_name",
    "tensor_name",
]  # fmt: skip


@dataclass(frozen=True)
class LedgerKind:
    """memory: under which a report counts it. slot: the kind of slot in which programs see it, if they do. saved: it
    belongs to the train state, so checkpoints hold it, re-cuts move it and recovery keeps copies of it; everything else
    can be made again from what is saved. prefix: of the name under which it is saved."""

    memory: str
    slot: str = ""
    saved: bool = False
    prefix: str = ""


LEDGER_KINDS = {
    "master": LedgerKind("parameters", "shard", saved=True),  # the parameters that the optimiser updates
    "full": LedgerKind("parameters"),  # gathered, in the format in which layers compute
    "grad": LedgerKind("gradients"),  # of whole pages, as backward adds into them
    "part": LedgerKind("gradients"),  # summed over ranks
    "slot": LedgerKind("optimiser", "slots", saved=True),  # state of the optimiser
    "memory": LedgerKind("codec memory", "memory", saved=True),  # of a codec, such as error feedback
    "trace": LedgerKind("codec memory", "memory"),  # the same, zeroed after a load and on other ranks
    "statistic": LedgerKind("state", saved=True),  # running statistics of layers
    "average": LedgerKind("averages", "slots", saved=True),  # of parameters over time, which the optimiser moves
    "copy": LedgerKind("copies for recovery"),  # of other ranks' saved rows, and of this rank's as they were
}
"""By name; the strategies of `fsdpx.ext.asynchronous` add theirs."""

Owner = Literal["shard", "all", "data", "replica", "private"]
"""Which ranks hold the same elements: "shard", those that stand at this place of the shard axis; "all" ranks, where no
other axis cuts the tensor; "data", those at this place of the data axis: replicas share it out as well; "replica":
those of one replica as "shard", and each replica has contents of its own; "private", none: the contents belong to this
rank alone."""

Level = Literal["device", "host", "slow", "map", "rank"]
"""Where the bytes are: with the arrays that are computed on, in host memory, in a slower level, there as well but
mapped, so that the system keeps of it what memory has room for, or in the memory of another rank."""

Lifetime = Literal["run", "step", "pass", "use"]
"""How long the contents are good: as long as there is a trainer, until the next update, or while an action uses them.
Rows that live for a "use" have no memory of their own: programs plan where they lie. Rows that live for a "pass" are
valid as long as those of a step, but have memory only from their first use to the update: where activations lay that
are gone by then."""


class LedgerKey(NamedTuple):
    """What tells rows apart. page: None for a tensor by itself. name: of the slot or the tensor."""

    kind: str
    page: int | None
    name: str = ""


@dataclass(frozen=True)
class LedgerRow:
    """One array. span: its elements, in the page's (or the tensor's) numbers. times: how many such arrays lie behind
    each other (partial sums). inside, at: the row in whose memory it lies, and from which element on. sharers: ranks of
    this machine that have the memory in common."""

    key: LedgerKey
    dtype: Any
    span: ElementRange
    owner: Owner = "shard"
    lifetime: Lifetime = "run"
    level: Level = "device"
    times: int = 1
    inside: LedgerKey | None = None
    at: int = 0
    sharers: int = 1

    @property
    def elements(self) -> int:
        return self.span.size * self.times

    @property
    def nbytes(self) -> int:
        return self.elements * int(self.dtype.itemsize)

    @property
    def is_kept(self) -> bool:
        """Whether the row has memory between programs, once it is there."""
        return self.lifetime != "use" and self.level != "slow"

    @property
    def is_pass_only(self) -> bool:
        """Whether the row has no memory after an update."""
        return self.lifetime == "pass"

    @property
    def is_saved(self) -> bool:
        return LEDGER_KINDS[self.key.kind].saved


class Ledger:
    """Rows in the order in which they were added, and the array of each row that is kept.

    slower: gives the array of a row that lies in a slower level, for as long as it is referenced. planned, most: bytes
    by kind of memory of the rows that it began with, and the most there ever were."""

    def __init__(self, rows: Iterable[LedgerRow] = (), slower: Callable[[LedgerRow], Any] | None = None) -> None:
        self.rows = {row.key: row for row in rows}
        self.arrays: dict[LedgerKey, Any] = {}
        self.sizes: dict[tuple[str, int], list[float]] = {}
        """(axis, page) -> of the last reduce there, for reports: see `BoundCodec`."""
        self._slower = slower
        self.planned = self.count_bytes()
        self.most = Counter(self.planned)
        self._now = Counter(self.planned)

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(self.rows.values())

    def add_row(self, row: LedgerRow, array: Any) -> None:
        assert row.key not in self.rows, f"{row.key} is there already"
        self.rows[row.key], self.arrays[row.key] = row, array
        self._count_row(row, 1)

    def drop_row(self, key: LedgerKey) -> None:
        self._count_row(self.rows.pop(key), -1)
        self.arrays.pop(key, None)

    def _count_row(self, row: LedgerRow, sign: int) -> None:
        if row.is_kept and row.inside is None:
            kind = LEDGER_KINDS[row.key.kind].memory
            self._now[kind] += sign * (row.nbytes // row.sharers)
            self.most[kind] = max(self.most[kind], self._now[kind])

    def get_array(self, kind: str, page: int | None, name: str = "") -> Any:
        """The array of a row; None if there is no such row, or if programs plan where it lies."""
        row = self.rows.get(LedgerKey(kind, page, name))
        return None if row is None else self._get_row_array(row)

    def iterate_saved(self) -> Iterator[tuple[LedgerRow, Any]]:
        """The rows of the train state with their arrays."""
        return ((row, self._get_row_array(row)) for row in self if row.is_saved)

    def _get_row_array(self, row: LedgerRow) -> Any:
        if row.level == "slow" and self._slower is not None:
            return self._slower(row)
        return self.arrays.get(row.key)

    def count_bytes(self) -> dict[str, int]:
        """Bytes by kind of memory of all rows that have memory of their own, those in common divided by the sharers."""
        total: Counter[str] = Counter()
        for row in self:
            if row.is_kept and row.inside is None and row.level != "map":
                total[LEDGER_KINDS[row.key.kind].memory] += row.nbytes // row.sharers
        return dict(total)

    def pass_nbytes(self, now: bool = False) -> int:
        """Bytes of rows that have no memory after an update, which is never the arena's. now: of those that have some
        at this moment."""
        return sum(row.nbytes for row in self if row.is_pass_only and (not now or row.key in self.arrays))

    def slow_nbytes(self) -> dict[str, int]:
        """Bytes by kind of memory of all rows that lie in a slower level."""
        total: Counter[str] = Counter()
        for row in self:
            if row.level in ("slow", "map") and row.inside is None:
                total[LEDGER_KINDS[row.key.kind].memory] += row.nbytes
        return dict(total)

    def clear(self) -> None:
        self.rows.clear()
        self.arrays.clear()


def list_rows(placement: Placement, windows: bool, sharers: int) -> Iterator[LedgerRow]:
    """All rows of this rank. windows: ranks of a machine share memory. sharers: how many ranks have their full
    parameters in common there, 0 if none do."""
    return map(placement.options.storage.place_row, _in_memory(placement, windows, sharers))


def _in_memory(placement: Placement, windows: bool, sharers: int) -> Iterator[LedgerRow]:
    """The same, as they are laid out for memory."""
    formats, owner = placement.formats, placement.sync_policy.owner
    for page in placement.pages.values():
        yield from _list_parameter_rows(placement, page, sharers)
        if page.page.trainable:
            yield from _list_gradient_rows(placement, page, windows)
            for name in placement.optimizer.slots:
                kind = "average" if name == AVERAGE_SLOT else "slot"
                key = LedgerKey(kind, page.page.index, name)
                yield LedgerRow(key, placement.get_slot_format(name), page.own_range, owner)
            yield from placement.sync_policy.list_rows(page)
            yield from _list_codec_rows(placement, page)
    for name, spec in placement.layout.statistic_specs.items():
        yield LedgerRow(LedgerKey("statistic", None, name), formats.statistics, ElementRange(0, spec.size), "all")


def _list_parameter_rows(placement: Placement, page: ShardedPage, sharers: int) -> Iterator[LedgerRow]:
    """The shard is a part of the full parameters where these are kept in the same format."""
    p = page.page.index
    dtype, gathered = placement.formats.master, placement.formats.compute
    kept = placement.keep_full or sharers > 0
    full = LedgerRow(
        LedgerKey("full", p),
        gathered,
        ElementRange(0, page.size),
        "all",
        "step" if kept else "use",
        sharers=max(sharers, 1),
    )
    yield full
    as_stored = placement.formats.wire is None and gathered == dtype
    inside = full.key if kept and not placement.sync_policy.own_speed and as_stored else None
    owner = placement.sync_policy.owner if page.page.trainable else "shard"
    offset = page.own_range.start if inside else 0
    yield LedgerRow(LedgerKey("master", p), dtype, page.own_range, owner, inside=inside, at=offset)


def _list_gradient_rows(placement: Placement, page: ShardedPage, windows: bool) -> Iterator[LedgerRow]:
    """The reduced part lies in the full gradient where that is kept: at its own place in windows, which other ranks may
    be reading elsewhere, else in front."""
    p, dtype, kept = page.page.index, placement.formats.gradients, placement.keep_grads
    lifetime: Lifetime = "step" if kept else "use"
    times = placement.accumulation.times
    full = LedgerRow(LedgerKey("grad", p), dtype, ElementRange(0, page.size), "private", lifetime, times=times)
    yield full
    inside, offset = (full.key, page.own_range.start * windows) if kept else (None, 0)
    alone = inside is None and placement.sync_policy.is_synchronous
    yield LedgerRow(
        LedgerKey("part", p), dtype, page.own_range, lifetime="pass" if alone else "step", inside=inside, at=offset
    )


def _list_codec_rows(placement: Placement, page: ShardedPage) -> Iterator[LedgerRow]:
    """What is kept from step to step to carry a gradient."""
    p, axes, spans = page.page.index, placement.axes, {"shard": ElementRange(0, page.size), "replica": page.own_range}
    sizes = {axis: spans[axis].size for axis in axes.reduction_axes}
    for kept in placement.get_route(p).iterate_memory(sizes, alone=axes.data.size == 1):
        key = LedgerKey("trace" if kept.recut == "reset" else "memory", p, kept.name)
        span = spans[kept.axis] if kept.recut == "sum" else ElementRange(0, kept.elements)
        yield LedgerRow(key, placement.formats.gradients, span, "private")


def make_local_gradient_row(placement: Placement, page: int) -> LedgerRow:
    """A whole gradient that is kept on this rank until the update, where gradients live for a use otherwise."""
    span, times = ElementRange(0, placement.pages[page].size), placement.accumulation.times
    return LedgerRow(
        LedgerKey("grad", page, "local"), placement.formats.gradients, span, "private", "step", times=times
    )


def tensor_name(row: str, parameter: str) -> str:
    """The name of a tensor of the train state: "m/0.weight" of slot m, "0.weight" of the parameter itself."""
    return f"{row}/{parameter}" if row else parameter


def saved_name(row: LedgerRow, replica: int) -> str:
    """The first half of such a name: "m", or "replica1/m" of what each replica has of its own."""
    name = LEDGER_KINDS[row.key.kind].prefix + row.key.name
    return of_replica(name, replica) if row.owner == "replica" else name


def of_replica(name: str, replica: int) -> str:
    """The same for what one replica has of its own."""
    return f"replica{replica}/{name}" if name else f"replica{replica}"


def list_saved_tensors(placement: Placement, replicas: int | None = None) -> dict[str, ParameterSpec]:
    """Every tensor of the train state of the whole model, the same on every rank: parameters and running statistics,
    then what the optimiser keeps of each trained parameter. replicas: how many of them have a state of their own, where
    they train by themselves; None: those of the mesh."""
    specs = placement.layout.specs
    trained = {name: spec for name, spec in specs.items() if spec.trainable}
    specs_by_name = {
        tensor_name(slot, name): spec
        for slot in placement.sync_policy.list_saved_slots(replicas)
        for name, spec in trained.items()
    }
    return specs | {name: spec for name, spec in specs_by_name.items() if spec.size}


def get_saved_format(placement: Placement, name: str) -> np.dtype:
    """The format in which ranks hold a tensor of the train state."""
    formats = placement.formats
    if "/" in name and name not in placement.layout.specs:
        slots = [word for word in name.split("/")[:2] if word in placement.slot_formats]  # "m/...", or "replica1/m/..."
        return placement.get_slot_format(slots[0]) if slots else formats.master
    return formats.statistics if name in placement.layout.statistic_specs else formats.master
