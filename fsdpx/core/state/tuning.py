"""Measurements of a machine, kept in a cache folder: records of any kind, and the choice of BLAS library."""

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
from fsdpx.core.base.messages import ProgressCallback
from fsdpx.core.base.processor import read_cpuinfo_field
from fsdpx.core.base.safe_files import require_json_fields
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.backend import FakeCommunicator, FakeNodeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import find_message_backend
from fsdpx.core.state.units import GROUP_BYTES
from fsdpx.errors import warn

__all__ = [
    "Measurement",
    "Tuning",
    "agree_on_tuning",
    "describe_cache",
    "load_blas_measurement",
    "load_record",
    "write_record",
]

Record = TypeVar("Record")
_KINDS = {"key": dict, "value": dict, "date": str}
_refused: set[Path] = set()
"""Folders that could not be written."""


class Measurement(NamedTuple):
    """A record. key: everything that the value depends on. date: when it was measured, in UTC."""

    key: dict[str, Any]
    value: dict[str, Any]
    date: str


def load_record(kind: str, key: dict[str, Any], decode: Callable[[dict[str, Any]], Record]) -> Record | None:
    """Return the value of a record, as `decode` makes it; None if there is no record, or, with one warning, if the file
    is not ours or damaged: then it is measured again.

    decode: must raise ValueError or TypeError for a value that it cannot decode.
    """
    file = _get_record_path(kind, key)
    try:
        record = _read_record(file)
        if record is None:
            return None
        if record.key != key:
            raise ValueError("it is the record of something else")
        return decode(record.value)
    except (ValueError, TypeError) as error:
        safe_files.warn_file_ignored(error, file)
    return None


def write_record(kind: str, key: dict[str, Any], value: dict[str, Any]) -> None:
    """Write a record, completely or not at all. If the folder cannot be written, warn once; the next start measures
    again."""
    file, date = _get_record_path(kind, key), datetime.now(UTC).isoformat(timespec="minutes")
    text = json.dumps({"key": key, "date": date, "value": value}, indent=1)
    try:
        safe_files.make_folder(file.parent, private=False)
        safe_files.write_file(file, text, safe_files.READABLE)
    except OSError as error:
        _warn_cannot_cache(file.parent, error)


def describe_cache() -> str:
    """Return text for the end of a line that says where measurements are kept; "" if they cannot be, which a warning
    has said."""
    folder = environment.read_environment().cache
    return "" if folder in _refused else f"; what came of it is kept in {folder}"


def _warn_cannot_cache(folder: Path, error: OSError) -> None:
    if folder not in _refused:
        _refused.add(folder)
        warn(
            f"fsdpx: measurements cannot be kept in {folder} ({error.strerror or error}), so every start measures "
            "again: set FSDPX_CACHE to a folder that can be written",
        )


def _read_record(file: Path) -> Measurement | None:
    """Return the record in a file; None if it does not exist or is not ours. Raise ValueError for anything but a
    record."""
    data = safe_files.read_if_trusted(file)
    return None if data is None else Measurement(**require_json_fields(safe_files.parse_json(data), _KINDS))


def _get_record_path(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return environment.read_environment().cache / f"measured-{kind}-{digest}.json"


# -- the BLAS library --------------------------------------------------------------------------------------------------


T = TypeVar("T")

MIN_SPEEDUP = 1.25
"""A BLAS library is chosen only if it is this much faster than the default one."""
MULTI_RANK_GROUP_BYTES = 4 << 20
"""Bytes of a unit on several ranks: at least as many as measured to be best (docs/decisions/0010)."""


@dataclass(frozen=True)
class Tuning:
    """Choices that depend on the machine. blas: library of matrix products. threads: per rank. group_bytes: minimum
    bytes of a unit."""

    blas: str
    threads: int = 1
    group_bytes: int = GROUP_BYTES


def agree_on_tuning(
    world: Communicator, wanted: bool, xp: Any, count: ProgressCallback = lambda done, total: None
) -> Tuning:
    """Return the choices for a job, from an earlier measurement on this machine or a new one. Collective.

    Jobs of all sizes use the same library, which is set for the process, so that they get the same bits.

    Parameters
    ----------
    world : all ranks. Ranks that are threads do not measure; simulated ones use what real ones have measured
    wanted : whether to measure; otherwise the defaults. With FSDPX_TUNE=again measure again, once per process
    xp : the namespace of arrays
    count : callback of the progress: measurements done, total
    """
    imagined = isinstance(world, FakeCommunicator)
    measurable = imagined or (xp is np and (world.size == 1 or find_message_backend(world) is not None))
    if not wanted or not measurable:
        return Tuning(blas.get_selected_library(), parallel.get_threads())
    group_bytes = GROUP_BYTES if world.size == 1 else MULTI_RANK_GROUP_BYTES
    if imagined:
        known = load_record("blas", _make_tuning_key(), _parse_library)
        here = len(world.ranks_on_host) if isinstance(world, FakeNodeCommunicator) else 1
        threads = cores.count_threads_per_rank(here)
        return (
            Tuning(blas.get_selected_library(), parallel.get_threads())
            if known is None
            else Tuning(known, threads, group_bytes)
        )
    library = _agree_on_blas_library(world, count)
    if library != blas.get_selected_library():
        blas.select_library(library)
    return Tuning(library, parallel.get_threads(), group_bytes)


_remeasured: set[str] = set()
"""Machines that this process has measured."""


def load_blas_measurement() -> Measurement | None:
    """Return the measurement of this machine: the BLAS library that was chosen, and GFLOP/s of one thread by library;
    None if there is none."""
    key = _make_tuning_key()
    with suppress(ValueError, TypeError):
        record = _read_record(_get_record_path("blas", key))
        if record is not None and record.key == key:
            _parse_library(record.value)
            return record
    return None


def _agree_on_blas_library(world: Communicator, count: ProgressCallback) -> str:
    """Return the library that rank 0 knows or measures to be fastest: ranks would measure different times.
    Collective."""
    key = _make_tuning_key()
    anyway = environment.read_environment().retune and str(key) not in _remeasured
    record = _broadcast_from_rank_0(world, None if anyway or world.rank else load_record("blas", key, _parse_library))
    if record is None:
        rates = blas.measure_library_gflops(count)
        record = _broadcast_from_rank_0(world, _choose_fastest_library(rates, blas.get_selected_library()))
        _remeasured.add(str(key))
        if world.rank == 0:
            write_record("blas", key, {"library": record, "rates": rates})
    return record


def _choose_fastest_library(rates: dict[str, float], usual: str) -> str:
    """Return the default library, unless another is clearly faster."""
    best = max(rates, key=lambda name: rates[name])
    return best if rates[best] > MIN_SPEEDUP * rates.get(usual, 0.0) else usual


def _broadcast_from_rank_0(world: Communicator, own: T) -> T:
    value: T = own if world.size == 1 else world.all_gather_data(own)[0]
    return value


def _make_tuning_key() -> dict[str, Any]:
    """Return everything that the choice depends on."""
    return {
        "machine": platform.node(),
        "processor": read_cpuinfo_field("model name") or platform.processor(),
        "libraries": blas.describe_library_files(),
        "version": __version__,
    }


def _parse_library(value: dict[str, Any]) -> str:
    """Return the library that was chosen; raise ValueError for a value that no measurement writes."""
    library, rates = require_json_fields(value, {"library": str, "rates": dict}).values()
    if library not in {"numpy", *blas.describe_library_files()} or not all(
        type(rate) is float for rate in rates.values()
    ):
        raise ValueError("a choice in it is none that is measured")
    return str(library)
