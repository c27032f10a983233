"""Storage of a rank's offloaded state in a file, with asynchronous reads and writes, and measurement of disk
bandwidth."""

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
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.array.shapes.array import ShapeArray, Storage, find_storage
from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.safe_files import require_json_fields
from fsdpx.core.comm.communicator import COMPLETED, Communicator, Handle
from fsdpx.core.program import Slot
from fsdpx.core.state import tuning
from fsdpx.core.state.ledger import LEDGER_KINDS, LedgerKey, LedgerRow
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.storage import StateStorage, StoredSlots
from fsdpx.errors import ConfigError, OffloadError
from fsdpx.ext.offload.records import SPILLED

__all__ = [
    "ALIGN_BYTES",
    "DiskFile",
    "DiskRates",
    "DiskStorage",
    "SpilledValue",
    "extract_large_arrays",
    "find_storage",
    "get_or_measure_disk_rates",
    "lock_folder",
    "open_disk_storage",
]

MEASURED_BYTES = 64 << 20
"""Number of bytes that are written and read to measure a disk."""


class DiskRates(NamedTuple):
    """Read and write bandwidth of a disk, in bytes per second."""

    read: float
    written: float


def get_or_measure_disk_rates(folder: Path, direct: bool | None) -> DiskRates | None:
    """Return the bandwidth of the disk that holds a folder, from a cache of earlier measurements if possible.

    Returns None if the bandwidth is unknown because the folder is missing or its disk is full, or because measuring is
    turned off (FSDPX_TUNE=0)."""
    if not folder.is_dir():
        return None
    settings = environment.read_environment()
    key = {"machine": platform.node(), "device": folder.stat().st_dev, "direct": direct is not False}
    known = tuning.load_record("disk", key, _parse_disk_rates)
    if known is not None and not settings.retune:
        return known
    if not settings.tune:
        return None
    try:
        found = _measure_disk_rates(folder, direct)
    except OffloadError:
        return None
    tuning.write_record("disk", key, found._asdict())
    return found


def _parse_disk_rates(value: dict[str, Any]) -> DiskRates:
    found = DiskRates(**require_json_fields(value, {"read": float, "written": float}))
    if not all(0 < rate < math.inf for rate in found):
        raise ValueError("a rate is not a positive number of bytes per second")
    return found


def _measure_disk_rates(folder: Path, direct: bool | None) -> DiskRates:
    memory = np.zeros(MEASURED_BYTES + ALIGN_BYTES, np.uint8)
    start = -get_data_pointer(memory) % ALIGN_BYTES
    data, file = memory[start : start + MEASURED_BYTES], DiskFile(folder, MEASURED_BYTES, direct)
    try:
        file.start_write(0, data).wait()  # the first write is not timed, because it allocates blocks on disk
        seconds = []
        for start_transfer in (file.start_read, file.start_write):
            begin = perf_counter()
            start_transfer(0, data).wait()
            seconds.append(perf_counter() - begin)
        return DiskRates(*(MEASURED_BYTES / one for one in seconds))
    finally:
        file.close()


ALIGN_BYTES = mmap.ALLOCATIONGRANULARITY
"""Alignment in bytes that direct I/O and mmap require, both for file offsets and for the memory that data is read
into."""
PIECE_BYTES = 8 << 20
"""Number of bytes per read or write. It is large enough to reach the full bandwidth of a disk
(docs/decisions/0017-state-on-disk.md)."""
IO_THREADS = 2
"""Number of pieces that are transferred at a time."""
LOCK_NAME = "fsdpx.lock"


class DiskTransfer:
    """Handle for a pending read or write, which may consist of several I/O operations. It has the same interface as the
    handle of a message."""

    __slots__ = ("left",)

    def __init__(self, left: Sequence[Future[None]]) -> None:
        self.left = left

    def test(self) -> bool:
        return all(piece.done() for piece in self.left)

    def wait(self) -> None:
        for piece in self.left:
            piece.result()


