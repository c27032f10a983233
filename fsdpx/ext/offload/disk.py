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

from fsdpx.core.array.arena import address
from fsdpx.core.array.shapes.array import Root, ShapeArray, root_of
from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.safe_files import typed
from fsdpx.core.comm.communicator import DONE, Communicator, Handle
from fsdpx.core.program import Slot
from fsdpx.core.state import tuning
from fsdpx.core.state.ledger import KINDS, Key, LedgerRow
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.storage import Standing, StateStorage
from fsdpx.errors import ConfigError, OffloadError
from fsdpx.ext.offload.records import SPILLED

__all__ = ["ALIGN", "Disk", "File", "Rates", "Spilled", "open_disk", "rates_of", "root_of", "spill", "taken"]

BYTES = 64 << 20
"""How many bytes are written and read to measure a disk."""


class Rates(NamedTuple):
    """Bytes per second."""

    read: float
    written: float


def rates_of(folder: Path, direct: bool | None) -> Rates | None:
    """The rates of a folder's disk, in pieces as large as those that rows are moved in; None where they cannot be
    known: the folder is missing or full, or nothing is to be measured (FSDPX_TUNE=0)."""
    if not folder.is_dir():
        return None
    settings = environment.read()
    key = {"machine": platform.node(), "device": folder.stat().st_dev, "direct": direct is not False}
    known = tuning.read("disk", key, _of_record)
    if known is not None and not settings.retune:
        return known
    if not settings.tune:
        return None
    try:
        found = _measured(folder, direct)
    except OffloadError:
        return None
    tuning.write("disk", key, found._asdict())
    return found


def _of_record(value: dict[str, Any]) -> Rates:
    found = Rates(**typed(value, {"read": float, "written": float}))
    if not all(0 < rate < math.inf for rate in found):
        raise ValueError("a rate is no number of bytes per second")
    return found


def _measured(folder: Path, direct: bool | None) -> Rates:
    memory = np.zeros(BYTES + ALIGN, np.uint8)
    start = -address(memory) % ALIGN
    data, file = memory[start : start + BYTES], File(folder, BYTES, direct)
    try:
        file.write(0, data).wait()  # the first time a disk sets blocks aside
        seconds = []
        for move in (file.read, file.write):
            begin = perf_counter()
            move(0, data).wait()
            seconds.append(perf_counter() - begin)
        return Rates(*(BYTES / one for one in seconds))
    finally:
        file.close()


ALIGN = mmap.ALLOCATIONGRANULARITY
"""Bytes: where parts of the file begin, and memory that it is read into. Direct I/O and maps ask for it."""
PIECE = 8 << 20
"""Bytes of one read or write; large enough for a disk's full rate (docs/decisions/0017-state-on-disk.md)."""
THREADS = 2
"""Pieces under way at a time."""
LOCK = "fsdpx.lock"


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


