"""Choices that are measured once on a machine and kept: records, and what is chosen by them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fsdpx import environment, files
from fsdpx.array import blas, cores, parallel
from fsdpx.comm.backend import FakeCommunicator, FakeNode
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.opening import carrier_of, node_of
from fsdpx.errors import printable, warn
from fsdpx.files import typed
from fsdpx.layout.units import GROUP_BYTES
from fsdpx.messages import Count
from fsdpx.native.image import cpuinfo
from fsdpx.version import __version__

if TYPE_CHECKING:
    from fsdpx.comm.node.node import NodeCommunicator

__all__ = [
    "BUSY", "Measurement", "Tuning", "bytes_text", "every", "kept", "load", "read", "stored", "table", "tune_for",
    "write",
]  # fmt: skip

def bytes_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.2f} {unit}"
        n /= 1024
    raise AssertionError


def table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [_row(row, widths) for row in rows]
    return printable("\n".join([lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])]))


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    """The first column to the left, the others to the right."""
    right = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *right])


Record = TypeVar("Record")
_KINDS = {"key": dict, "value": dict, "date": str, "load": (int, float)}
_refused: set[Path] = set()
"""Folders that could not be written."""


BUSY = 0.5
"""Processes that want to run, per core: from there on times are not those of the machine."""


class Measurement(NamedTuple):
    """key: all that the value depends on. date: when it was measured, in UTC. load: how busy the machine was."""

    key: dict[str, Any]
    value: dict[str, Any]
    date: str
    load: float


def load() -> float:
    """How many processes of the machine want to run, per core, in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def read(kind: str, key: dict[str, Any], made: Callable[[dict[str, Any]], Record], times: bool = True) -> Record | None:
    """The value, as `made` makes it; None if there is none, if the machine was busy when it was measured and is calm
    now, or, with one warning, if the file is not ours or damaged: then it is measured again.

    made: raises ValueError or TypeError for a value that it cannot be made of. times: whether other processes change
    it."""
    file = _file(kind, key)
    try:
        record = _of(file, kind)
        if record is None:
            return None
        if record.key != key:
            raise ValueError("it is the record of something else")
        return None if times and load() < BUSY <= record.load else made(record.value)
    except (ValueError, TypeError) as error:
        files.passed_over(error, file)
    return None


def every(kind: str) -> Iterator[Measurement]:
    """All records of a kind, those of other machines as well."""
    for file in sorted(environment.read().cache.glob(f"{kind}-*.json")):
        with suppress(ValueError):
            record = _of(file, kind)
            if record is not None:
                yield record


def write(kind: str, key: dict[str, Any], value: dict[str, Any], busy: float = 0.0) -> None:
    """Whole or not at all. A folder that cannot be written only means measuring again, as one warning says.

    busy: the load when it was measured."""
    file, date = _file(kind, key), datetime.now(UTC).isoformat(timespec="minutes")
    text = json.dumps({"key": key, "date": date, "load": round(busy, 2), kind: value}, indent=1)
    try:
        files.folder(file.parent, private=False)
        files.write(file, text, files.READABLE)
    except OSError as error:
        _refuse(file.parent, error)


def kept() -> str:
    """Where measurements are kept, as the end of a line; nothing if they cannot be, as a warning has said."""
    folder = environment.read().cache
    return "" if folder in _refused else f"; what came of it is kept in {folder}"


def _refuse(folder: Path, error: OSError) -> None:
    if folder not in _refused:
        _refused.add(folder)
        warn(
            f"fsdpx: measurements cannot be kept in {folder} ({error.strerror or error}), so every start measures "
            "again: set FSDPX_CACHE to a folder that can be written",
        )


def _of(file: Path, kind: str) -> Measurement | None:
    """None if it is not there or not ours; ValueError for anything but a record."""
    data = files.believed(file)
    if data is None:
        return None
    return Measurement(**files.typed(_renamed(files.parse_json(data), kind), _KINDS))


def _renamed(found: Any, kind: str) -> Any:
    """The value under its own name in place of its kind's; without a date or load, one that is unknown."""
    if type(found) is not dict:
        return found
    return {"date": "", "load": 0.0} | {"value" if name == kind else name: value for name, value in found.items()}


