"""What a rank keeps on disk between uses: how fast that is, records, each the rows that a slot of programs sees, and
activations."""

from __future__ import annotations

import math
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.arena import data_pointer
from fsdpx.core.array.shapes.array import ShapeArray, Storage, find_storage
from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.safe_files import check_fields
from fsdpx.core.comm.communicator import COMPLETED, Communicator, Handle
from fsdpx.core.program import Slot
from fsdpx.core.state import tuning
from fsdpx.core.state.ledger import LEDGER_KINDS, LedgerKey, LedgerRow
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.storage import Standing, StateStorage
from fsdpx.errors import ConfigError, OffloadError
from fsdpx.ext.offload.records import SPILLED

__all__ = [
    "ALIGN_BYTES",
    "DiskFile",
    "DiskRates",
    "DiskStorage",
    "SpilledValue",
    "find_storage",
    "get_disk_rates",
    "lock_folder",
    "open_disk",
    "take_apart",
]

MEASURED_BYTES = 64 << 20
"""How many bytes are written and read to measure a disk."""


class DiskRates(NamedTuple):
    """Bytes per second."""

    read: float
    written: float


def get_disk_rates(folder: Path, direct: bool | None) -> DiskRates | None:
    """The rates of a folder's disk, in pieces as large as those that rows are moved in; None where they cannot be
    known: the folder is missing or full, or nothing is to be measured (FSDPX_TUNE=0)."""
    if not folder.is_dir():
        return None
    settings = environment.read_environment()
    key = {"machine": platform.node(), "device": folder.stat().st_dev, "direct": direct is not False}
    known = tuning.load_record("disk", key, _parse_record)
    if known is not None and not settings.retune:
        return known
    if not settings.tune:
        return None
    try:
        found = _measure_rates(folder, direct)
    except OffloadError:
        return None
    tuning.write_record("disk", key, found._asdict())
    return found


def _parse_record(value: dict[str, Any]) -> DiskRates:
    found = DiskRates(**check_fields(value, {"read": float, "written": float}))
    if not all(0 < rate < math.inf for rate in found):
        raise ValueError("a rate is no number of bytes per second")
    return found


def _measure_rates(folder: Path, direct: bool | None) -> DiskRates:
    memory = np.zeros(MEASURED_BYTES + ALIGN_BYTES, np.uint8)
    start = -data_pointer(memory) % ALIGN_BYTES
    data, file = memory[start : start + MEASURED_BYTES], DiskFile(folder, MEASURED_BYTES, direct)
    try:
        file.start_write(0, data).wait()  # the first time a disk sets blocks aside
        seconds = []
        for move in (file.start_read, file.start_write):
            begin = perf_counter()
            move(0, data).wait()
            seconds.append(perf_counter() - begin)
        return DiskRates(*(MEASURED_BYTES / one for one in seconds))
    finally:
        file.close()


ALIGN_BYTES = mmap.ALLOCATIONGRANULARITY
"""Bytes: where parts of the file begin, and memory that it is read into. Direct I/O and maps ask for it."""
PIECE_BYTES = 8 << 20
"""Bytes of one read or write; large enough for a disk's full rate (docs/decisions/0017-state-on-disk.md)."""
THREADS = 2
"""Pieces under way at a time."""
LOCK_NAME = "fsdpx.lock"


class DiskTransfer:
    """Reads or writes under way, piece by piece: a handle as that of a message."""

    __slots__ = ("left",)

    def __init__(self, left: Sequence[Future[None]]) -> None:
        self.left = left

    def test(self) -> bool:
        return all(piece.done() for piece in self.left)

    def wait(self) -> None:
        for piece in self.left:
            piece.result()