class File:
    """`nbytes` bytes on disk, there from the start: a disk that is full is found then.

    direct: past the page cache; None: if the file system can. watch: of reads and writes."""

    def __init__(self, folder: Path, nbytes: int, direct: bool | None) -> None:
        self.folder, self.nbytes, self.watch = folder, nbytes, Stopwatch()
        self._fd, self.direct = _unnamed(folder, direct)
        try:
            _reserve(self._fd, folder, 0, nbytes)
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

    def read(self, at: int, data: Any) -> DiskTransfer:
        """Fill `data`, bytes in memory, from byte `at` of the file on."""
        return self._begin(self._read, at, data)

    def write(self, at: int, data: Any) -> DiskTransfer:
        """Write `data`, bytes in memory, from byte `at` of the file on."""
        return self._begin(self._write, at, data)

    def _begin(self, move: Callable[[int, Any], None], at: int, data: Any) -> DiskTransfer:
        starts = range(0, len(data), PIECE)
        return DiskTransfer([self._threads.submit(move, at + i, data[i : i + PIECE]) for i in starts])

    def _read(self, at: int, data: Any) -> None:
        self._all(lambda view, at: os.preadv(self._fd, [view], at), at, data, "read")

    def extend(self, nbytes: int) -> int:
        """Make the file longer; where the new part begins."""
        self.nbytes += _reserve(self._fd, self.folder, self.nbytes, nbytes)
        return self.nbytes - nbytes

    def _write(self, at: int, data: Any) -> None:
        if self.direct and (data.ctypes.data % ALIGN or len(data) % ALIGN):
            data = self._aside(data)
        self._all(lambda view, at: os.pwrite(self._fd, view, at), at, data, "written")

    def _all(self, move: Callable[[memoryview, int], int], at: int, data: Any, done: str) -> None:
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

    def _aside(self, data: Any) -> Any:
        """A copy that begins and ends where direct I/O wants it; good until this thread makes the next one."""
        if not hasattr(self._own, "memory"):
            memory = np.empty(PIECE + ALIGN, np.uint8)
            self._own.memory = memory[-memory.ctypes.data % ALIGN :]
        self._own.memory[: len(data)] = data
        return self._own.memory[: -(-len(data) // ALIGN) * ALIGN]

    def mapped(self, at: int, elements: int, dtype: Any) -> np.ndarray:
        """A part of the file as an array, mapped as long as it is referenced: what is changed there is changed on disk,
        for reads that begin later."""
        if elements == 0:
            return np.empty(0, dtype)
        return np.frombuffer(mmap.mmap(self._fd, elements * dtype.itemsize, offset=at), dtype)

    def close(self) -> None:
        """Return when nothing is under way any more; the file is gone then."""
        self._threads.shutdown()
        self._end()


def _reserve(fd: int, folder: Path, at: int, nbytes: int) -> int:
    """Set aside `nbytes` of the disk from byte `at` of a file on."""
    try:
        if nbytes:
            os.posix_fallocate(fd, at, nbytes)
    except OSError as error:
        raise OffloadError(f"{folder} has no room for {nbytes:,} bytes: {error.strerror}") from error
    return nbytes


def _unnamed(folder: Path, direct: bool | None) -> tuple[int, bool]:
    """A new file without a name, and whether it is past the page cache."""
    import fcntl  # not on Windows, where `Offload` is refused

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


def taken(folder: Path, owner: str) -> int:
    """The folder's lock, which all ranks of one owner hold together until they close it or die; OffloadError if the
    folder is not there, or if others have it."""
    import fcntl  # not on Windows, where `Offload` is refused

    if not folder.is_dir():
        what = "is no folder:" if folder.exists() else "does not exist: make it, or"
        raise OffloadError(f"{folder} {what} name another folder")
    try:
        fd = safe_files.lock(folder / LOCK)
    except safe_files.Untrusted as error:
        raise OffloadError(f"{error}: remove it, or name another folder") from None
    except OSError as error:
        raise OffloadError(f"{folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            safe_files.sign(fd, owner)
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


LEAST = 1 << 14
"""Bytes of an array that is worth a read and a write."""


class ArrayAddress(NamedTuple):
    """Where an array lies in memory of number `root`. strides: None for arrays without data."""

    root: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: Any


@dataclass
class Spilled:
    """A value without its large arrays. roots: the memory that these lay in, until it is written; sizes: its bytes."""

    tree: Any = None
    roots: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def value(self, memory: list[Any]) -> Any:
        """The value, with the arrays in other memory that holds the same."""
        return _mapped(
            self.tree, lambda leaf: _array(memory[leaf.root], leaf) if isinstance(leaf, ArrayAddress) else leaf
        )


def spill(value: Any, stays: Callable[[Any], bool]) -> Spilled:
    """Take apart tuples, lists and dicts down to their arrays. Memory stays where `stays` wants to keep it, where it
    is small, or where the arrays use less than half of it."""
    made, numbers = Spilled(), dict[int, int]()

    def apart(leaf: Any) -> Any:
        root = root_of(leaf)
        if root is None or not _worth(leaf, root) or stays(root):
            return leaf
        if id(root) not in numbers:
            numbers[id(root)] = len(made.roots)
            made.roots.append(root)
            made.sizes.append(int(root.nbytes))
        if isinstance(root, Root):
            return ArrayAddress(numbers[id(root)], 0, leaf.shape, None, leaf.dtype)
        return ArrayAddress(numbers[id(root)], address(leaf) - address(root), leaf.shape, leaf.strides, leaf.dtype)

    made.tree = _mapped(value, apart)
    return made


def _worth(array: Any, root: Any) -> bool:
    own = array.size * array.dtype.itemsize
    whole = isinstance(root, Root) or root.flags.c_contiguous or root.flags.f_contiguous
    return bool(whole and root.nbytes >= LEAST and 2 * own >= root.nbytes)


def _array(memory: Any, place: ArrayAddress) -> Any:
    if place.strides is None:
        return ShapeArray(place.shape, place.dtype, memory)
    return np.ndarray(place.shape, place.dtype, memory, place.offset, place.strides)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with other leaves."""
    if isinstance(value, dict):
        return {name: _mapped(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [_mapped(one, change) for one in value]
    if type(value) is tuple:
        return tuple(_mapped(one, change) for one in value)
    if isinstance(value, tuple) and not isinstance(value, ArrayAddress):  # with named fields
        return type(value)(*(_mapped(one, change) for one in value))
    return change(value)


class Disk(StateStorage):
    """Where the rows of that level lie. A record's rows lie behind each other, so one read brings them all.

    file: None in a dry run, which moves nothing."""

    def __init__(self, rows: Sequence[LedgerRow], elsewhere: Standing, xp: Any) -> None:
        self.xp = xp
        self._stands = dict(elsewhere)
        self.file: File | None = None
        self._unlock: Callable[[], object] | None = None
        self._records: dict[Slot, list[LedgerRow]] = {}
        for row in rows:
            if row.level == "slow":
                self._records.setdefault(Slot(KINDS[row.key.kind].slot, row.key.page), []).append(row)
        self._places: dict[Key, int] = {}
        self.spilled: dict[Slot, int] = {}  # bytes of the activations of the last run
        self._parts: dict[tuple[Slot, int], tuple[int, int]] = {}  # where each part of them lies, and its room
        self._there: dict[Slot, Any] = {}  # the bytes in memory of the records that were fetched
        self.nbytes = 0
        mapped = [row for row in rows if row.level == "map" and row.inside is None]
        for row in (*(row for record in self._records.values() for row in record), *mapped):
            self._places[row.key] = self.nbytes
            self.nbytes += _whole(row.nbytes)

    def open(self, folder: Path, direct: bool | None, owner: str) -> None:
        """Take the folder and as much of the disk as is needed; OffloadError if that cannot be."""
        self._unlock = unlock = weakref.finalize(self, os.close, taken(folder, owner))
        unlock.atexit = False
        self.file = File(folder, self.nbytes, direct)

    def made(self, state: Any) -> None:
        """All records of pages are stored, and none is here."""
        for slot, stand in self._stands.items():
            if slot.kind not in SPILLED and slot.at in state.placement.pages:
                state.store.pop(slot, None)
                state.store[stand] = True

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """For which reads or writes were under way, since the last `reset`."""
        return 0.0 if self.file is None else self.file.watch.seconds

    def reset(self) -> None:
        if self.file is not None:
            self.file.watch.seconds = 0.0

    # -- records -------------------------------------------------------------------------------------------------------

    def size(self, record: Slot) -> int:
        """Bytes of a record on disk."""
        return sum(_whole(row.nbytes) for row in self._records.get(record, ()))

    def amounts(self) -> dict[str, Mapping[tuple[int, int | None], int]]:
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
        return size + ALIGN if size else 0

    def fetch(self, record: Slot, buffer: Any) -> tuple[Handle, Any]:
        """Begin to read a record into `buffer` of `buffer_nbytes`; and its value: the array, or arrays by name."""
        rows, at, arrays = self._records[record], 0, {}
        data = self._there[record] = _aligned(buffer, self.size(record))
        for row in rows:
            arrays[row.key.name] = data[at : at + row.nbytes].view(row.dtype)
            at += _whole(row.nbytes)
        handle = DONE if self.file is None else self.file.read(self._places[rows[0].key], data)
        return handle, arrays.get("", arrays)

    def store(self, record: Slot) -> Handle:
        """Begin to write a record from where it was fetched to."""
        at, data = self._places[self._records[record][0].key], self._there[record]
        return DONE if self.file is None else self.file.write(at, data)

    # -- activations, whose sizes are those of the batch ---------------------------------------------------------------

    def spill(self, slot: Slot, spilled: Spilled) -> Handle:
        """Begin to write the memory of an activation, which is then no more a part of `spilled`."""
        roots, spilled.roots = spilled.roots, []
        places = [self._place(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        self.spilled[slot] = sum(spilled.sizes)
        if self.file is None:
            return DONE
        bytes_of = [root.reshape(-1, order="A").view("uint8") for root in roots]
        return _together(self.file.write(at, data) for at, data in zip(places, bytes_of, strict=True))

    def bring(self, slot: Slot, spilled: Spilled) -> tuple[Handle, list[Any]]:
        """Begin to read it into new memory."""
        if self.file is None:
            return DONE, [Root(nbytes) for nbytes in spilled.sizes]
        whole = [_aligned(np.empty(_whole(nbytes) + ALIGN, np.uint8), _whole(nbytes)) for nbytes in spilled.sizes]
        places = [self._place(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        return _together(self.file.read(at, data) for at, data in zip(places, whole, strict=True)), whole

    def _place(self, slot: Slot, index: int, nbytes: int) -> int:
        """Where a part of an activation lies: the same place in each step, unless it has grown."""
        at, reserved = self._parts.get((slot, index), (0, 0))
        if nbytes > reserved:
            at = self.nbytes if self.file is None else self.file.extend(_whole(nbytes))
            self.nbytes = at + _whole(nbytes)
            self._parts[slot, index] = at, _whole(nbytes)
        return at

    def mapped(self, row: LedgerRow) -> Any:
        """The array of a row, on disk: see `File.mapped`."""
        if self.file is None:
            return self.xp.empty((row.elements,), dtype=row.dtype)
        return self.file.mapped(self._places[row.key], row.elements, row.dtype)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self._unlock is not None:
            self._unlock()
        self.file = None


def open_disk(
    placement: Placement, rows: Sequence[LedgerRow], folder: str | os.PathLike[str], direct: bool | None, option: str
) -> Disk:
    """A file in `folder` with room for these rows. Collective: OffloadError on all ranks if one of them cannot have it.

    option: what was asked for, as text"""
    disk = Disk(rows, placement.stage.elsewhere, placement.xp)
    if placement.device.holds_data:
        if not hasattr(os, "posix_fallocate"):
            raise ConfigError(f"{option}: this system cannot set a part of a disk aside; Linux can")
        _open(disk, Path(folder), direct, placement.axes.world)
    return disk


def _open(disk: Disk, folder: Path, direct: bool | None, world: Communicator) -> None:
    owner = f"process {os.getpid()} on {platform.node()}, {time.time_ns()}"
    problem, cause = None, None
    try:
        disk.open(folder, direct, world.all_gather_plain(owner)[0])
    except OffloadError as error:
        problem, cause = str(error), error
    for rank, text in enumerate(world.all_gather_plain(problem)):
        if text is not None:
            disk.close()
            who = f"rank {rank}: " if world.size > 1 else ""
            raise OffloadError(f"offload: {who}{text}") from cause


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _aligned(buffer: Any, nbytes: int) -> Any:
    first = -address(buffer) % ALIGN
    return buffer[first : first + nbytes]


def _together(transfers: Iterable[DiskTransfer]) -> DiskTransfer:
    return DiskTransfer([piece for one in transfers for piece in one.left])
