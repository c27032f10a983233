"""The memory of a rank: the arena, which allocates all large buffers of the rank, and the C heap, which is configured
not to return freed memory to the system.

Some buffers live as long as the trainer. All others are needed only during part of a step. A step runs a program, which
is a list of actions. The lifetimes of these short-lived buffers are known before the program runs, so they are packed
into a single allocation, the slab. In the slab, buffers that are never alive at the same time share memory. Memory
freed by a step stays with the process, so the next step causes no page faults."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field

__all__ = [
    "ALIGN", "Arena", "BufferLifetime", "SlabPlan", "WindowMemory", "assign_offsets", "get_data_pointer",
    "make_malloc_keep_freed_memory", "trim_heap",
]  # fmt: skip

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, see <malloc.h>
NEVER = -1


def make_malloc_keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations, instead of returning the memory of large arrays
    (above 128 KiB) to the system. Return whether the setting succeeded. It succeeds only on Linux with glibc; other
    systems are left unchanged.

    Keeping the memory saves time, because each new memory page costs a page fault, in which the kernel fills the page
    with zeros. For a page of 4 KiB, the fault takes about as long as writing data to the entire page. The cost is that
    the process's memory use never drops below its peak."""
    library = _load_glibc()
    return library is not None and bool(library.mallopt(MMAP_MAX, 0)) and bool(library.mallopt(TRIM_THRESHOLD, NEVER))


def trim_heap() -> None:
    """Return free heap memory to the system. This function is called once before training, because steps do not need
    the memory that was used during setup."""
    library = _load_glibc()
    if library is not None:
        library.malloc_trim(0)


def _load_glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    # require glibc, because musl's mallopt is a stub without effect
    return library if hasattr(library, "gnu_get_libc_version") else None


ALIGN = 64  # size in bytes of a cache line and of the widest vector register
BLOCK_BYTES = 32 << 20  # size in bytes of a block that several buffers share


@dataclass(frozen=True)
class BufferLifetime:
    """A buffer of `nbytes` bytes. It is needed from the action with index `start` to the action with index `stop` of a
    program (list of actions in a step), inclusive. `name` identifies the buffer."""

    name: Hashable
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class SlabPlan:
    """Memory layout of a slab, which is one allocation for many buffers.

    Attributes
    ----------
    offsets : the offset of each buffer in bytes, keyed by buffer name
    nbytes : size of the slab in bytes
    peak : maximum total size in bytes of the buffers that are alive at the same time
    """

    offsets: dict[Hashable, int] = field(default_factory=dict)
    nbytes: int = 0
    peak: int = 0


def assign_offsets(lives: Iterable[BufferLifetime]) -> SlabPlan:
    """Assign memory offsets to buffers, so that no two buffers that are alive at the same time overlap.

    Each buffer is placed in the lowest gap that is large enough. Buffers are placed either from largest to smallest or
    in order of `start`, whichever needs less memory. If all buffers have the same size, both orders are optimal
    (interval coloring). Otherwise the slab (the allocation that contains all buffers) may be larger than the peak (the
    maximum total size of the buffers alive at the same time), even if the sizes are nearly equal.
    """
    born = sorted(lives, key=lambda life: life.start)
    peak, best = _compute_peak_bytes(born), SlabPlan()
    for order in (sorted(born, key=lambda life: -_get_aligned_size(life)), born):
        plan = _assign_offsets_in_order(order, peak)
        if not best.offsets or plan.nbytes < best.nbytes:
            best = plan
        if best.nbytes == peak:
            break
    return best


def _assign_offsets_in_order(order: Sequence[BufferLifetime], peak: int) -> SlabPlan:
    offsets: dict[Hashable, int] = {}
    placed: list[tuple[int, BufferLifetime]] = []
    for life in order:
        taken = sorted(
            (at, at + _get_aligned_size(o)) for at, o in placed if life.start <= o.stop and o.start <= life.stop
        )
        offsets[life.name] = _find_lowest_gap(taken, _get_aligned_size(life))
        placed.append((offsets[life.name], life))
    assert len(offsets) == len(order), "each life has a name of its own"
    return SlabPlan(offsets, max((at + _get_aligned_size(life) for at, life in placed), default=0), peak)


