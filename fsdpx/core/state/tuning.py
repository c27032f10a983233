"""Machine measurements, their cache on disk, and the choice of the fastest BLAS library."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fsdpx.core.array import blas, cores, parallel
from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.messages import ProgressCallback, format_bytes, format_count
from fsdpx.core.base.processor import read_cpuinfo_field
from fsdpx.core.base.safe_files import require_json_fields
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.backend import FakeCommunicator, FakeNodeCommunicator
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import unwrap_message_backend
from fsdpx.core.state.units import GROUP_BYTES
from fsdpx.errors import warn

__all__ = [
    "Measurement",
    "Tuning",
    "agree_on_tuning",
    "describe_cache_location",
    "load_blas_measurement",
    "load_record",
    "write_record",
]

Record = TypeVar("Record")
_KINDS = {"key": dict, "value": dict, "date": str}
_refused: set[Path] = set()
"""Folders that turned out not to be writable."""


class Measurement(NamedTuple):
    """A cached measurement.

    Attributes
    ----------
    key : everything that the value depends on, such as the processor
    value : the result
    date : date of the measurement, in UTC
    """

    key: dict[str, Any]
    value: dict[str, Any]
    date: str


def load_record(kind: str, key: dict[str, Any], decode: Callable[[dict[str, Any]], Record]) -> Record | None:
    """Return the cached measurement of this kind (such as "blas") with this key, or None if there is none. If its file
    is damaged or not trusted, issue a warning once and return None. The caller must then measure again.

    `decode` converts the stored value to the result. It must raise ValueError or TypeError if the value is invalid."""
    file = _get_record_path(kind, key)
    try:
        record = _read_record(file)
        if record is None:
            return None
        if record.key != key:
            raise ValueError("it is the record of another measurement")
        return decode(record.value)
    except (ValueError, TypeError) as error:
        safe_files.warn_file_ignored(error, file)
    return None


def write_record(kind: str, key: dict[str, Any], value: dict[str, Any]) -> None:
    """Atomically write a measurement to the cache. If the folder is not writable, issue a warning once; the next
    process must then measure again. `kind` names the measurement, such as "blas", and `key` holds everything that its
    value depends on."""
    file, date = _get_record_path(kind, key), datetime.now(UTC).isoformat(timespec="minutes")
    text = json.dumps({"key": key, "date": date, "value": value}, indent=1)
    try:
        safe_files.make_folder(file.parent, private=False)
        safe_files.write_file(file, text, safe_files.READABLE)
    except OSError as error:
        _warn_cannot_cache(file.parent, error)


def describe_cache_location() -> str:
    """Return a phrase that tells the user where measurements are cached, for appending to a message. Return "" if they
    cannot be cached."""
    folder = environment.read_environment().cache
    return "" if folder in _refused else f"; the result is kept in {folder}"


def _warn_cannot_cache(folder: Path, error: OSError) -> None:
    if folder not in _refused:
        _refused.add(folder)
        warn(
            f"fsdpx: measurements and compiled kernels cannot be kept in {folder} ({error.strerror or error}), so "
            "every start measures and compiles again, which takes seconds to minutes: set FSDPX_CACHE to a folder that "
            "can be written",
        )


def _read_record(file: Path) -> Measurement | None:
    """Return the measurement in a file, or None if the file does not exist or is not trusted. Raise ValueError if the
    file does not contain a measurement."""
    data = safe_files.read_if_trusted(file)
    return None if data is None else Measurement(**require_json_fields(safe_files.parse_json(data), _KINDS))


def _get_record_path(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return environment.read_environment().cache / f"measured-{kind}-{digest}.json"


T = TypeVar("T")

MIN_SPEEDUP = 1.25
"""Another BLAS library is chosen only if it is faster than the default library by more than this factor."""
MULTI_RANK_GROUP_BYTES = 4 << 20
"""Minimum number of bytes of parameters in a unit (group of layers) if there are several ranks, based on measurements
(docs/decisions/0010)."""


@dataclass(frozen=True)
class Tuning:
    """Choices that depend on the machine.

    Attributes
    ----------
    blas : library for matrix products
    threads : number of threads per rank
    group_bytes : minimum number of bytes of parameters in a unit (layers gathered together)
    """

    blas: str
    threads: int = 1
    group_bytes: int = GROUP_BYTES

    def __str__(self) -> str:
        threads = format_count(self.threads, "thread")
        return f"BLAS {self.blas}, {threads} per rank, units of {format_bytes(self.group_bytes)}"


def agree_on_tuning(
    world: Communicator, wanted: bool, xp: Any, count: ProgressCallback = lambda done, total: None
) -> Tuning:
    """Return the machine-dependent choices for a job, based on a cached or a new measurement. Collective.

    The BLAS library is selected for the whole process. Jobs with any number of ranks use the same library, so that
    their results are bitwise identical.

    Parameters
    ----------
    world : communicator of all ranks. Ranks that run as threads do not measure. Simulated ranks use a measurement that
        real ranks have cached
    wanted : whether to use a measurement; if False, return the defaults. If FSDPX_TUNE=again, each process measures
        once, even if a measurement is cached
    xp : array module, such as `numpy`
    count : progress callback (measurements done, total)
    """
    imagined = isinstance(world, FakeCommunicator)
    measurable = imagined or (xp is np and (world.size == 1 or unwrap_message_backend(world) is not None))
    if not wanted or not measurable:
        return Tuning(blas.get_selected_library(), parallel.get_threads())
    group_bytes = GROUP_BYTES if world.size == 1 else MULTI_RANK_GROUP_BYTES
    if imagined:
        known = load_record("blas", _make_blas_choice_cache_key(), _parse_library_record)
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
"""Keys of the measurements that this process has made."""


def load_blas_measurement() -> Measurement | None:
    """Return the cached BLAS measurement for this machine: the chosen library, and the GFLOP/s of each library on one
    thread. Return None if there is no measurement."""
    key = _make_blas_choice_cache_key()
    with suppress(ValueError, TypeError):
        record = _read_record(_get_record_path("blas", key))
        if record is not None and record.key == key:
            _parse_library_record(record.value)
            return record
    return None


def _agree_on_blas_library(world: Communicator, count: ProgressCallback) -> str:
    """Return the BLAS library that was fastest in rank 0's measurement. If rank 0 has no cached measurement, all ranks
    measure now. Only rank 0's measurement is used, because measured times differ between ranks. Collective."""
    key = _make_blas_choice_cache_key()
    anyway = environment.read_environment().retune and str(key) not in _remeasured
    known = None if anyway or world.rank else load_record("blas", key, _parse_library_record)
    record = _broadcast_from_rank_0(world, known)
    if record is None:
        rates = blas.measure_gflops_of_each_library(count)
        record = _broadcast_from_rank_0(world, _choose_fastest_library(rates, blas.get_selected_library()))
        _remeasured.add(str(key))
        if world.rank == 0:
            write_record("blas", key, {"library": record, "rates": rates})
    return record


