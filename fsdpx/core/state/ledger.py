"""The ledger: a table with one row for each array that a rank holds. A row describes what the array contains and where
it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.state.flat_parameters import ElementRange, ShardedPage
from fsdpx.core.state.placement import Placement
from fsdpx.nn.layer import ParameterSpec
from fsdpx.optim.optimizer import AVERAGE_SLOT

__all__ = [
    "LEDGER_KINDS", "Ledger", "LedgerKey", "LedgerKind", "LedgerRow", "Level", "Lifetime", "add_replica_prefix",
    "get_dtype_of_checkpoint_tensor", "get_saved_name_prefix", "list_checkpoint_tensors", "list_ledger_rows",
    "make_checkpoint_name", "make_unsharded_gradient_row",
]  # fmt: skip


@dataclass(frozen=True)
class LedgerKind:
    """A kind of array, such as master parameters or gradients.

    Attributes
    ----------
    memory : heading for arrays of this kind in memory reports
    slot : kind of slot (named value of a program) through which programs access arrays of this kind; "" if programs do
        not access them
    saved : whether arrays of this kind are stored in checkpoints, moved by resharding and copied for recovery; all
        arrays that are not saved can be recomputed from the saved arrays
    prefix : prefix of the arrays' names in checkpoints
    """

    memory: str
    slot: str = ""
    saved: bool = False
    prefix: str = ""


LEDGER_KINDS = {
    # parameter shards that the optimizer updates
    "master": LedgerKind("parameters", "shard", saved=True),
    # gathered parameters, in the dtype in which layers compute
    "full": LedgerKind("parameters"),
    # unsharded gradients, accumulated by the backward pass
    "grad": LedgerKind("gradients"),
    # gradient shards, summed over ranks
    "part": LedgerKind("gradients"),
    # optimizer state, such as Adam's moments
    "slot": LedgerKind("optimizer", "slots", saved=True),
    # error-feedback residuals of compression codecs
    "memory": LedgerKind("codec memory", "memory", saved=True),
    # other state of compression codecs, which is set to zero after loading or resharding
    "trace": LedgerKind("codec memory", "memory"),
    # running statistics of layers such as BatchNorm
    "statistic": LedgerKind("state", saved=True),
    # averages of parameters over time (EMA, SWA), updated by the optimizer
    "average": LedgerKind("averages", "slots", saved=True),
}
"""Descriptions of the kinds of arrays, by name. Extensions add kinds of their own."""

Owner = Literal["shard", "all", "data", "replica", "private"]
"""The ranks that hold the same elements. "shard": all ranks with the same index on the shard axis. "all": all ranks; if
the tensor is sharded over an axis other than the shard axis, only the ranks with the same index on that axis. "data":
all ranks with the same index on the data axis; such an array is sharded over the replicas too. "replica": like "shard",
but only within one replica, because each replica has its own values. "private": only this rank."""

Level = Literal["device", "host", "slow", "map", "rank"]
"""Where an array is stored. "device": in the memory of the device that computes. "host": in host memory. "slow": at a
slower storage level, such as a disk. "map": like "slow", but memory-mapped, so that the operating system caches as much
of it as memory allows. "rank": in the memory of another rank."""

Lifetime = Literal["run", "step", "pass", "use"]
"""How long the contents of an array are valid. "run": as long as the trainer exists. "step": until the next update.
"use": only while an action uses them; these arrays have no permanent memory, and programs plan their memory. "pass": as
long as "step", but the array is allocated at first use, in memory that activations no longer need, and freed by the
update."""


class LedgerKey(NamedTuple):
    """The identity of a row of the ledger (table of a rank's arrays).

    Attributes
    ----------
    kind : name of the row's `LedgerKind`, such as "master" or "grad"
    page : index of the page (flat parameter buffer); None for a tensor that does not belong to a page
    name : name of the tensor, or name of the array within a page, such as the optimizer slot "m"
    """

    kind: str
    page: int | None
    name: str = ""


@dataclass(frozen=True)
class LedgerRow:
    """Description of one array of a rank: its elements, dtype and storage.

    Attributes
    ----------
    key : identity of the row
    span : the elements that the array holds, as indices into the page (flat parameter buffer) or into the tensor
    times : number of consecutive copies of this range of elements in the array, for example for several partial sums
    inside, at : for a view, the key of the row that owns the memory, and the offset of the view in this memory, in
        elements
    sharers : number of ranks of this host that share the memory
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
        """True if the array, once allocated, stays allocated between programs."""
        return self.lifetime != "use" and self.level != "slow"

    @property
    def is_freed_by_update(self) -> bool:
        """True if each update frees the array's memory."""
        return self.lifetime == "pass"

    @property
    def is_saved(self) -> bool:
        return LEDGER_KINDS[self.key.kind].saved


class Ledger:
    """Table of a rank's arrays. It has one row for each array, in the order in which rows were added, and holds the
    arrays that are kept in memory.

    Parameters
    ----------
    rows : the initial rows
    slower : function that loads the array of a row that is not kept in memory, for example from disk; the array remains
        valid while it is referenced

    Attributes
    ----------
    planned_bytes : total bytes of the initial rows, keyed by kind of memory, such as "gradients"
    peak_bytes : maximum of the total bytes so far, keyed by kind of memory
    """

    def __init__(self, rows: Iterable[LedgerRow] = (), slower: Callable[[LedgerRow], Any] | None = None) -> None:
        self.rows = {row.key: row for row in rows}
        self.arrays: dict[LedgerKey, Any] = {}
        self.codec_error_norms: dict[tuple[str, int], list[float]] = {}
        """The `error_norms` of each `BoundCodec` in the last reduction, keyed by (axis, page). They are used in
        reports."""
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
        """Return the array of a row. Return None if the row does not exist, or if the ledger does not hold the array
        because programs manage its memory."""
        row = self.rows.get(LedgerKey(kind, page, name))
        return None if row is None else self._get_row_array(row)

    def iterate_saved_rows(self) -> Iterator[tuple[LedgerRow, Any]]:
        """Yield (row, array) for all arrays that checkpoints store."""
        return ((row, self._get_row_array(row)) for row in self if row.is_saved)

    def _get_row_array(self, row: LedgerRow) -> Any:
        if row.level == "slow" and self._slower is not None:
            return self._slower(row)
        return self.arrays.get(row.key)

    def count_bytes_by_kind(self) -> dict[str, int]:
        """Return the number of bytes of all arrays kept in memory, as a dict keyed by kind of memory, such as
        "gradients". Views are not counted, and the size of shared memory is divided by the number of ranks that share
        it."""
        total: Counter[str] = Counter()
        for row in self:
            if row.is_kept and row.inside is None and row.level != "map":
                total[LEDGER_KINDS[row.key.kind].memory] += row.nbytes // row.sharers
        return dict(total)

    def count_bytes_freed_by_update(self, now: bool = False) -> int:
        """Return the number of bytes of the arrays that each update frees. If `now` is true, count only arrays that are
        currently allocated."""
        return sum(row.nbytes for row in self if row.is_freed_by_update and (not now or row.key in self.arrays))

    def count_offloaded_bytes_by_kind(self) -> dict[str, int]:
        """Return the number of bytes of all offloaded arrays (for example, arrays on disk), as a dict keyed by kind of
        memory, such as "gradients"."""
        total: Counter[str] = Counter()
        for row in self:
            if row.level in ("slow", "map") and row.inside is None:
                total[LEDGER_KINDS[row.key.kind].memory] += row.nbytes
        return dict(total)

    def clear(self) -> None:
        self.rows.clear()
        self.arrays.clear()


def list_ledger_rows(placement: Placement, windows: bool, sharers: int) -> Iterator[LedgerRow]:
    """Yield one row of the ledger (table of a rank's arrays) for each array of this rank. `windows` is True if the
    ranks of a host share memory. `sharers` is the number of ranks that share one copy of the full parameters, or 0 if
    ranks do not share them."""
    return map(
        placement.options.storage.assign_row_level, _iterate_rows_as_if_not_offloaded(placement, windows, sharers)
    )


def _iterate_rows_as_if_not_offloaded(placement: Placement, windows: bool, sharers: int) -> Iterator[LedgerRow]:
    """Yield one row of the ledger (table of a rank's arrays) for each array of this rank, as if no array were
    offloaded."""
    formats, owner = placement.formats, placement.sync_policy.owner
    for page in placement.pages.values():
        yield from _list_parameter_rows_of_page(placement, page, sharers)
        if page.page.trainable:
            yield from _list_gradient_rows(placement, page, windows)
            for name in placement.optimizer.slots:
                kind = "average" if name == AVERAGE_SLOT else "slot"
                key = LedgerKey(kind, page.page.index, name)
                yield LedgerRow(key, placement.get_slot_dtype(name), page.own_range, owner)
            yield from placement.sync_policy.list_policy_ledger_rows(page)
            yield from _list_codec_rows(placement, page)
    for name, spec in placement.layout.statistic_specs.items():
        yield LedgerRow(LedgerKey("statistic", None, name), formats.statistics, ElementRange(0, spec.size), "all")


def _list_parameter_rows_of_page(placement: Placement, page: ShardedPage, sharers: int) -> Iterator[LedgerRow]:
    """Yield two rows for a page (flat parameter buffer): one for its full parameters, and one for this rank's parameter
    shard. If the full parameters are kept between uses and have the same dtype as the shard, the shard is a view of
    them."""
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
    """Yield two rows for a page (flat parameter buffer): one for its full gradient, and one for this rank's shard of
    the reduced gradient. If the full gradient is kept, the shard is a view of it. In private memory, the view begins at
    the start of the full gradient. In shared memory, it begins at the shard's own offset, because other ranks may be
    reading the other shards."""
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
    """Yield one row for each array that compression codecs keep between steps for the gradient of a page (flat
    parameter buffer), such as an error-feedback residual."""
    p, axes, spans = page.page.index, placement.axes, {"shard": ElementRange(0, page.size), "replica": page.own_range}
    sizes = {axis: spans[axis].size for axis in axes.reduction_axes}
    for kept in placement.get_codec_route(p).iterate_memory(sizes, single_rank=axes.data.size == 1):
        key = LedgerKey("trace" if kept.reshard_rule == "reset" else "memory", p, kept.name)
        span = spans[kept.axis] if kept.reshard_rule == "sum" else ElementRange(0, kept.elements)
        yield LedgerRow(key, placement.formats.gradients, span, "private")


def make_unsharded_gradient_row(placement: Placement, page: int) -> LedgerRow:
    """Return the ledger row for an unsharded gradient that `no_sync` keeps on this rank until the update. Only
    shardings that would otherwise free unsharded gradients after each use need this row."""
    span, times = ElementRange(0, placement.pages[page].size), placement.accumulation.times
    return LedgerRow(
        LedgerKey("grad", page, "local"), placement.formats.gradients, span, "private", "step", times=times
    )


def make_checkpoint_name(slot: str, parameter: str) -> str:
    """Return the name of a tensor in a checkpoint. For the parameter "0.weight", this is "m/0.weight" for the optimizer
    slot "m", and "0.weight" for the parameter itself (slot "")."""
    return f"{slot}/{parameter}" if slot else parameter


def get_saved_name_prefix(row: LedgerRow, replica: int) -> str:
    """Return the part of an array's checkpoint name that precedes the parameter name. For the optimizer slot "m", this
    is "m", or "replica1/m" if each replica has its own array."""
    name = LEDGER_KINDS[row.key.kind].prefix + row.key.name
    return add_replica_prefix(name, replica) if row.owner == "replica" else name


def add_replica_prefix(name: str, replica: int) -> str:
    """Return a checkpoint name prefixed with the number of a replica, such as "replica1/m" for "m"."""
    return f"replica{replica}/{name}" if name else f"replica{replica}"


def list_checkpoint_tensors(placement: Placement, replicas: int | None = None) -> dict[str, ParameterSpec]:
    """Return the specs of all tensors that a checkpoint of the full model stores, as a dict keyed by name. The order is
    the same on all ranks: parameters and running statistics, then the optimizer state of trained parameters.

    If replicas train independently, each replica has its own optimizer state, and `replicas` is their number. If
    `replicas` is None, use the number of replicas in the mesh."""
    specs = placement.layout.specs
    trained = {name: spec for name, spec in specs.items() if spec.trainable}
    specs_by_name = {
        make_checkpoint_name(slot, name): spec
        for slot in placement.sync_policy.list_saved_name_prefixes(replicas)
        for name, spec in trained.items()
    }
    return specs | {name: spec for name, spec in specs_by_name.items() if spec.size}


def get_dtype_of_checkpoint_tensor(placement: Placement, name: str) -> np.dtype:
    """Return the dtype in which ranks keep the state that a checkpoint stores as tensor `name`."""
    formats = placement.formats
    if "/" in name and name not in placement.layout.specs:
        # names are "m/PARAMETER", or "replica1/m/PARAMETER" if each replica has its own state
        slots = [word for word in name.split("/")[:2] if word in placement.slot_formats]
        return placement.get_slot_dtype(slots[0]) if slots else formats.master
    return formats.statistics if name in placement.layout.statistic_specs else formats.master