def _file(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return environment.read().cache / f"{kind}-{digest}.json"


T = TypeVar("T")

CLEARLY = 1.25
"""A BLAS library must be this much faster than the usual one to be taken."""
SEVERAL = 4 << 20
"""Bytes of a unit of several ranks: as many as were measured to be best, or more (docs/decisions/0010)."""


@dataclass(frozen=True)
class Tuning:
    """blas: library of matrix products. threads: per rank. group_bytes: of a unit. measured: the figures behind it, as
    text."""

    blas: str
    threads: int = 1
    group_bytes: int = GROUP_BYTES
    measured: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"BLAS {self.blas}, {self.threads} threads per rank, group_bytes {self.group_bytes:,}"


def tune_for(world: Communicator, wanted: bool, xp: Any, count: Count = lambda done, total: None) -> Tuning:
    """The choices for jobs like this one: known from before, or measured now. Collective.

    wanted: else the defaults, without measuring. Ranks that are threads have nothing to measure; imagined ones use
    what real ones have measured. With FSDPX_TUNE=again each kind of job is measured again, once in a process. The BLAS
    library is set for the process. count: is told how much is measured, of how much."""
    if wanted and isinstance(world, FakeCommunicator):
        return _kept(_key(world), times=False) or Tuning(blas.chosen(), parallel.threads())
    measurable = world.size == 1 or carrier_of(world) is not None
    if not wanted or xp is not np or not measurable:
        return Tuning(blas.chosen(), parallel.threads())
    key = _key(world)
    anyway = environment.read().retune and str(key) not in _remeasured
    known = _kept(key) if world.rank == 0 else None
    found = _of_rank_0(world, None if anyway else known)
    if found is None:
        last = _of_rank_0(world, known or _like(key))
        busy = load()
        found = _measure(world, count)
        if last is not None and not anyway:  # jobs of all sizes on a machine compute with one library: the same bits
            found = replace(found, blas=last.blas)
        _remeasured.add(str(key))
        if world.rank == 0:
            write("tuning", key, asdict(found), busy)
    if found.blas != blas.chosen():
        blas.choose(found.blas)
    return found


_remeasured: set[str] = set()
"""Kinds of jobs that this process has measured."""


def stored() -> list[tuple[dict[str, Any], Tuning, Measurement]]:
    """What was measured on this machine: what it is for, the choices, and the record, with when it was and how busy the
    machine was."""
    ours = {"machine": platform.node(), "choices": CHOICES}  # not those of versions that chose more
    here = (record for record in every("tuning") if ours.items() <= record.key.items())
    found = []
    for record in here:
        with suppress(ValueError):  # of another version, or damaged
            found.append((record.key, _tuning(record.value), record))
    return found


# -- measuring -----------------------------------------------------------------------------------------------------


def _measure(world: Communicator, count: Count) -> Tuning:
    rates = blas.measure(count)
    measured = {"GFLOP/s per thread": ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())}
    size = GROUP_BYTES if world.size == 1 else SEVERAL
    found = Tuning(_fastest(rates, blas.chosen()), parallel.threads(), size, measured)
    return _of_rank_0(world, found)  # ranks measure different times


def _fastest(rates: dict[str, float], usual: str) -> str:
    """The usual library, unless another is clearly faster."""
    best = max(rates, key=lambda name: rates[name])
    return best if rates[best] > CLEARLY * rates.get(usual, 0.0) else usual


def _of_rank_0(world: Communicator, own: T) -> T:
    found: T = own if world.size == 1 else world.all_gather_plain(own)[0]
    return found


# -- keeping -------------------------------------------------------------------------------------------------------


def _key(world: Communicator) -> dict[str, Any]:
    """All that a choice depends on. Imagined ranks have the key of real ones."""
    node, imagined = node_of(world), isinstance(world, FakeCommunicator)
    alone = "LocalCommunicator" if world.size == 1 else "MpiCommunicator"
    here = 1 if node is None else len(node.machine) if isinstance(node, FakeNode) else node.host.size
    return {
        "machine": platform.node(),
        "processor": cpuinfo("model name") or platform.processor(),
        "libraries": blas.present(),
        "version": __version__,
        "backend": _way(node) if node is not None else alone if imagined else type(world).__name__,
        "ranks": world.size,
        "ranks here": here,
        "threads": cores.threads_of(here) if imagined else parallel.threads(),
        "choices": CHOICES,
    }


def _way(node: NodeCommunicator | FakeNode) -> str:
    library = getattr(node, "library", "mpi")
    return "node" if library == "mpi" else f"node over {library}"


def _kept(key: dict[str, Any], times: bool = True) -> Tuning | None:
    return read("tuning", key, _tuning, times)


def _like(key: dict[str, Any]) -> Tuning | None:
    """The last choices of another kind of job on this machine, with these libraries."""
    alike = [
        (record.date, tuning)
        for other, tuning, record in stored()
        if all(other.get(name) == key[name] for name in ("processor", "libraries", "version"))
    ]
    return max(alike, key=lambda one: one[0])[1] if alike else None


def _tuning(value: dict[str, Any]) -> Tuning:
    """ValueError if it has other fields, or values that no measurement has."""
    found = Tuning(**typed(value, {one.name: type(getattr(_LIKE, one.name)) for one in fields(Tuning)}))
    texts = all(type(text) is str for text in found.measured.values())
    known = found.blas in {"numpy", *blas.present()}
    if not (texts and known and 0 < found.threads < 1 << 16 and 0 < found.group_bytes < 1 << 62):
        raise ValueError("a choice in it is none that is measured")
    return found


_LIKE = Tuning("")
CHOICES = [one.name for one in fields(Tuning)]