def _choose_fastest_library(rates: dict[str, float], usual: str) -> str:
    """Return the fastest library if it is clearly faster than the default `usual`; otherwise return `usual`. `rates`
    holds the GFLOP/s of each library."""
    best = max(rates, key=lambda name: rates[name])
    return best if rates[best] > MIN_SPEEDUP * rates.get(usual, 0.0) else usual


def _broadcast_from_rank_0(world: Communicator, own: T) -> T:
    value: T = own if world.size == 1 else world.all_gather_value(own)[0]
    return value


def _make_blas_choice_cache_key() -> dict[str, Any]:
    """Return the cache key of the measurement: everything that determines which BLAS library is fastest."""
    return {
        "machine": platform.node(),
        "processor": read_cpuinfo_field("model name") or platform.processor(),
        "libraries": blas.describe_library_files(),
        "version": __version__,
    }


def _parse_library_record(value: dict[str, Any]) -> str:
    """Return the library that was chosen in a cached measurement. Raise ValueError if `value` is not a valid
    measurement."""
    library, rates = require_json_fields(value, {"library": str, "rates": dict}).values()
    if library not in {"numpy", *blas.describe_library_files()} or not all(
        type(rate) is float for rate in rates.values()
    ):
        raise ValueError("it names a library that is not measured")
    return str(library)
