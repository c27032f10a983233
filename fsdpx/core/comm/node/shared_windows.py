"""Memory that the ranks of a host share: files mapped by all of these ranks, windows in these files, and a board for
synchronization.

Each rank announces its progress on the board. No lock is needed, because a rank writes only to its own part. When its
data may be read, a rank *posts* the number of the collective and a few words that locate the data. When it has read
everything that it needs, it marks the number as *finished*. A memory fence ensures that the words become visible before
the number does."""

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
from fsdpx.core.comm.node.shared_file import create_and_map_shared_file
from fsdpx.core.comm.windows import SharedWindow

__all__ = [
    "BOARD_SLOTS", "HAS_FILE_LOCKS", "MAX_PAYLOAD_BYTES", "SHARED_MEMORY_FOLDER", "CollectiveBoard", "HostWindow",
    "MappedWindow", "NodeMemory", "SharedMapping", "WindowAddress", "count_free_shared_bytes", "get_shared_memory_id",
]  # fmt: skip

try:
    import fcntl
except ImportError:  # Microsoft Windows has no fcntl; MPI windows are used instead
    fcntl = None  # type: ignore[assignment]


HAS_FILE_LOCKS = fcntl is not None
"""Whether the operating system can lock byte ranges of a file."""

SHARED_MEMORY_FOLDER = "/dev/shm"
"""The folder in which Linux keeps files in memory."""


class SharedMapping:
    """A memory-mapped file with a part for each rank of `comm`. All these ranks must run on one host. Creating this
    object is collective.

    The file has no name, so nothing is left behind no matter how ranks end. If a rank drops this object without calling
    `close`, its mapping is still released. As long as rank r of N is alive, it holds a lock on byte N + r of the file.

    Parameters
    ----------
    comm : communicator of ranks on this host
    nbytes : size of this rank's part in bytes
    preallocate : whether to allocate the memory now, and raise ConfigError on all ranks if there is too little;
        otherwise each memory page is allocated when it is first accessed"""

    def __init__(self, comm: Communicator, nbytes: int, preallocate: bool = True) -> None:
        sizes = comm.all_gather_value(max(nbytes, 1))
        starts = [0, *accumulate(-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in sizes)]
        self.file, memory = create_and_map_shared_file(comm, starts[-1], _find_shared_memory_folder(), preallocate)
        self._end = weakref.finalize(self, os.close, self.file)
        self._end.atexit = False  # no finalizer is needed at exit, because the operating system then closes the file
        self.parts = [np.frombuffer(memory, np.uint8, n, start) for start, n in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        """Drop the array views, and close the file. The memory is unmapped once no views of it remain."""
        self.parts = []
        self._end()


class MappedWindow(SharedWindow):
    """A window for one-sided access in shared memory, with a part for each rank of `comm`. All these ranks must run on
    one host. Creating the window is collective. A file lock on byte r protects the part of rank r."""

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
    """Return an identifier that is the same in all processes that can share memory with each other: the processes of
    one host, or of one container if it has its own shared memory."""
    folder = _find_shared_memory_folder()
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat(folder).st_dev}"
    return f"{platform.node()} {folder}"


def _find_shared_memory_folder() -> str:
    return SHARED_MEMORY_FOLDER if os.path.isdir(SHARED_MEMORY_FOLDER) else tempfile.gettempdir()


RESERVED_BYTES = 4 << 20
"""Number of bytes of shared memory to leave free for the message library."""


class WindowAddress(NamedTuple):
    """The location of an array in shared memory.

    Attributes
    ----------
    window : id of the window
    owner : index (on this host) of the rank whose part of the window contains the array
    offset : byte offset of the array in that part"""

    window: int
    owner: int
    offset: int

    @property
    def word_view(self) -> memoryview:
        """This address as three 64-bit words (window, owner, offset)."""
        return np.array(self, np.int64).data


