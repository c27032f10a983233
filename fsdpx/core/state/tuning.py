"""What is measured once on a machine and kept in its cache: records of any kind, and the BLAS library chosen by one."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fsdpx.core.array import blas, cores, parallel
from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.messages import Count
from fsdpx.core.base.processor import cpuinfo
from fsdpx.core.base.safe_files import typed
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.backend import FakeCommunicator, FakeNode
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import carrier_of
from fsdpx.core.state.units import GROUP_BYTES
from fsdpx.errors import warn

__all__ = ["Measurement", "Tuning", "kept", "read", "stored", "tune_for", "write"]

Record = TypeVar("Record")
_KINDS = {"key": dict, "value": dict, "date": str}
_refused: set[Path] = set()
"""Folders that could not be written."""


class Measurement(NamedTuple):
    """key: all that the value depends on. date: when it was measured, in UTC."""

    key: dict[str, Any]
    value: dict[str, Any]
    date: str


def read(kind: str, key: dict[str, Any], made: Callable[[dict[str, Any]], Record]) -> Record | None:
    """The value, as `made` makes it; None if there is none, or, with one warning, if the file is not ours or damaged:
    then it is measured again.

    made: raises ValueError or TypeError for a value that it cannot be made of."""
    file = _file(kind, key)
    try:
        record = _record(file)
        if record is None:
            return None
        if record.key != key:
            raise ValueError("it is the record of something else")
        return made(record.value)
    except (ValueError, TypeError) as error:
        safe_files.passed_over(error, file)
    return None


def write(kind: str, key: dict[str, Any], value: dict[str, Any]) -> None:
    """Whole or not at all. A folder that cannot be written only means measuring again, as one warning says."""
    file, date = _file(kind, key), datetime.now(UTC).isoformat(timespec="minutes")
    text = json.dumps({"key": key, "date": date, "value": value}, indent=1)
    try:
        safe_files.folder(file.parent, private=False)
        safe_files.write(file, text, safe_files.READABLE)
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


def _record(file: Path) -> Measurement | None:
    """None if it is not there or not ours; ValueError for anything but a record."""
    data = safe_files.believed(file)
    return None if data is None else Measurement(**typed(safe_files.parse_json(data), _KINDS))


def _file(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return environment.read().cache / f"measured-{kind}-{digest}.json"


# -- the BLAS library --------------------------------------------------------------------------------------------------


T = TypeVar("T")

CLEARLY = 1.25
"""A BLAS library must be this much faster than the usual one to be taken."""
SEVERAL = 4 << 20
"""Bytes of a unit of several ranks: as many as were measured to be best, or more (docs/decisions/0010)."""


@dataclass(frozen=True)
class Tuning:
    """blas: library of matrix products. threads: per rank. group_bytes: of a unit."""

    blas: str
    threads: int = 1
    group_bytes: int = GROUP_BYTES


def tune_for(world: Communicator, wanted: bool, xp: Any, count: Count = lambda done, total: None) -> Tuning:
    """The choices for a job: by what was measured on this machine before, or is now. Collective.

    Jobs of all sizes compute with one library, which is set for the process, so that they have the same bits.

    Parameters
    ----------
    world : ranks that are threads have nothing to measure; imagined ones use what real ones have measured
    wanted : else the defaults, without measuring. With FSDPX_TUNE=again it is measured again, once in a process
    xp : the namespace of arrays
    count : is told how much is measured, of how much
    """
    imagined = isinstance(world, FakeCommunicator)
    measurable = imagined or (xp is np and (world.size == 1 or carrier_of(world) is not None))
    if not wanted or not measurable:
        return Tuning(blas.chosen(), parallel.threads())
    group_bytes = GROUP_BYTES if world.size == 1 else SEVERAL
    if imagined:
        known = read("blas", _key(), _library)
        here = len(world.machine) if isinstance(world, FakeNode) else 1
        threads = cores.threads_of(here)
        return Tuning(blas.chosen(), parallel.threads()) if known is None else Tuning(known, threads, group_bytes)
    library = _agreed_library(world, count)
    if library != blas.chosen():
        blas.choose(library)
    return Tuning(library, parallel.threads(), group_bytes)


_remeasured: set[str] = set()
"""Machines that this process has measured."""


def stored() -> Measurement | None:
    """What was measured on this machine: the BLAS library that was taken, and GFLOP/s of one thread by library."""
    key = _key()
    with suppress(ValueError, TypeError):
        found = _record(_file("blas", key))
        if found is not None and found.key == key:
            _library(found.value)
            return found
    return None


def _agreed_library(world: Communicator, count: Count) -> str:
    """The library that rank 0 knows or measures to be best: each rank measures other times."""
    key = _key()
    anyway = environment.read().retune and str(key) not in _remeasured
    found = _of_rank_0(world, None if anyway or world.rank else read("blas", key, _library))
    if found is None:
        rates = blas.measure(count)
        found = _of_rank_0(world, _fastest(rates, blas.chosen()))
        _remeasured.add(str(key))
        if world.rank == 0:
            write("blas", key, {"library": found, "rates": rates})
    return found


def _fastest(rates: dict[str, float], usual: str) -> str:
    """The usual library, unless another is clearly faster."""
    best = max(rates, key=lambda name: rates[name])
    return best if rates[best] > CLEARLY * rates.get(usual, 0.0) else usual


def _of_rank_0(world: Communicator, own: T) -> T:
    found: T = own if world.size == 1 else world.all_gather_plain(own)[0]
    return found


def _key() -> dict[str, Any]:
    """All that the choice depends on."""
    return {
        "machine": platform.node(),
        "processor": cpuinfo("model name") or platform.processor(),
        "libraries": blas.present(),
        "version": __version__,
    }


def _library(value: dict[str, Any]) -> str:
    """The library that was taken; ValueError for a value that no measurement has."""
    found, rates = typed(value, {"library": str, "rates": dict}).values()
    if found not in {"numpy", *blas.present()} or not all(type(rate) is float for rate in rates.values()):
        raise ValueError("a choice in it is none that is measured")
    return str(found)