class Stopwatch:
    """seconds: in which at least one of several threads was at work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._at_work, self._since, self._lock = 0, 0.0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._at_work:
                self._since = perf_counter()
            self._at_work += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._at_work -= 1
            if not self._at_work:
                self.seconds += perf_counter() - self._since


class DiskFile:
    """`nbytes` bytes on disk, there from the start: a disk that is full is found then.

    direct: past the page cache; None: if the file system can. watch: of reads and writes."""

    def __init__(self, folder: Path, nbytes: int, direct: bool | None) -> None:
        self.folder, self.nbytes, self.watch = folder, nbytes, Stopwatch()
        self._fd, self.direct = _open_unnamed(folder, direct)
        try:
            _reserve_space(self._fd, folder, 0, nbytes)
        except OffloadError:
            os.close(self._fd)
            raise
        self._end = weakref.finalize(self, os.close, self._fd)  # reads and writes under way hold this object
        self._end.atexit = False
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fsdpx disk")
        all_run = threading.Barrier(THREADS)  # now, not in a step for which there may be just enough memory
        for waits in [self._threads.submit(all_run.wait) for _ in range(THREADS)]:
            waits.result()

    def start_read(self, at: int, data: Any) -> DiskTransfer:
        """Fill `data`, bytes in memory, from byte `at` of the file on."""
        return self._start_transfer(self._read_piece, at, data)

    def start_write(self, at: int, data: Any) -> DiskTransfer:
        """Write `data`, bytes in memory, from byte `at` of the file on."""
        return self._start_transfer(self._write_piece, at, data)

    def _start_transfer(self, move: Callable[[int, Any], None], at: int, data: Any) -> DiskTransfer:
        starts = range(0, len(data), PIECE_BYTES)
        return DiskTransfer([self._threads.submit(move, at + i, data[i : i + PIECE_BYTES]) for i in starts])

    def _read_piece(self, at: int, data: Any) -> None:
        self._move_all(lambda view, at: os.preadv(self._fd, [view], at), at, data, "read")

    def extend_file(self, nbytes: int) -> int:
        """Make the file longer; where the new part begins."""
        self.nbytes += _reserve_space(self._fd, self.folder, self.nbytes, nbytes)
        return self.nbytes - nbytes

    def _write_piece(self, at: int, data: Any) -> None:
        if self.direct and (data.ctypes.data % ALIGN_BYTES or len(data) % ALIGN_BYTES):
            data = self._copy_aligned(data)
        self._move_all(lambda view, at: os.pwrite(self._fd, view, at), at, data, "written")

    def _move_all(self, move: Callable[[memoryview, int], int], at: int, data: Any, done: str) -> None:
        view = memoryview(data)
        try:
            with self.watch:
                while len(view):
                    count = move(view, at)
                    if count == 0:
                        raise OffloadError(f"the file in {self.folder} ends at byte {at:,}")
                    view, at = view[count:], at + count
        except OSError as error:
            why = error if isinstance(error, OffloadError) else error.strerror
            raise OffloadError(f"{self.folder}: offloaded state cannot be {done}: {why}") from error

    def _copy_aligned(self, data: Any) -> Any:
        """A copy that begins and ends where direct I/O wants it; good until this thread makes the next one."""
        if not hasattr(self._own, "memory"):
            memory = np.empty(PIECE_BYTES + ALIGN_BYTES, np.uint8)
            self._own.memory = memory[-memory.ctypes.data % ALIGN_BYTES :]
        self._own.memory[: len(data)] = data
        return self._own.memory[: -(-len(data) // ALIGN_BYTES) * ALIGN_BYTES]

    def map_array(self, at: int, elements: int, dtype: Any) -> np.ndarray:
        """A part of the file as an array, mapped as long as it is referenced: what is changed there is changed on disk,
        for reads that begin later."""
        if elements == 0:
            return np.empty(0, dtype)
        return np.frombuffer(mmap.mmap(self._fd, elements * dtype.itemsize, offset=at), dtype)

    def close(self) -> None:
        """Return when nothing is under way any more; the file is gone then."""
        self._threads.shutdown()
        self._end()


def _reserve_space(fd: int, folder: Path, at: int, nbytes: int) -> int:
    """Set aside `nbytes` of the disk from byte `at` of a file on."""
    try:
        if nbytes:
            os.posix_fallocate(fd, at, nbytes)
    except OSError as error:
        raise OffloadError(f"{folder} has no room for {nbytes:,} bytes: {error.strerror}") from error
    return nbytes


def _open_unnamed(folder: Path, direct: bool | None) -> tuple[int, bool]:
    """A new file without a name, and whether it is past the page cache."""
    import fcntl  # not on Windows, where `OffloadConfig` is refused

    flag = getattr(os, "O_DIRECT", 0) if direct is not False else 0
    try:
        file = safe_files.open_unnamed(folder)
    except OSError as error:
        raise OffloadError(f"{folder}: {error.strerror}") from error
    try:
        if flag:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | flag)
    except OSError as error:
        if direct:
            os.close(file)
            raise OffloadError(f"{folder}: its file system has no direct I/O ({error.strerror})") from error
        return file, False
    return file, bool(flag)


def lock_folder(folder: Path, owner: str) -> int:
    """The folder's lock, which all ranks of one owner hold together until they close it or die; OffloadError if the
    folder is not there, or if others have it."""
    import fcntl  # not on Windows, where `OffloadConfig` is refused

    if not folder.is_dir():
        what = "is no folder:" if folder.exists() else "does not exist: make it, or"
        raise OffloadError(f"{folder} {what} name another folder")
    try:
        fd = safe_files.open_lock_file(folder / LOCK_NAME)
    except safe_files.Untrusted as error:
        raise OffloadError(f"{error}: remove it, or name another folder") from None
    except OSError as error:
        raise OffloadError(f"{folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            safe_files.write_lock_text(fd, owner)
        except BlockingIOError:
            pass  # held by another process, perhaps a rank of this job
        fcntl.flock(fd, fcntl.LOCK_SH)
        holder = os.pread(fd, 4096, 0).decode(errors="replace")
        if holder != owner:
            alone = "each job, and each trainer, needs a folder of its own"
            raise OffloadError(f"{folder} is in use by {holder.partition(',')[0]}: {alone}")
    except OSError as error:
        os.close(fd)
        raise error if isinstance(error, OffloadError) else OffloadError(f"{folder}: {error.strerror}") from error
    return fd


MIN_SPILLED_BYTES = 1 << 14
"""Bytes of an array that is worth a read and a write."""


class ArrayAddress(NamedTuple):
    """Where an array lies in memory of number `root`. strides: None for arrays without data."""

    root: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: Any


@dataclass
class SpilledValue:
    """A value without its large arrays. roots: the memory that these lay in, until it is written; sizes: its bytes."""

    tree: Any = None
    roots: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def restore_value(self, memory: list[Any]) -> Any:
        """The value, with the arrays in other memory that holds the same."""
        return _map_leaves(
            self.tree, lambda leaf: _make_array(memory[leaf.root], leaf) if isinstance(leaf, ArrayAddress) else leaf
        )


def take_apart(value: Any, stays: Callable[[Any], bool]) -> SpilledValue:
    """Take apart tuples, lists and dicts down to their arrays. Memory stays where `stays` wants to keep it, where it
    is small, or where the arrays use less than half of it."""
    made, numbers = SpilledValue(), dict[int, int]()

    def replace_array(leaf: Any) -> Any:
        root = find_storage(leaf)
        if root is None or not _is_worth_spilling(leaf, root) or stays(root):
            return leaf
        if id(root) not in numbers:
            numbers[id(root)] = len(made.roots)
            made.roots.append(root)
            made.sizes.append(int(root.nbytes))
        if isinstance(root, Storage):
            return ArrayAddress(numbers[id(root)], 0, leaf.shape, None, leaf.dtype)
        return ArrayAddress(
            numbers[id(root)], data_pointer(leaf) - data_pointer(root), leaf.shape, leaf.strides, leaf.dtype
        )

    made.tree = _map_leaves(value, replace_array)
    return made


def _is_worth_spilling(array: Any, root: Any) -> bool:
    own = array.size * array.dtype.itemsize
    whole = isinstance(root, Storage) or root.flags.c_contiguous or root.flags.f_contiguous
    return bool(whole and root.nbytes >= MIN_SPILLED_BYTES and 2 * own >= root.nbytes)


def _make_array(memory: Any, place: ArrayAddress) -> Any:
    if place.strides is None:
        return ShapeArray(place.shape, place.dtype, memory)
    return np.ndarray(place.shape, place.dtype, memory, place.offset, place.strides)


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with other leaves."""
    if isinstance(value, dict):
        return {name: _map_leaves(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [_map_leaves(one, change) for one in value]
    if type(value) is tuple:
        return tuple(_map_leaves(one, change) for one in value)
    if isinstance(value, tuple) and not isinstance(value, ArrayAddress):  # with named fields
        return type(value)(*(_map_leaves(one, change) for one in value))
    return change(value)


class DiskStorage(StateStorage):
    """Where the rows of that level lie. A record's rows lie behind each other, so one read brings them all.

    file: None in a dry run, which moves nothing."""

    def __init__(self, rows: Sequence[LedgerRow], elsewhere: Standing, xp: Any) -> None:
        self.xp = xp
        self._stands = dict(elsewhere)
        self.file: DiskFile | None = None
        self._unlock: Callable[[], object] | None = None
        self._records: dict[Slot, list[LedgerRow]] = {}
        for row in rows:
            if row.level == "slow":
                self._records.setdefault(Slot(LEDGER_KINDS[row.key.kind].slot, row.key.page), []).append(row)
        self._places: dict[LedgerKey, int] = {}
        self.spilled: dict[Slot, int] = {}  # bytes of the activations of the last run
        self._parts: dict[tuple[Slot, int], tuple[int, int]] = {}  # where each part of them lies, and its room
        self._there: dict[Slot, Any] = {}  # the bytes in memory of the records that were fetched
        self.nbytes = 0
        mapped = [row for row in rows if row.level == "map" and row.inside is None]
        for row in (*(row for record in self._records.values() for row in record), *mapped):
            self._places[row.key] = self.nbytes
            self.nbytes += _round_up_to_align(row.nbytes)

    def open_file(self, folder: Path, direct: bool | None, owner: str) -> None:
        """Take the folder and as much of the disk as is needed; OffloadError if that cannot be."""
        self._unlock = unlock = weakref.finalize(self, os.close, lock_folder(folder, owner))
        unlock.atexit = False
        self.file = DiskFile(folder, self.nbytes, direct)

    def fill_slots(self, state: Any) -> None:
        """All records of pages are stored, and none is here."""
        for slot, stand in self._stands.items():
            if slot.kind not in SPILLED and slot.at in state.placement.pages:
                state.store.pop(slot, None)
                state.store[stand] = True

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def busy_seconds(self) -> float:  # type: ignore[override]
        """For which reads or writes were under way, since the last `reset`."""
        return 0.0 if self.file is None else self.file.watch.seconds

    def reset_counters(self) -> None:
        if self.file is not None:
            self.file.watch.seconds = 0.0

    # -- records -------------------------------------------------------------------------------------------------------

    def size(self, record: Slot) -> int:
        """Bytes of a record on disk."""
        return sum(_round_up_to_align(row.nbytes) for row in self._records.get(record, ()))

    def get_moved_bytes(self) -> dict[str, Mapping[tuple[int, int | None], int]]:
        """Of records by number."""
        numbers = {slot: number for number, slot in enumerate(self._stands)}
        pages: dict[tuple[int, int | None], int] = {(n, None): self.size(slot) for slot, n in numbers.items()}
        spilled = {(numbers[slot._replace(mb=None)], slot.mb): nbytes for slot, nbytes in self.spilled.items()}
        return {"record": pages | spilled}

    def buffer_nbytes(self, record: Slot) -> int | None:
        """Bytes of memory that a record needs while it is there, so that it can begin at a multiple of ALIGN."""
        if record not in self._stands:
            return None
        size = self.size(record)
        return size + ALIGN_BYTES if size else 0

    def start_fetch(self, record: Slot, buffer: Any) -> tuple[Handle, Any]:
        """Begin to read a record into `buffer` of `buffer_nbytes`; and its value: the array, or arrays by name."""
        rows, at, arrays = self._records[record], 0, {}
        data = self._there[record] = _align_buffer(buffer, self.size(record))
        for row in rows:
            arrays[row.key.name] = data[at : at + row.nbytes].view(row.dtype)
            at += _round_up_to_align(row.nbytes)
        handle = COMPLETED if self.file is None else self.file.start_read(self._places[rows[0].key], data)
        return handle, arrays.get("", arrays)

    def start_store(self, record: Slot) -> Handle:
        """Begin to write a record from where it was fetched to."""
        at, data = self._places[self._records[record][0].key], self._there[record]
        return COMPLETED if self.file is None else self.file.start_write(at, data)

    # -- activations, whose sizes are those of the batch ---------------------------------------------------------------

    def start_spill(self, slot: Slot, spilled: SpilledValue) -> Handle:
        """Begin to write the memory of an activation, which is then no more a part of `spilled`."""
        roots, spilled.roots = spilled.roots, []
        places = [self._find_place(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        self.spilled[slot] = sum(spilled.sizes)
        if self.file is None:
            return COMPLETED
        bytes_of = [root.reshape(-1, order="A").view("uint8") for root in roots]
        return _join_transfers(self.file.start_write(at, data) for at, data in zip(places, bytes_of, strict=True))

    def start_bring_back(self, slot: Slot, spilled: SpilledValue) -> tuple[Handle, list[Any]]:
        """Begin to read it into new memory."""
        if self.file is None:
            return COMPLETED, [Storage(nbytes) for nbytes in spilled.sizes]
        whole = [
            _align_buffer(np.empty(_round_up_to_align(nbytes) + ALIGN_BYTES, np.uint8), _round_up_to_align(nbytes))
            for nbytes in spilled.sizes
        ]
        places = [self._find_place(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        return _join_transfers(self.file.start_read(at, data) for at, data in zip(places, whole, strict=True)), whole

    def _find_place(self, slot: Slot, index: int, nbytes: int) -> int:
        """Where a part of an activation lies: the same place in each step, unless it has grown."""
        at, reserved = self._parts.get((slot, index), (0, 0))
        if nbytes > reserved:
            at = self.nbytes if self.file is None else self.file.extend_file(_round_up_to_align(nbytes))
            self.nbytes = at + _round_up_to_align(nbytes)
            self._parts[slot, index] = at, _round_up_to_align(nbytes)
        return at

    def map_array(self, row: LedgerRow) -> Any:
        """The array of a row, on disk: see `DiskFile.map_array`."""
        if self.file is None:
            return self.xp.empty((row.elements,), dtype=row.dtype)
        return self.file.map_array(self._places[row.key], row.elements, row.dtype)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self._unlock is not None:
            self._unlock()
        self.file = None


def open_disk(
    placement: Placement, rows: Sequence[LedgerRow], folder: str | os.PathLike[str], direct: bool | None, option: str
) -> DiskStorage:
    """A file in `folder` with room for these rows. Collective: OffloadError on all ranks if one of them cannot have it.

    option: what was asked for, as text"""
    disk = DiskStorage(rows, placement.stage.elsewhere, placement.xp)
    if placement.device.holds_data:
        if not hasattr(os, "posix_fallocate"):
            raise ConfigError(f"{option}: this system cannot set a part of a disk aside; Linux can")
        _open_on_all_ranks(disk, Path(folder), direct, placement.axes.world)
    return disk


def _open_on_all_ranks(disk: DiskStorage, folder: Path, direct: bool | None, world: Communicator) -> None:
    owner = f"process {os.getpid()} on {platform.node()}, {time.time_ns()}"
    problem, cause = None, None
    try:
        disk.open_file(folder, direct, world.all_gather_data(owner)[0])
    except OffloadError as error:
        problem, cause = str(error), error
    for rank, text in enumerate(world.all_gather_data(problem)):
        if text is not None:
            disk.close()
            who = f"rank {rank}: " if world.size > 1 else ""
            raise OffloadError(f"offload: {who}{text}") from cause


def _round_up_to_align(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _align_buffer(buffer: Any, nbytes: int) -> Any:
    first = -data_pointer(buffer) % ALIGN_BYTES
    return buffer[first : first + nbytes]


def _join_transfers(transfers: Iterable[DiskTransfer]) -> DiskTransfer:
    return DiskTransfer([piece for one in transfers for piece in one.left])