class HostWindow:
    """One allocation of shared memory, with a part for each rank of the host. All these ranks map all parts. Creating
    the window is collective.

    `fence()` orders stores: a rank that sees a store made after the fence also sees all stores made before it.
    """

    def __init__(self, here: Communicator, nbytes: int) -> None:
        self._mapping = SharedMapping(
            here, nbytes, preallocate=False
        )  # do not preallocate, so that each memory page is placed near the core that first uses it
        self.parts: list[Array] = self._mapping.parts
        self.addresses = [get_data_pointer(part) for part in self.parts]
        self.fence = _make_store_fence()

    def free_memory(self) -> None:
        """Free the memory of all parts. Arrays in this memory must not be used afterwards."""
        self.parts = []
        self._mapping.close()


class NodeMemory:
    """All windows (allocations of shared memory) on this rank's host.

    Attributes
    ----------
    world : communicator of all ranks of the job
    here : communicator of the ranks on this host, in the order of their world ranks
    leader : lowest world rank on this host, which identifies the host
    common : ids of the windows that hold one buffer shared by all ranks of a group, and not one part per rank
    windows : all open windows, by id"""

    def __init__(self, world: Communicator, here: Communicator, leader: int) -> None:
        self.world, self.here, self.leader = world, here, leader
        self.rank, self.size = here.rank, here.size
        self.common: set[int] = set()  # ids of the windows that hold a single buffer, shared by all ranks of a group
        self.windows: dict[int, HostWindow] = {}
        self.abandoned: list[Array] = []  # arrays that must be freed, because their owner has been garbage-collected
        self.persistent: ModuleType | None = None  # module `persistent`, loaded when shared memory is first allocated
        self._owners: dict[int, tuple[int, int]] = {}
        self._cached_addresses: dict[int, tuple[Array, WindowAddress]] = {}
        self._views: dict[tuple[int, ...], Array] = {}
        self._window_count = 0

    def allocate_window(self, nbytes: int) -> int | None:
        """Create a window (shared memory) with `nbytes` bytes for this rank, and return its id. Ranks may request
        different sizes. If any host has too little shared memory, return None on all ranks. Collective over the
        world."""
        wanted = sum(self.here.all_gather_value(nbytes))
        if not all(self.world.all_gather_value(wanted <= count_free_shared_bytes())):
            return None
        window, number = HostWindow(self.here, nbytes), self._window_count
        self._window_count += 1
        self.windows[number] = window
        self._owners.update({id(part): (number, owner) for owner, part in enumerate(window.parts)})
        return number

    def unmap_window(self, array: Array) -> None:
        """Free this rank's mapping of the window (shared memory) that contains `array`, without communication. Views of
        the window must no longer be in use."""
        address = self.find_window_address_of_array(array)
        assert address is not None, "only what was allocated is released"
        window = self.windows.pop(address.window)
        self.common.discard(address.window)
        for part in window.parts:
            del self._owners[id(part)]
        self._cached_addresses.clear()
        self._views.clear()
        window.free_memory()

    def free_windows_of_collected_arrays(self) -> None:
        """Free the windows (shared memory) of arrays whose owner has been garbage-collected, unless they have already
        been freed."""
        # `pop` raises IndexError if the list is empty, for example because another thread took the last entry
        with suppress(IndexError):
            while True:
                array = self.abandoned.pop()
                if self.find_window_address_of_array(array) is not None:
                    self.unmap_window(array)

    def find_window_address_of_array(self, array: Array) -> WindowAddress | None:
        """Return the location of an array in shared memory, or None if the array is not in a window. Locations are
        cached for each array object."""
        known = self._cached_addresses.get(id(array))
        if known is not None:
            return known[1]
        address = self._look_up_window_address_of_array(array)
        if address is not None:  # arrays outside of windows are not cached, because the cache would keep them alive
            if len(self._cached_addresses) >= 4096:
                self._cached_addresses.clear()
            self._cached_addresses[id(array)] = (
                array,
                address,
            )  # the cache keeps the array, so that no other array can get its id
        return address

    def _look_up_window_address_of_array(self, array: Array) -> WindowAddress | None:
        if not isinstance(array, np.ndarray):
            return None
        owner = self._owners.get(id(array)) or self._owners.get(id(array.base))
        if owner is None:
            return None
        part = self.windows[owner[0]].parts[owner[1]]
        return WindowAddress(*owner, get_data_pointer(array) - get_data_pointer(part))

    def view_elements(self, address: Sequence[int], start: int, size: int, dtype: np.dtype) -> Array:
        """Return a view of `size` elements of an array, beginning at element `start`. `address` is the array's location
        (window, owner, offset)."""
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
        """Free all windows (shared memory) of this rank."""
        # use `while`, not `for`, because garbage collection may free other windows during the loop
        while self.windows:
            self.windows.popitem()[1].free_memory()
        self._owners.clear()
        self._cached_addresses.clear()
        self._views.clear()
        if self.here is not self.world:
            self.here.close()