def _get_aligned_size(life: BufferLifetime) -> int:
    return -(-life.nbytes // ALIGN) * ALIGN


def _find_lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    offset = 0
    for start, stop in taken:
        if offset + size <= start:
            break
        offset = max(offset, stop)
    return offset


def _compute_peak_bytes(lives: Sequence[BufferLifetime]) -> int:
    changes: dict[int, int] = defaultdict(int)
    for life in lives:
        changes[life.start] += _get_aligned_size(life)
        changes[life.stop + 1] -= _get_aligned_size(life)
    now = best = 0
    for position in sorted(changes):
        now += changes[position]
        best = max(best, now)
    return best


def _map_zero_pages(nbytes: int) -> Any:
    """Return `nbytes` bytes of zeroed memory, mapped from the operating system. Pages that are never written take
    neither memory nor time, whereas `numpy.zeros` may reuse freed memory, which has to be cleared first."""
    # Windows does not have these flags
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(f"unable to allocate {nbytes} bytes for what a rank keeps: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux provides huge pages on request
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class WindowMemory(Protocol):
    """An allocator of memory that other ranks can read: shared windows of a `NodeCommunicator`. All methods except
    `free_shared_locally` are collective."""

    @property
    def xp(self) -> Any:
        """Array module (NumPy or CuPy) of the arrays in this memory."""
        ...

    def allocate_shared(self, nbytes: int) -> Any:
        """Return `nbytes` bytes as a uint8 array. Return None on all ranks if there is not enough memory."""
        ...

    def free_shared(self, array: Any) -> None:
        """Free an array that `allocate_shared` returned."""
        ...

    def free_shared_locally(self, arrays: list[Any]) -> None:
        """Free arrays that `allocate_shared` returned. This method is called when the arena that used them is
        garbage-collected. It frees them immediately if that is safe, otherwise later. This method must not communicate,
        because garbage collection happens on this rank only, in any thread and at any time."""
        ...


class Arena:
    """Allocator and owner of the large buffers of one rank.

    Parameters
    ----------
    xp : array module that allocates the buffers (NumPy, CuPy, or shape-only arrays)
    memory : memory shared with other ranks, in which the slab (memory for short-lived buffers) is allocated if there is
        enough space. If `memory` is given, all ranks must use slab plans of equal size
    """

    def __init__(self, xp: Any, memory: WindowMemory | None = None) -> None:
        self.xp = xp
        self.memory = memory
        self.kept: dict[Hashable, Any] = {}
        self.blocks: list[Any] = []  # blocks of shared memory that must be freed
        if memory is not None:
            weakref.finalize(self, memory.free_shared_locally, self.blocks).atexit = False
        self.slab: Any = None
        self.slab_nbytes = 0
        self.slab_shared = False
        # incremented when the slab moves or a buffer is dropped, because earlier views are then invalid
        self.generation = 0
        self.views: dict[tuple[int, int, np.dtype], Any] = {}
        self._rest = np.empty(0, np.uint8)  # unused remainder of the block that new buffers are taken from

    def get_or_create_buffer(self, name: Hashable, size: int, dtype: Any, *, temporary: bool = False) -> Any:
        """Return the buffer with this name, which lives until `drop_buffer` is called. If there is none, create one of
        `size` elements, filled with zeros.

        Set `temporary` if the buffer will be dropped before other buffers. It then gets a separate allocation, since a
        block that several buffers share can be freed only as a whole.
        """
        if name not in self.kept:
            make = self._allocate_aligned_zeros if self.xp is np and not temporary else self.xp.zeros
            self.kept[name] = make((size,), dtype=dtype)
        return self.kept[name]

    def _allocate_aligned_zeros(self, shape: tuple[int], dtype: Any) -> Any:
        """Return a buffer of zeros whose address is a multiple of the cache line size. (NumPy's own arrays start 16
        bytes past a cache line boundary.)

        Many buffers are slices of one large block, so that the system can store even small buffers in huge pages."""
        used = shape[0] * np.dtype(dtype).itemsize
        nbytes = -(-used // ALIGN) * ALIGN
        if self._rest.nbytes < nbytes:
            self._rest = _map_zero_pages(max(nbytes, BLOCK_BYTES))
        buffer, self._rest = self._rest[:used].view(dtype), self._rest[nbytes:]
        return buffer

    def allocate(self, size: int, dtype: Any) -> Any:
        """Return an uninitialized buffer of `size` elements that is freed when it is no longer referenced."""
        if self.xp is not np:
            return self.xp.empty((size,), dtype=dtype)
        nbytes = size * np.dtype(dtype).itemsize
        block = np.empty(nbytes + ALIGN, np.uint8)
        start = -get_data_pointer(block) % ALIGN
        return block[start : start + nbytes].view(dtype)

    def register_buffer(self, name: Hashable, buffer: Any) -> None:
        """Register `buffer`, which was allocated elsewhere, under the name `name`."""
        self.kept[name] = buffer

    def drop_buffer(self, name: Hashable) -> None:
        if self.kept.pop(name, None) is not None:
            self.generation += 1

    def grow_slab(self, plan: SlabPlan) -> None:
        """Reallocate the slab (memory for short-lived buffers) if it is too small for `plan`. Call this only between
        steps, when none of these buffers is in use. Collective if the memory is shared."""
        if plan.nbytes > self.slab_nbytes:
            self.views.clear()
            self._free_slab()
            if self.memory is not None:
                self.slab = self.memory.allocate_shared(plan.nbytes + ALIGN)
            self.slab_shared = self.slab is not None
            if self.slab_shared:
                self.blocks.append(self.slab)
            else:
                self.slab = self.xp.empty((plan.nbytes + ALIGN,), dtype="uint8")
            self.slab_nbytes = plan.nbytes
            self.generation += 1

    def _free_slab(self) -> None:
        """Free the slab (memory for short-lived buffers), before a larger one is allocated or when the arena is
        closed."""
        old, self.slab = self.slab, None
        if self.slab_shared and self.memory is not None:
            self.blocks[:] = [block for block in self.blocks if block is not old]
            self.memory.free_shared(old)

    def close(self) -> None:
        """Drop all buffers and free shared memory. Views of the buffers must not be used afterwards."""
        self.kept.clear()
        self.views.clear()
        self._free_slab()
        self._rest = np.empty(0, np.uint8)
        self.slab_nbytes, self.slab_shared = 0, False
        while self.blocks and self.memory is not None:
            self.memory.free_shared(self.blocks.pop())

    def view_slab(self, offset: int, size: int, dtype: Any) -> Any:
        """Return a view of `size` elements that begins at byte `offset` of the slab (memory for short-lived buffers).
        Calls with the same arguments return the same array object."""
        key = (offset, size, np.dtype(dtype))
        if key not in self.views:
            self.views[key] = self._slice_slab(offset, size, dtype)
        return self.views[key]

    def _slice_slab(self, offset: int, size: int, dtype: Any) -> Any:
        start = offset + (-get_data_pointer(self.slab)) % ALIGN
        nbytes = size * np.dtype(dtype).itemsize
        return self.slab[start : start + nbytes].view(dtype)


def get_data_pointer(array: Any) -> int:
    """Return the memory address of an array's first byte, on the host or on a device; 0 for arrays without data."""
    if isinstance(array, np.ndarray):
        try:
            # fast, but raises an error for read-only arrays and for arrays with gaps
            start: Any = ctypes.c_char.from_buffer
            return ctypes.addressof(start(array))
        except (TypeError, ValueError):
            return array.__array_interface__["data"][0]
    return int(array.data.ptr) if hasattr(array, "data") else 0
