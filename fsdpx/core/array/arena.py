"""Memory of a rank: the arena, which allocates all its large buffers, and a heap that keeps freed pages.

Kept buffers live as long as the trainer. Lent buffers live for part of a program. Their lifetimes are known before the
program runs, so they are packed into one slab, in which buffers that are never alive together share bytes. Memory that
a step frees stays with the process, so the next step has no page faults.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

__all__ = [
    "ALIGN", "Arena", "BufferLifetime", "SlabPlan", "WindowMemory", "assign_offsets", "get_data_pointer",
    "keep_freed_memory", "trim_heap",
]  # fmt: skip

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, see <malloc.h>
NEVER = -1


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, instead of returning arrays of more than 128 KiB to the system at once.
    Return whether this works. It works only on Linux with glibc; elsewhere nothing changes.

    This saves time, because a new page costs a fault and is zeroed by the kernel, which for 4 KiB takes about as long
    as filling the page. The price is that the memory of the process stays at its peak.
    """
    library = _load_glibc()
    return library is not None and bool(library.mallopt(MMAP_MAX, 0)) and bool(library.mallopt(TRIM_THRESHOLD, NEVER))


def trim_heap() -> None:
    """Return memory that is free now to the system, once, since a step does not need what was used before training."""
    library = _load_glibc()
    if library is not None:
        library.malloc_trim(0)


def _load_glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None  # musl has mallopt only as a stub


ALIGN = 64  # bytes: a cache line, and the widest vector register
BLOCK_BYTES = 32 << 20  # bytes of a block from which kept buffers are sliced


@dataclass(frozen=True)
class BufferLifetime:
    """A buffer of `nbytes` bytes that is alive from action `start` to action `stop`, both inclusive. `name` identifies
    the buffer."""

    name: Hashable
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class SlabPlan:
    """Layout of a slab. `offsets`: offset of each buffer in bytes, by the name of the buffer. `nbytes`: size of the
    slab. `peak`: maximum number of bytes that are alive at the same time."""

    offsets: dict[Hashable, int] = field(default_factory=dict)
    nbytes: int = 0
    peak: int = 0


