"""Memory that the ranks of a host share: files that all ranks map, windows in them, and a board for synchronization.

On the board, each rank announces how far it has got. A rank writes only its own part, so no lock is needed. A rank
*posts* the number of a collective when its data may be read, together with a few words that locate the data. It marks
the number as *finished* when it has read everything that it needs. A memory fence ensures that the words are visible
before the number is."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.comm.calls import Array
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.node.shared_file import map_shared_file
from fsdpx.core.comm.windows import SharedWindow

__all__ = [
    "BOARD_SLOTS", "HAS_FILE_LOCKS", "MAX_PAYLOAD_BYTES", "SHARED_MEMORY_FOLDER", "CollectiveBoard", "HostWindow",
    "MappedWindow", "NodeMemory", "SharedMapping", "WindowAddress", "count_free_shared_bytes", "get_shared_memory_id",
]  # fmt: skip

try:
    import fcntl
except ImportError:  # Windows has no fcntl; shared windows are then provided by MPI
    fcntl = None  # type: ignore[assignment]


HAS_FILE_LOCKS = fcntl is not None
"""Whether the system can lock byte ranges of a file."""

SHARED_MEMORY_FOLDER = "/dev/shm"
"""The folder in which Linux keeps files in memory."""


class SharedMapping:
    """A memory-mapped file with a part for each rank of `comm`; all ranks must run on one host. Creating it is
    collective.

    The file has no name, so no file is left behind no matter how ranks end. A rank that drops this object without
    calling `close` still releases its mapping. As long as rank r of N lives, it holds a lock on byte N + r of the
    file.

    Parameters
    ----------
    comm : ranks of this host
    nbytes : size of this rank's part in bytes
    preallocate : whether to allocate the memory now and raise ConfigError on all ranks if there is too little;
        otherwise memory pages are allocated when they are first touched"""

    def __init__(self, comm: Communicator, nbytes: int, preallocate: bool = True) -> None:
        sizes = comm.all_gather_data(max(nbytes, 1))
        starts = [0, *accumulate(-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in sizes)]
        self.file, memory = map_shared_file(comm, starts[-1], _find_shared_memory_folder(), preallocate)
        self._end = weakref.finalize(self, os.close, self.file)
        self._end.atexit = False  # unnecessary at exit, when the system closes the file
        self.parts = [np.frombuffer(memory, np.uint8, n, start) for start, n in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        """Drop the array views and close the file. The memory is unmapped when no view of it exists anymore."""
        self.parts = []
        self._end()


class MappedWindow(SharedWindow):
    """A one-sided window in shared memory with a part for each rank of `comm`; all ranks must run on one host.
    Creating it is collective. The part of rank r is protected by a file lock on byte r."""

    def __init__(self, comm: Communicator, nbytes: int, timeout: float) -> None:
        self._mapping = SharedMapping(comm, nbytes)
        self._file, self.parts = self._mapping.file, self._mapping.parts
        super().__init__(comm.rank, comm.size, self.parts[comm.rank], timeout)

    @contextmanager
    def lock_part(self, rank: int, write: bool) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX if write else fcntl.LOCK_SH, 1, rank)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)

    def has_rank_died(self, rank: int) -> bool:
        if rank == self.rank:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, self.size + rank)
        except OSError:  # the lock is held, so the rank is alive
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self.size + rank)
        return True

    def close(self) -> None:
        self.parts = []
        self.own = np.empty(0, np.uint8)
        self._mapping.close()


def get_shared_memory_id() -> str:
    """Return an identifier that is the same in all processes that can share memory: the processes of one host, or of
    one container if it has its own shared memory."""
    folder = _find_shared_memory_folder()
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat(folder).st_dev}"
    return f"{platform.node()} {folder}"


def _find_shared_memory_folder() -> str:
    return SHARED_MEMORY_FOLDER if os.path.isdir(SHARED_MEMORY_FOLDER) else tempfile.gettempdir()


RESERVED_BYTES = 4 << 20
"""Bytes of shared memory that are left for the library that carries messages."""


class WindowAddress(NamedTuple):
    """The location of an array in shared memory.

    Attributes
    ----------
    window : id of the window
    owner : index, on this host, of the rank whose part contains the array
    offset : byte offset in that part"""

    window: int
    owner: int
    offset: int

    @property
    def word_view(self) -> memoryview:
        """This address as three 64-bit words."""
        return np.array(self, np.int64).data


class HostWindow:
    """One allocation of shared memory with a part for each rank of the host, mapped by all of them. Creating it is
    collective.

    `fence()` orders stores: a rank that sees a store after the fence also sees all stores before it.
    """

    def __init__(self, here: Communicator, nbytes: int) -> None:
        self._mapping = SharedMapping(
            here, nbytes, preallocate=False
        )  # not preallocated, so that the system places memory pages near the core that first uses them
        self.parts: list[Array] = self._mapping.parts
        self.addresses = [get_data_pointer(part) for part in self.parts]
        self.fence = _make_store_fence()

    def free_memory(self) -> None:
        """Free the memory of all parts. Arrays in it must not be used afterwards."""
        self.parts = []
        self._mapping.close()


class NodeMemory:
    """All windows of shared memory on the host of this rank.

    Attributes
    ----------
    world : communicator of all ranks of the job
    here : communicator of the ranks on this host, in world order
    leader : lowest world rank on this host, which identifies the host
    common : ids of the windows in which all ranks of a group use the same part
    windows : {id: window} of the open windows"""

    def __init__(self, world: Communicator, here: Communicator, leader: int) -> None:
        self.world, self.here, self.leader = world, here, leader
        self.rank, self.size = here.rank, here.size
        self.common: set[int] = set()  # ids of windows that hold one buffer for all ranks of a group
        self.windows: dict[int, HostWindow] = {}
        self.abandoned: list[Array] = []  # arrays to free, because their owner was garbage-collected
        self.persistent: ModuleType | None = None  # module `persistent`, loaded when memory is first shared
        self._owners: dict[int, tuple[int, int]] = {}
        self._cached_addresses: dict[int, tuple[Array, WindowAddress]] = {}
        self._views: dict[tuple[int, ...], Array] = {}
        self._window_count = 0

    def allocate_window(self, nbytes: int) -> int | None:
        """Create a window with `nbytes` bytes for this rank and return its id; ranks may request different sizes.
        Return None, on all ranks, if a host has too little memory. Collective over the world."""
        wanted = sum(self.here.all_gather_data(nbytes))
        if not all(self.world.all_gather_data(wanted <= count_free_shared_bytes())):
            return None
        window, number = HostWindow(self.here, nbytes), self._window_count
        self._window_count += 1
        self.windows[number] = window
        self._owners.update({id(part): (number, owner) for owner, part in enumerate(window.parts)})
        return number

    def unmap_window(self, array: Array) -> None:
        """Free this rank's mapping of the window that contains `array`, without communication. No view of the window
        may be in use."""
        address = self.find_address(array)
        assert address is not None, "only what was allocated is released"
        window = self.windows.pop(address.window)
        self.common.discard(address.window)
        for part in window.parts:
            del self._owners[id(part)]
        self._cached_addresses.clear()
        self._views.clear()
        window.free_memory()

    def free_abandoned_windows(self) -> None:
        """Free the windows of arrays whose owner was garbage-collected, unless they have already been freed."""
        with suppress(IndexError):  # raised when the list is empty: another thread may have taken the last entry
            while True:
                array = self.abandoned.pop()
                if self.find_address(array) is not None:
                    self.unmap_window(array)

    def find_address(self, array: Array) -> WindowAddress | None:
        """Return the location of an array in shared memory, or None if it is not in a window. The locations of known
        array objects are cached."""
        known = self._cached_addresses.get(id(array))
        if known is not None:
            return known[1]
        address = self._search_window_address(array)
        if address is not None:  # caching keeps an array alive, so large arrays outside of windows are not cached
            if len(self._cached_addresses) >= 4096:
                self._cached_addresses.clear()
            self._cached_addresses[id(array)] = (
                array,
                address,
            )  # keeping the array prevents its id from being reused
        return address

    def _search_window_address(self, array: Array) -> WindowAddress | None:
        if not isinstance(array, np.ndarray):
            return None
        owner = self._owners.get(id(array)) or self._owners.get(id(array.base))
        if owner is None:
            return None
        part = self.windows[owner[0]].parts[owner[1]]
        return WindowAddress(*owner, get_data_pointer(array) - get_data_pointer(part))

    def view_elements(self, address: Sequence[int], start: int, size: int, dtype: np.dtype) -> Array:
        """Return a view of `size` elements, beginning at element `start`, of the array at an address (window, owner,
        offset)."""
        key = (*address, start, size, dtype.num)
        cached_view = self._views.get(key)
        if cached_view is None:
            if len(self._views) >= 4096:
                self._views.clear()
            window, owner, offset = address
            begin = offset + start * dtype.itemsize
            cached_view = self.windows[window].parts[owner][begin : begin + size * dtype.itemsize].view(dtype)
            self._views[key] = cached_view
        return cached_view

    def close(self) -> None:
        """Free all windows of this rank."""
        while self.windows:  # `while`, since garbage collection may free other windows during the loop
            self.windows.popitem()[1].free_memory()
        self._owners.clear()
        self._cached_addresses.clear()
        self._views.clear()
        if self.here is not self.world:
            self.here.close()


def _make_store_fence() -> Callable[[], None]:
    """Return a function that makes this rank's stores visible to other ranks in the order in which they are executed.

    On x86, where stores are ordered, it does nothing. Elsewhere it releases and reacquires a lock, which orders
    earlier stores before the release and later ones after the acquisition.
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return lambda: None
    lock = threading.Lock()
    lock.acquire()

    def order_stores() -> None:
        lock.release()
        lock.acquire()

    return order_stores


