"""The ledger: a table of all arrays that a rank holds, and of the storage level of each."""

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
    "add_replica_prefix",
    "get_saved_name_prefix",
    "get_state_dtype",
    "get_tensor_name",
    "list_ledger_rows",
    "list_saved_tensors",
    "make_local_gradient_row",
]  # fmt: skip


@dataclass(frozen=True)
class LedgerKind:
    """A kind of row. memory: the heading under which reports count it. slot: the kind of slot through which programs
    use it, "" if they do not. saved: whether it belongs to the train state, so that checkpoints hold it, resharding
    moves it and recovery keeps copies of it; all other rows can be computed from saved ones. prefix: prefix of its name
    in checkpoints."""

    memory: str
    slot: str = ""
    saved: bool = False
    prefix: str = ""


LEDGER_KINDS = {
    "master": LedgerKind("parameters", "shard", saved=True),  # the parameters that the optimizer updates
    "full": LedgerKind("parameters"),  # gathered, in the dtype of layers
    "grad": LedgerKind("gradients"),  # of full pages; backward adds into them
    "part": LedgerKind("gradients"),  # summed over ranks
    "slot": LedgerKind("optimizer", "slots", saved=True),  # state of the optimizer
    "memory": LedgerKind("codec memory", "memory", saved=True),  # of a codec, such as error feedback
    "trace": LedgerKind("codec memory", "memory"),  # memory of a codec that is zeroed after a load and by resharding
    "statistic": LedgerKind("state", saved=True),  # running statistics of layers
    "average": LedgerKind("averages", "slots", saved=True),  # of parameters over time, updated by the optimizer
    "copy": LedgerKind("copies for recovery"),  # of other ranks' saved rows, and of this rank's at earlier steps
}
"""Kinds by name. The strategies of `fsdpx.ext.asynchronous` add their own."""

Owner = Literal["shard", "all", "data", "replica", "private"]
"""The ranks that hold the same elements. "shard": ranks with the same index on the shard axis. "all": all ranks, if no
other axis shards the tensor. "data": ranks with the same index on the data axis, so replicas shard the row as well.
"replica": as "shard", but only within one replica, because replicas have different contents. "private": only this
rank."""

Level = Literal["device", "host", "slow", "map", "rank"]
"""Where the bytes are stored. "device": in the memory of the device that computes. "host": in host memory. "slow": in a
slower level, such as a disk. "map": also in the slower level, but memory-mapped, so that the system caches as much as
memory allows. "rank": in the memory of another rank."""

Lifetime = Literal["run", "step", "pass", "use"]
"""How long the contents are valid. "run": as long as the trainer exists. "step": until the next update. "use": only
while an action uses them; such rows have no memory of their own, and programs plan it. "pass": as long as "step", but
the memory is allocated at the first use, when activations no longer need it, and freed at the update."""


class LedgerKey(NamedTuple):
    """The identity of a row. page: number of the page; None for a tensor outside pages. name: name of the optimizer
    slot or of the tensor."""

    kind: str
    page: int | None
    name: str = ""


@dataclass(frozen=True)
class LedgerRow:
    """One array of a rank.

    Attributes
    ----------
    key : identity of the row
    span : the elements that it holds, numbered within the page (or the tensor)
    times : number of arrays of this size that are stored one after another, such as partial sums
    inside, at : the row of which this row is a view, and the position of the view's first element in that row
    sharers : number of ranks of this machine that share the memory
    """

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
        """True if the row keeps its memory between programs, once allocated."""
        return self.lifetime != "use" and self.level != "slow"

    @property
    def is_freed_by_update(self) -> bool:
        """True if the memory of the row is freed by an update."""
        return self.lifetime == "pass"

    @property
    def is_saved(self) -> bool:
        return LEDGER_KINDS[self.key.kind].saved