def _make_store_fence() -> Callable[[], None]:
    """Return a function that orders this rank's stores: a rank that sees a store made after the call also sees all
    stores made before the call.

    On x86, the function does nothing, because the processor keeps stores in order. On other machines, it releases and
    reacquires a lock: earlier stores become visible before the release, and later stores only after the acquisition.
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
    """Return the number of bytes of free shared memory on this host, minus RESERVED_BYTES. On systems where shared
    memory has no limit of its own, return 2^62."""
    if not os.path.isdir(SHARED_MEMORY_FOLDER):
        return 1 << 62
    status = os.statvfs(SHARED_MEMORY_FOLDER)
    return max(status.f_bavail * status.f_frsize - RESERVED_BYTES, 0)


BOARD_SLOTS = 64
"""Maximum number of concurrent collectives. Each collective uses one slot (space for a record). Once all slots have
been used, the next collective reuses the oldest slot."""
RECORD_HEAD_WORDS = 8
"""Number of 64-bit words before the payload of a record: the posted number, the finished number, and words about the
call. Together, they fill one cache line."""
MAX_PAYLOAD_BYTES = 128
"""Number of payload bytes that every record has room for. This is enough for the data that ranks exchange in each
step."""


class CollectiveBoard:
    """A board in shared memory on which each rank of `comm` posts a record for each collective. All these ranks must
    run on one host. Creating the board is collective."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._record = (
            RECORD_HEAD_WORDS + -(-max(self.size, MAX_PAYLOAD_BYTES // 8) // RECORD_HEAD_WORDS) * RECORD_HEAD_WORDS
        )  # the payload has at least one word for each rank, and its size is rounded up to whole cache lines
        self._window = HostWindow(comm, BOARD_SLOTS * self._record * 8)
        self._bytes = self._window.parts
        self.addresses = self._window.addresses
        self._fence = self._window.fence
        self._words = [memoryview(part.view(np.int64)) for part in self._bytes]
        self._own_record_words = self._words[self.rank]

    def post_record(self, number: int, words: memoryview | None = None) -> int:
        """Announce that other ranks may read this rank's data for collective `number`. `words` is the address of the
        data in shared memory (`WindowAddress.word_view`), or None. Return the byte offset of the record in each rank's
        part of the board."""
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
        """Return the first `count` words that rank `rank` has posted in its record for collective number `number`."""
        offset = self._get_record_offset(number) + 2
        return self._words[rank][offset : offset + count].tolist()

    def view_payload(self, rank: int, number: int) -> Array:
        """Return a view of the payload of a shared record. The payload holds small data that is exchanged in the record
        itself. The payload must be written before `post_record` is called, and may be read once the record has been
        posted."""
        offset = 8 * (self._get_record_offset(number) + RECORD_HEAD_WORDS)
        return self._bytes[rank][offset : offset + 8 * (self._record - RECORD_HEAD_WORDS)]

    def mark_finished(self, number: int) -> None:
        """Announce that this rank has read everything that it needs for collective number `number`."""
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