class Stopwatch:
    """A stopwatch shared by threads. `seconds` is the time during which at least one thread was working."""

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
    """An unnamed file of `nbytes` bytes. All of its space is allocated at once, so that a full disk is noticed at the
    start.

    `direct` says whether to bypass the page cache. If it is None, bypass the cache if the file system supports this.
    `watch` measures the time during which reads or writes are in progress."""

    def __init__(self, folder: Path, nbytes: int, direct: bool | None) -> None:
        self.folder, self.nbytes, self.watch = folder, nbytes, Stopwatch()
        self._fd, self.direct = _open_unnamed_file(folder, direct)
        try:
            _reserve_space(self._fd, folder, 0, nbytes)
        except OffloadError:
            os.close(self._fd)
            raise
        # the file is never closed too early, because pending transfers keep this object alive
        self._end = weakref.finalize(self, os.close, self._fd)
        self._end.atexit = False
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="fsdpx disk")
        all_run = threading.Barrier(IO_THREADS)  # all threads are started now, while there is enough memory
        for waits in [self._threads.submit(all_run.wait) for _ in range(IO_THREADS)]:
            waits.result()

    def start_read(self, offset: int, data: Any) -> DiskTransfer:
        """Start to read from the file into the memory `data`, beginning at byte `offset` of the file."""
        return self._start_transfer(self._read_piece, offset, data)

    def start_write(self, offset: int, data: Any) -> DiskTransfer:
        """Start writing the memory `data` to the file, beginning at byte `offset`."""
        return self._start_transfer(self._write_piece, offset, data)

    def _start_transfer(self, transfer: Callable[[int, Any], None], offset: int, data: Any) -> DiskTransfer:
        starts = range(0, len(data), PIECE_BYTES)
        return DiskTransfer([self._threads.submit(transfer, offset + i, data[i : i + PIECE_BYTES]) for i in starts])

    def _read_piece(self, offset: int, data: Any) -> None:
        self._transfer_all(lambda view, offset: os.preadv(self._fd, [view], offset), offset, data, "read")

    def extend_file(self, nbytes: int) -> int:
        """Extend the file by `nbytes` bytes, and return the offset in bytes of the new part."""
        self.nbytes += _reserve_space(self._fd, self.folder, self.nbytes, nbytes)
        return self.nbytes - nbytes

    def _write_piece(self, offset: int, data: Any) -> None:
        if self.direct and (data.ctypes.data % ALIGN_BYTES or len(data) % ALIGN_BYTES):
            data = self._make_aligned_copy(data)
        self._transfer_all(lambda view, offset: os.pwrite(self._fd, view, offset), offset, data, "written")

    def _transfer_all(
        self, transfer: Callable[[memoryview, int], int], offset: int, data: Any, participle: str
    ) -> None:
        view = memoryview(data)
        try:
            with self.watch:
                while len(view):
                    count = transfer(view, offset)
                    if count == 0:
                        raise OffloadError(f"the file in {self.folder} ends at byte {offset:,}")
                    view, offset = view[count:], offset + count
        except OSError as error:
            why = error if isinstance(error, OffloadError) else error.strerror
            raise OffloadError(f"{self.folder}: offloaded state cannot be {participle}: {why}") from error

    def _make_aligned_copy(self, data: Any) -> Any:
        """Return a copy of `data` that is aligned for direct I/O. It is valid until this thread makes the next copy."""
        if not hasattr(self._own, "memory"):
            memory = np.empty(PIECE_BYTES + ALIGN_BYTES, np.uint8)
            self._own.memory = memory[-memory.ctypes.data % ALIGN_BYTES :]
        self._own.memory[: len(data)] = data
        return self._own.memory[: -(-len(data) // ALIGN_BYTES) * ALIGN_BYTES]

    def map_array(self, offset: int, elements: int, dtype: Any) -> np.ndarray:
        """Memory-map a part of the file as an array. The array stays mapped as long as it is referenced, and later
        reads of the file see changes to the array."""
        if elements == 0:
            return np.empty(0, dtype)
        return np.frombuffer(mmap.mmap(self._fd, elements * dtype.itemsize, offset=offset), dtype)

    def close(self) -> None:
        """Wait for all transfers, and close the file. Closing also deletes the file, because it has no name."""
        self._threads.shutdown()
        self._end()


def _reserve_space(fd: int, folder: Path, offset: int, nbytes: int) -> int:
    """Allocate disk space for `nbytes` bytes of a file, beginning at byte `offset`, and return `nbytes`. Raises
    OffloadError if the disk is full."""
    try:
        if nbytes:
            os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        raise OffloadError(f"{folder} has no room for {nbytes:,} bytes: {error.strerror}") from error
    return nbytes


def _open_unnamed_file(folder: Path, direct: bool | None) -> tuple[int, bool]:
    """Open a new unnamed file, and return its descriptor and whether it bypasses the page cache."""
    import fcntl  # fcntl does not exist on Windows, where `OffloadConfig` is rejected

    flag = getattr(os, "O_DIRECT", 0) if direct is not False else 0
    try:
        file = safe_files.open_self_deleting_file(folder)
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
    """Lock a folder for the ranks of one owner (a trainer of a job), and return the descriptor that holds the lock.

    The lock ends when the descriptor is closed or the process ends. Raises OffloadError if the folder does not exist,
    or if another owner holds the lock."""
    import fcntl  # fcntl does not exist on Windows, where `OffloadConfig` is rejected

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
            pass  # another process holds the lock, perhaps a rank of this job
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
"""Size in bytes of the smallest array that is worth writing to disk and reading back."""


class ArrayAddress(NamedTuple):
    """Position of an array in a memory block. `root` is the index of the block. `strides` is None for shape-only
    arrays."""

    root: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: Any


@dataclass
class SpilledValue:
    """A saved activation whose large arrays have been removed, so that they can be written to disk.

    `roots` are the memory blocks that hold these arrays until they have been written. `sizes` is the size of each block
    in bytes."""

    tree: Any = None
    roots: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def rebuild_value_from_memory(self, memory: list[Any]) -> Any:
        """Return the activation, with its large arrays in the memory blocks `memory`, which were read back from disk.
        """
        return _map_leaves(
            self.tree, lambda leaf: _make_array(memory[leaf.root], leaf) if isinstance(leaf, ArrayAddress) else leaf
        )


def extract_large_arrays(value: Any, keep_in_memory: Callable[[Any], bool]) -> SpilledValue:
    """Remove large arrays from nested tuples, lists and dicts, so that they can be written to disk.

    An array stays in the value if `keep_in_memory(block)` is true for its memory block, if the block is small, or if
    the array uses less than half of the block."""
    made, numbers = SpilledValue(), dict[int, int]()

    def replace_array(leaf: Any) -> Any:
        root = find_storage(leaf)
        if root is None or not _is_worth_spilling(leaf, root) or keep_in_memory(root):
            return leaf
        if id(root) not in numbers:
            numbers[id(root)] = len(made.roots)
            made.roots.append(root)
            made.sizes.append(int(root.nbytes))
        if isinstance(root, Storage):
            return ArrayAddress(numbers[id(root)], 0, leaf.shape, None, leaf.dtype)
        return ArrayAddress(
            numbers[id(root)], get_data_pointer(leaf) - get_data_pointer(root), leaf.shape, leaf.strides, leaf.dtype
        )

    made.tree = _map_leaves(value, replace_array)
    return made


def _is_worth_spilling(array: Any, root: Any) -> bool:
    own = array.size * array.dtype.itemsize
    contiguous = isinstance(root, Storage) or root.flags.c_contiguous or root.flags.f_contiguous
    return bool(contiguous and root.nbytes >= MIN_SPILLED_BYTES and 2 * own >= root.nbytes)


def _make_array(memory: Any, address: ArrayAddress) -> Any:
    if address.strides is None:
        return ShapeArray(address.shape, address.dtype, memory)
    return np.ndarray(address.shape, address.dtype, memory, address.offset, address.strides)


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each leaf of nested tuples, lists and dicts, and return the results in the same structure."""
    if isinstance(value, dict):
        return {name: _map_leaves(one, function) for name, one in value.items()}
    if isinstance(value, list):
        return [_map_leaves(one, function) for one in value]
    if type(value) is tuple:
        return tuple(_map_leaves(one, function) for one in value)
    # a named tuple takes its fields as separate arguments
    if isinstance(value, tuple) and not isinstance(value, ArrayAddress):
        return type(value)(*(_map_leaves(one, function) for one in value))
    return function(value)


class DiskStorage(StateStorage):
    """The offloaded state of a rank in one file.

    A record is a set of arrays that are read and written together, such as the optimizer state of one page (flat
    parameter buffer). The arrays of a record are contiguous in the file, so that a single read fetches them. `file` is
    None in a dry run, which transfers nothing."""

    def __init__(self, rows: Sequence[LedgerRow], elsewhere: StoredSlots, xp: Any) -> None:
        self.xp = xp
        self._stands = dict(elsewhere)
        self.file: DiskFile | None = None
        self._unlock: Callable[[], object] | None = None
        self._records: dict[Slot, list[LedgerRow]] = {}
        for row in rows:
            if row.level == "slow":
                self._records.setdefault(Slot(LEDGER_KINDS[row.key.kind].slot, row.key.page), []).append(row)
        self._places: dict[LedgerKey, int] = {}
        self.spilled: dict[Slot, int] = {}  # activation -> number of bytes that it took up on disk in the last run
        self._parts: dict[tuple[Slot, int], tuple[int, int]] = {}  # (activation, block) -> offset, reserved bytes
        self._there: dict[Slot, Any] = {}
        self.nbytes = 0
        mapped = [row for row in rows if row.level == "map" and row.inside is None]
        for row in (*(row for record in self._records.values() for row in record), *mapped):
            self._places[row.key] = self.nbytes
            self.nbytes += _round_up_to_align(row.nbytes)

    def open_file(self, folder: Path, direct: bool | None, owner: str) -> None:
        """Lock the folder and allocate the file; raise OffloadError if either fails."""
        self._unlock = unlock = weakref.finalize(self, os.close, lock_folder(folder, owner))
        unlock.atexit = False
        self.file = DiskFile(folder, self.nbytes, direct)

    def fill_slots_with_placeholders(self, state: Any) -> None:
        """Mark all offloaded parameters, gradients and optimizer state as stored on disk and no longer in memory."""
        for slot, stand in self._stands.items():
            if slot.kind not in SPILLED and slot.at in state.placement.pages:
                state.store.pop(slot, None)
                state.store[stand] = True

    @property
    def busy_seconds(self) -> float:  # type: ignore[override]
        """Seconds since the last `reset_counters` during which reads or writes were in progress."""
        return 0.0 if self.file is None else self.file.watch.seconds

    def reset_counters(self) -> None:
        if self.file is not None:
            self.file.watch.seconds = 0.0

    def get_record_nbytes(self, record: Slot) -> int:
        """Return the size in bytes of a record on disk, including padding."""
        return sum(_round_up_to_align(row.nbytes) for row in self._records.get(record, ()))

    def get_bytes_per_transfer_by_record(self) -> dict[str, Mapping[tuple[int, int | None], int]]:
        """Return {"record": sizes}. The dict `sizes` maps (index of the record, microbatch) to the number of bytes that
        one read or write of the record transfers."""
        numbers = {slot: number for number, slot in enumerate(self._stands)}
        pages: dict[tuple[int, int | None], int] = {
            (n, None): self.get_record_nbytes(slot) for slot, n in numbers.items()
        }
        spilled = {(numbers[slot._replace(mb=None)], slot.mb): nbytes for slot, nbytes in self.spilled.items()}
        return {"record": pages | spilled}

    def get_fetch_buffer_nbytes(self, record: Slot) -> int | None:
        """Return the size in bytes of the buffer needed to fetch a record, including room to align the record to
        `ALIGN_BYTES`. Return None if `record` is not stored on disk."""
        if record not in self._stands:
            return None
        size = self.get_record_nbytes(record)
        return size + ALIGN_BYTES if size else 0

    def start_fetch(self, record: Slot, buffer: Any) -> tuple[Handle, Any]:
        """Start to read a record into `buffer`. Return the handle of the read, and the record's array (or, if the
        record has several, a dict of its arrays by name).

        `buffer` must have `get_fetch_buffer_nbytes` bytes."""
        rows, offset, arrays = self._records[record], 0, {}
        data = self._there[record] = _align_buffer(buffer, self.get_record_nbytes(record))
        for row in rows:
            arrays[row.key.name] = data[offset : offset + row.nbytes].view(row.dtype)
            offset += _round_up_to_align(row.nbytes)
        handle = COMPLETED if self.file is None else self.file.start_read(self._places[rows[0].key], data)
        return handle, arrays.get("", arrays)

    def start_store(self, record: Slot) -> Handle:
        """Start writing a record back to disk from the buffer that it was fetched into, and return the handle of the
        write."""
        offset, data = self._places[self._records[record][0].key], self._there[record]
        return COMPLETED if self.file is None else self.file.start_write(offset, data)

    def start_spill(self, slot: Slot, spilled: SpilledValue) -> Handle:
        """Start to write the large arrays of an activation to disk, drop them from `spilled`, and return the handle of
        the write."""
        roots, spilled.roots = spilled.roots, []
        offsets = [self._find_or_reserve_offset(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        self.spilled[slot] = sum(spilled.sizes)
        if self.file is None:
            return COMPLETED
        bytes_of = [root.reshape(-1, order="A").view("uint8") for root in roots]
        return _join_transfers(
            self.file.start_write(offset, data) for offset, data in zip(offsets, bytes_of, strict=True)
        )

    def start_restore(self, slot: Slot, spilled: SpilledValue) -> tuple[Handle, list[Any]]:
        """Start to read the large arrays of an activation into new memory. Return the handle and the new memory
        blocks."""
        if self.file is None:
            return COMPLETED, [Storage(nbytes) for nbytes in spilled.sizes]
        blocks = [
            _align_buffer(np.empty(_round_up_to_align(nbytes) + ALIGN_BYTES, np.uint8), _round_up_to_align(nbytes))
            for nbytes in spilled.sizes
        ]
        offsets = [self._find_or_reserve_offset(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        return _join_transfers(
            self.file.start_read(offset, data) for offset, data in zip(offsets, blocks, strict=True)
        ), blocks

    def _find_or_reserve_offset(self, slot: Slot, index: int, nbytes: int) -> int:
        """Return the offset in the file of memory block number `index` of an activation.

        The block has the same offset in each step, unless it has grown."""
        offset, reserved = self._parts.get((slot, index), (0, 0))
        if nbytes > reserved:
            offset = self.nbytes if self.file is None else self.file.extend_file(_round_up_to_align(nbytes))
            self.nbytes = offset + _round_up_to_align(nbytes)
            self._parts[slot, index] = offset, _round_up_to_align(nbytes)
        return offset

    def map_array(self, row: LedgerRow) -> Any:
        """Return the array that belongs to a row of the ledger (the table of a rank's arrays), memory-mapped by
        `DiskFile.map_array`."""
        if self.file is None:
            return self.xp.empty((row.elements,), dtype=row.dtype)
        return self.file.map_array(self._places[row.key], row.elements, row.dtype)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self._unlock is not None:
            self._unlock()
        self.file = None


def open_disk_storage(
    placement: Placement, rows: Sequence[LedgerRow], folder: str | os.PathLike[str], direct: bool | None, option: str
) -> DiskStorage:
    """Open storage on disk for the offloaded state in `rows`. Collective.

    Raises OffloadError on all ranks if one of them fails. `option` is the user's option as text, for error messages."""
    disk = DiskStorage(rows, placement.stage.stored_slots, placement.xp)
    if placement.device.holds_data:
        if not hasattr(os, "posix_fallocate"):
            raise ConfigError(f"{option}: this system cannot set a part of a disk aside; Linux can")
        _open_file_on_all_ranks(disk, Path(folder), direct, placement.axes.world)
    return disk


def _open_file_on_all_ranks(disk: DiskStorage, folder: Path, direct: bool | None, world: Communicator) -> None:
    owner = f"process {os.getpid()} on {platform.node()}, {time.time_ns()}"
    problem, cause = None, None
    try:
        disk.open_file(folder, direct, world.all_gather_value(owner)[0])
    except OffloadError as error:
        problem, cause = str(error), error
    for rank, text in enumerate(world.all_gather_value(problem)):
        if text is not None:
            disk.close()
            who = f"rank {rank}: " if world.size > 1 else ""
            raise OffloadError(f"offload: {who}{text}") from cause


def _round_up_to_align(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _align_buffer(buffer: Any, nbytes: int) -> Any:
    first = -get_data_pointer(buffer) % ALIGN_BYTES
    return buffer[first : first + nbytes]


def _join_transfers(transfers: Iterable[DiskTransfer]) -> DiskTransfer:
    return DiskTransfer([piece for one in transfers for piece in one.left])