class Ledger:
    """Rows in the order in which they were added, and the array of each row that is kept.

    slower: function from a row in a slower level to its array, which is valid as long as it is referenced.
    planned_bytes: kind of memory -> bytes of the initial rows. peak_bytes: kind of memory -> peak bytes so far.
    """

    def __init__(self, rows: Iterable[LedgerRow] = (), slower: Callable[[LedgerRow], Any] | None = None) -> None:
        self.rows = {row.key: row for row in rows}
        self.arrays: dict[LedgerKey, Any] = {}
        self.codec_error_norms: dict[tuple[str, int], list[float]] = {}
        """(axis, page) -> `error_norms` of `BoundCodec` in the last reduce, for reports"""
        self._slower = slower
        self.planned_bytes = self.count_bytes_by_kind()
        self.peak_bytes = Counter(self.planned_bytes)
        self._now = Counter(self.planned_bytes)

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(self.rows.values())

    def add_row(self, row: LedgerRow, array: Any) -> None:
        assert row.key not in self.rows, f"{row.key} is there already"
        self.rows[row.key], self.arrays[row.key] = row, array
        self._add_row_bytes(row, 1)

    def drop_row(self, key: LedgerKey) -> None:
        self._add_row_bytes(self.rows.pop(key), -1)
        self.arrays.pop(key, None)

    def _add_row_bytes(self, row: LedgerRow, sign: int) -> None:
        if row.is_kept and row.inside is None:
            kind = LEDGER_KINDS[row.key.kind].memory
            self._now[kind] += sign * (row.nbytes // row.sharers)
            self.peak_bytes[kind] = max(self.peak_bytes[kind], self._now[kind])

    def get_array(self, kind: str, page: int | None, name: str = "") -> Any:
        """Return the array of a row; None if there is no such row, or if programs plan its memory."""
        row = self.rows.get(LedgerKey(kind, page, name))
        return None if row is None else self._get_row_array(row)

    def iterate_saved_rows(self) -> Iterator[tuple[LedgerRow, Any]]:
        """Yield the rows of the train state with their arrays."""
        return ((row, self._get_row_array(row)) for row in self if row.is_saved)

    def _get_row_array(self, row: LedgerRow) -> Any:
        if row.level == "slow" and self._slower is not None:
            return self._slower(row)
        return self.arrays.get(row.key)

    def count_bytes_by_kind(self) -> dict[str, int]:
        """Return kind of memory -> bytes of all rows that have their own memory. Shared memory is divided by the number
        of sharers."""
        total: Counter[str] = Counter()
        for row in self:
            if row.is_kept and row.inside is None and row.level != "map":
                total[LEDGER_KINDS[row.key.kind].memory] += row.nbytes // row.sharers
        return dict(total)

    def count_bytes_freed_by_update(self, now: bool = False) -> int:
        """Return the bytes of the rows whose memory an update frees. This memory is never part of the arena's kept
        memory. now: count only rows that are allocated now."""
        return sum(row.nbytes for row in self if row.is_freed_by_update and (not now or row.key in self.arrays))

    def count_bytes_in_slow_level(self) -> dict[str, int]:
        """Return kind of memory -> bytes of all rows in a slower level."""
        total: Counter[str] = Counter()
        for row in self:
            if row.level in ("slow", "map") and row.inside is None:
                total[LEDGER_KINDS[row.key.kind].memory] += row.nbytes
        return dict(total)

    def clear(self) -> None:
        self.rows.clear()
        self.arrays.clear()


def list_ledger_rows(placement: Placement, windows: bool, sharers: int) -> Iterator[LedgerRow]:
    """Yield all rows of this rank. windows: whether the ranks of a machine share memory. sharers: number of ranks of
    this machine that share their full parameters, 0 if none do."""
    return map(placement.options.storage.assign_row_level, _list_memory_rows(placement, windows, sharers))


def _list_memory_rows(placement: Placement, windows: bool, sharers: int) -> Iterator[LedgerRow]:
    """Yield all rows of this rank, as if all of them were stored in memory."""
    formats, owner = placement.formats, placement.sync_policy.owner
    for page in placement.pages.values():
        yield from _list_parameter_rows(placement, page, sharers)
        if page.page.trainable:
            yield from _list_gradient_rows(placement, page, windows)
            for name in placement.optimizer.slots:
                kind = "average" if name == AVERAGE_SLOT else "slot"
                key = LedgerKey(kind, page.page.index, name)
                yield LedgerRow(key, placement.get_slot_dtype(name), page.own_range, owner)
            yield from placement.sync_policy.list_policy_rows(page)
            yield from _list_codec_rows(placement, page)
    for name, spec in placement.layout.statistic_specs.items():
        yield LedgerRow(LedgerKey("statistic", None, name), formats.statistics, ElementRange(0, spec.size), "all")


def _list_parameter_rows(placement: Placement, page: ShardedPage, sharers: int) -> Iterator[LedgerRow]:
    """Yield the rows of a page's parameters. The shard is a view of the full parameters if they are kept in the same
    dtype."""
    p = page.page.index
    dtype, gathered = placement.formats.master, placement.formats.compute
    kept = placement.keeps_full_parameters or sharers > 0
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
    """Yield the rows of a page's gradient. If the full gradient is kept, the reduced part is a view of it. In windows
    this view is at the part's own offset, because other ranks may be reading the rest. Otherwise it is at the front."""
    p, dtype, kept = page.page.index, placement.formats.gradients, placement.keeps_full_gradients
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
    """Yield the rows of the memory of a gradient's codecs."""
    p, axes, spans = page.page.index, placement.axes, {"shard": ElementRange(0, page.size), "replica": page.own_range}
    sizes = {axis: spans[axis].size for axis in axes.reduction_axes}
    for kept in placement.get_codec_route(p).iterate_memory(sizes, single_rank=axes.data.size == 1):
        key = LedgerKey("trace" if kept.reshard_rule == "reset" else "memory", p, kept.name)
        span = spans[kept.axis] if kept.reshard_rule == "sum" else ElementRange(0, kept.elements)
        yield LedgerRow(key, placement.formats.gradients, span, "private")


def make_local_gradient_row(placement: Placement, page: int) -> LedgerRow:
    """Return the row of a full gradient that stays on this rank until the update (`no_sync`), for placements whose full
    gradients otherwise live only while they are used."""
    span, times = ElementRange(0, placement.pages[page].size), placement.accumulation.times
    return LedgerRow(
        LedgerKey("grad", page, "local"), placement.formats.gradients, span, "private", "step", times=times
    )


def get_tensor_name(slot: str, parameter: str) -> str:
    """Return the name of a tensor of the train state: "m/0.weight" for optimizer slot "m", "0.weight" for the parameter
    itself (slot "")."""
    return f"{slot}/{parameter}" if slot else parameter


def get_saved_name_prefix(row: LedgerRow, replica: int) -> str:
    """Return the part of a saved tensor's name before the parameter: "m", or "replica1/m" for a row that each replica
    has separately."""
    name = LEDGER_KINDS[row.key.kind].prefix + row.key.name
    return add_replica_prefix(name, replica) if row.owner == "replica" else name


def add_replica_prefix(name: str, replica: int) -> str:
    """Return the first part of a saved tensor's name with the prefix of a replica in front, such as "replica1/m" for
    "m"."""
    return f"replica{replica}/{name}" if name else f"replica{replica}"


def list_saved_tensors(placement: Placement, replicas: int | None = None) -> dict[str, ParameterSpec]:
    """Return name -> spec of every tensor of the full model's train state, which is equal on all ranks: parameters and
    running statistics, then the optimizer state of the trained parameters. replicas: number of replicas that have their
    own state, if they train independently; None: the number in the mesh."""
    specs = placement.layout.specs
    trained = {name: spec for name, spec in specs.items() if spec.trainable}
    specs_by_name = {
        get_tensor_name(slot, name): spec
        for slot in placement.sync_policy.list_saved_name_prefixes(replicas)
        for name, spec in trained.items()
    }
    return specs | {name: spec for name, spec in specs_by_name.items() if spec.size}


def get_state_dtype(placement: Placement, name: str) -> np.dtype:
    """Return the dtype in which ranks hold a tensor of the train state."""
    formats = placement.formats
    if "/" in name and name not in placement.layout.specs:
        slots = [word for word in name.split("/")[:2] if word in placement.slot_formats]  # "m/...", or "replica1/m/..."
        return placement.get_slot_dtype(slots[0]) if slots else formats.master
    return formats.statistics if name in placement.layout.statistic_specs else formats.master