def assign_offsets(lives: Iterable[BufferLifetime]) -> SlabPlan:
    """Return offsets such that no two buffers that are alive together overlap.

    Each buffer takes the lowest gap that fits it. Buffers are placed from largest to smallest, or in order of `start`,
    whichever needs less memory. For buffers of equal size both orders are optimal (interval coloring). In a chain of
    buffers of nearly equal size, the first and the largest may compete for the same offset.
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
    """Return `nbytes` zero bytes mapped from the operating system. Pages that are never written take neither memory nor
    time, whereas `numpy.zeros` may get memory that was used before and must first be cleared."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows
    try:
        pages = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(f"unable to allocate {nbytes} bytes for what a rank keeps: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class WindowMemory(Protocol):
    """Memory for buffers that other ranks read: windows of a `NodeCommunicator`. All methods except `free_shared_later`
    are collective."""

    @property
    def xp(self) -> Any:
        """Namespace of the arrays that this memory allocates."""
        ...

    def allocate_shared(self, nbytes: int) -> Any:
        """Return `nbytes` bytes as an array of uint8, or None on all ranks if there is not enough memory."""
        ...

    def free_shared(self, array: Any) -> None:
        """Free an array that `allocate_shared` returned."""
        ...

    def free_shared_later(self, arrays: list[Any]) -> None:
        """Mark arrays of `allocate_shared` as free after their arena has been garbage-collected. This sends nothing,
        since it is called on this rank only, from any thread and at any time."""
        ...


class Arena:
    """Owner of the buffers of one rank. `xp`: the namespace that allocates them (NumPy, CuPy, or shape-only arrays).

    `memory`: memory shared with other ranks, in which the slab is allocated if there is enough shared memory. Then all
    ranks need slab plans of equal size.
    """

    def __init__(self, xp: Any, memory: WindowMemory | None = None) -> None:
        self.xp = xp
        self.memory = memory
        self.kept: dict[Hashable, Any] = {}
        self.blocks: list[Any] = []  # shared blocks: the slab, and blocks of kept buffers
        if memory is not None:
            weakref.finalize(self, memory.free_shared_later, self.blocks).atexit = False
        self.slab: Any = None
        self.slab_nbytes = 0
        self.slab_shared = False
        self.generation = 0  # incremented when the slab moves or a kept buffer is dropped, which makes views stale
        self.views: dict[tuple[int, int, np.dtype], Any] = {}
        self._rest = np.empty(0, np.uint8)  # unused rest of the block from which kept buffers are sliced

    def get_or_create_buffer(self, name: Hashable, size: int, dtype: Any, *, temporary: bool = False) -> Any:
        """Return a zeroed buffer of `size` elements that lives until `drop_buffer`. The same name returns the same
        buffer.

        `temporary`: whether the buffer will be dropped before other buffers, so it must not share a block with them.
        """
        if name not in self.kept:
            make = self._allocate_aligned_zeros if self.xp is np and not temporary else self.xp.zeros
            self.kept[name] = make((size,), dtype=dtype)
        return self.kept[name]

    def _allocate_aligned_zeros(self, shape: tuple[int], dtype: Any) -> Any:
        """Return a zeroed buffer that starts at a cache line, whereas arrays of NumPy start 16 bytes after one. Many
        buffers are sliced from one block, so that even small ones are stored in huge pages."""
        used = shape[0] * np.dtype(dtype).itemsize
        nbytes = -(-used // ALIGN) * ALIGN
        if self._rest.nbytes < nbytes:
            self._rest = _map_zero_pages(max(nbytes, BLOCK_BYTES))
        buffer, self._rest = self._rest[:used].view(dtype), self._rest[nbytes:]
        return buffer

    def allocate(self, size: int, dtype: Any) -> Any:
        """Return an uninitialized buffer of `size` elements that lives as long as it is referenced."""
        if self.xp is not np:
            return self.xp.empty((size,), dtype=dtype)
        nbytes = size * np.dtype(dtype).itemsize
        block = np.empty(nbytes + ALIGN, np.uint8)
        start = -get_data_pointer(block) % ALIGN
        return block[start : start + nbytes].view(dtype)

    def register_buffer(self, name: Hashable, buffer: Any) -> None:
        """Keep `buffer`, which was allocated elsewhere, under this name."""
        self.kept[name] = buffer

    def drop_buffer(self, name: Hashable) -> None:
        if self.kept.pop(name, None) is not None:
            self.generation += 1

    def grow_slab(self, plan: SlabPlan) -> None:
        """Make the slab large enough for a plan. Call it only between programs, when no lent buffer is alive.
        Collective with shared `memory`."""
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
        """Free the slab before a larger one is allocated."""
        old, self.slab = self.slab, None
        if self.slab_shared and self.memory is not None:
            self.blocks[:] = [block for block in self.blocks if block is not old]
            self.memory.free_shared(old)

    def close(self) -> None:
        """Drop all buffers and free shared memory. Views of them must not be used afterwards."""
        self.kept.clear()
        self.views.clear()
        self._free_slab()
        self._rest = np.empty(0, np.uint8)
        self.slab_nbytes, self.slab_shared = 0, False
        while self.blocks and self.memory is not None:
            self.memory.free_shared(self.blocks.pop())

    def view_slab(self, offset: int, size: int, dtype: Any) -> Any:
        """Return a view of `size` elements of the slab that begins at byte `offset`. The same arguments return the same
        object."""
        key = (offset, size, np.dtype(dtype))
        if key not in self.views:
            self.views[key] = self._slice_slab(offset, size, dtype)
        return self.views[key]

    def _slice_slab(self, offset: int, size: int, dtype: Any) -> Any:
        start = offset + (-get_data_pointer(self.slab)) % ALIGN
        nbytes = size * np.dtype(dtype).itemsize
        return self.slab[start : start + nbytes].view(dtype)


def get_data_pointer(array: Any) -> int:
    """Return the address of an array's first byte, on the host or a GPU. Return 0 for arrays without data."""
    if hasattr(array, "ctypes"):
        return int(array.ctypes.data)
    return int(array.data.ptr) if hasattr(array, "data") else 0