def count_free_shared_bytes() -> int:
    """Return the free shared memory of this host in bytes, less RESERVED_BYTES. Return 2^62 on systems where shared
    memory has no separate limit."""
    if not os.path.isdir(SHARED_MEMORY_FOLDER):
        return 1 << 62
    status = os.statvfs(SHARED_MEMORY_FOLDER)
    return max(status.f_bavail * status.f_frsize - RESERVED_BYTES, 0)


BOARD_SLOTS = 64
"""Number of collectives in flight at a time; the next one reuses the slot of the oldest."""
RECORD_HEAD_WORDS = 8
"""64-bit words of a record before its payload: posted, finished, and words about the call. One cache line."""
MAX_PAYLOAD_BYTES = 128
"""Bytes that the payload of every record can hold: enough for what ranks exchange about a step."""


class CollectiveBoard:
    """A board in shared memory on which each rank of `comm` posts a record of each collective; all ranks must run on
    one host. Creating it is collective."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._record = (
            RECORD_HEAD_WORDS + -(-max(self.size, MAX_PAYLOAD_BYTES // 8) // RECORD_HEAD_WORDS) * RECORD_HEAD_WORDS
        )  # the payload has at least one word for each rank, rounded up to whole cache lines
        self._window = HostWindow(comm, BOARD_SLOTS * self._record * 8)
        self._bytes = self._window.parts
        self.addresses = self._window.addresses
        self._fence = self._window.fence
        self._words = [memoryview(part.view(np.int64)) for part in self._bytes]
        self._own_record_words = self._words[self.rank]

    def post_record(self, number: int, words: memoryview | None = None) -> int:
        """Announce that this rank's data for collective `number` may be read, at the address `words`
        (`WindowAddress.word_view`). Return the byte offset of the record in each rank's part of the board."""
        offset = number % BOARD_SLOTS * self._record
        own_record = self._own_record_words
        if words is not None:
            own_record[offset + 2 : offset + 5] = words
        self._fence()
        own_record[offset] = number
        return 8 * offset

    def has_posted(self, rank: int, number: int) -> bool:
        if self._words[rank][self._get_record_offset(number)] < number:
            return False
        self._fence()
        return True

    def read_words(self, rank: int, number: int, count: int) -> list[int]:
        """Return the first `count` words that `rank` posted with its record of collective `number`."""
        offset = self._get_record_offset(number) + 2
        return self._words[rank][offset : offset + count].tolist()

    def view_payload(self, rank: int, number: int) -> Array:
        """Return a view of the data bytes in a record, for small data that is exchanged on the board itself. The bytes
        are written before `post_record` is called and may be read once the record is posted."""
        offset = 8 * (self._get_record_offset(number) + RECORD_HEAD_WORDS)
        return self._bytes[rank][offset : offset + 8 * (self._record - RECORD_HEAD_WORDS)]

    def mark_finished(self, number: int) -> None:
        """Announce that this rank has read everything that it needs for collective `number`."""
        self._fence()
        self._own_record_words[self._get_record_offset(number) + 1] = number

    def has_finished(self, rank: int, number: int) -> bool:
        return self._words[rank][self._get_record_offset(number) + 1] >= number

    def close(self) -> None:
        self._words, self._bytes = [], []
        del self._own_record_words, self._fence
        self._window.free_memory()

    def _get_record_offset(self, number: int) -> int:
        return number % BOARD_SLOTS * self._record
