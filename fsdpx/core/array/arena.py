"""Memory: the arena, which is one allocation for every large buffer of a rank, and a heap that keeps its pages.

Kept buffers live as long as the trainer. Lent buffers live for part of a program: their lifetimes are known before it
runs, so they are packed into one slab in which buffers that are never alive together share bytes. What a step frees
stays with the process for the next step, which then has no page faults."""

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
    "ALIGN",
    "Arena",
    "BufferLifetime",
    "SlabPlan",
    "WindowMemory",
    "assign_offsets",
    "data_pointer",
    "keep_pages",
    "trim_heap",
]

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt, see <malloc.h>
NEVER = -1


def keep_pages() -> bool:
    """Ask the C library to keep freed memory, instead of giving arrays of more than 128 KiB back to the system at once.

    A new page costs a fault and is zeroed by the kernel, at 4 KiB about as long as filling it. In return the process
    keeps its peak of memory. Linux with glibc; elsewhere nothing is changed and the result is False."""
    library = _load_glibc()
    return library is not None and bool(library.mallopt(MMAP_MAX, 0)) and bool(library.mallopt(TRIM_THRESHOLD, NEVER))


def trim_heap() -> None:
    """Give what is free now back to the system, once: what was alive before training is not what a step needs."""
    library = _load_glibc()
    if library is not None:
        library.malloc_trim(0)


def _load_glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None  # musl knows mallopt by name only


ALIGN = 64  # bytes: a cache line, and the widest vector register
BLOCK_BYTES = 32 << 20  # bytes from which kept buffers are cut


@dataclass(frozen=True)
class BufferLifetime:
    """A buffer of `nbytes` that is alive from action `start` to action `stop`, both included; `name` tells it apart."""

    name: Hashable
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class SlabPlan:
    """offsets: name -> first byte in the slab. nbytes: size of the slab. peak: the most bytes alive at one time."""

    offsets: dict[Hashable, int] = field(default_factory=dict)
    nbytes: int = 0
    peak: int = 0


def assign_offsets(lives: Iterable[BufferLifetime]) -> SlabPlan:
    """Offsets such that no two buffers alive together overlap: one after the other at the lowest place that is free,
    largest first or in order of birth, whichever takes less. For buffers of one size both are optimal (interval
    colouring); of a chain of nearly equal ones the first of all and the largest may want the same place."""
    born = sorted(lives, key=lambda life: life.start)
    peak, best = _compute_peak_bytes(born), SlabPlan()
    for order in (sorted(born, key=lambda life: -_aligned_size(life)), born):
        plan = _assign_in_order(order, peak)
        if not best.offsets or plan.nbytes < best.nbytes:
            best = plan
        if best.nbytes == peak:
            break
    return best


def _assign_in_order(order: Sequence[BufferLifetime], peak: int) -> SlabPlan:
    offsets: dict[Hashable, int] = {}
    placed: list[tuple[int, BufferLifetime]] = []
    for life in order:
        taken = sorted((at, at + _aligned_size(o)) for at, o in placed if life.start <= o.stop and o.start <= life.stop)
        offsets[life.name] = _find_lowest_gap(taken, _aligned_size(life))
        placed.append((offsets[life.name], life))
    assert len(offsets) == len(order), "each life has a name of its own"
    return SlabPlan(offsets, max((at + _aligned_size(life) for at, life in placed), default=0), peak)


def _aligned_size(life: BufferLifetime) -> int:
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
        changes[life.start] += _aligned_size(life)
        changes[life.stop + 1] -= _aligned_size(life)
    now = best = 0
    for position in sorted(changes):
        now += changes[position]
        best = max(best, now)
    return best


def _map_zero_pages(nbytes: int) -> Any:
    """Zeros from the operating system: what is never written takes no memory, and no time. NumPy's may come from
    memory used before, which the C library then clears, all of it."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows
    try:
        pages = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(f"unable to allocate {nbytes} bytes for what a rank keeps: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class WindowMemory(Protocol):
    """Where buffers can lie that other ranks read: windows of a `NodeCommunicator`. All calls are collective."""

    @property
    def xp(self) -> Any:
        """The namespace of the arrays that it gives."""
        ...

    def allocate_shared(self, nbytes: int) -> Any:
        """This many bytes as an array of uint8; None on all ranks if there is no room."""
        ...

    def free_shared(self, array: Any) -> None:
        """Give back what `share` gave."""
        ...

    def free_shared_later(self, arrays: list[Any]) -> None:
        """Give back what `share` gave to an arena that was forgotten, on this rank alone, whichever thread finds that
        and when: nothing is sent."""
        ...


class Arena:
    """Owner of the buffers of one rank. xp: the namespace that allocates (NumPy, CuPy, or shape-only).

    memory: shared with other ranks; the slab lies there if there is room. All ranks then lend equally large plans."""

    def __init__(self, xp: Any, memory: WindowMemory | None = None) -> None:
        self.xp = xp
        self.memory = memory
        self.kept: dict[Hashable, Any] = {}
        self.blocks: list[Any] = []  # of shared memory: the slab, and those in which kept buffers lie
        if memory is not None:
            weakref.finalize(self, memory.free_shared_later, self.blocks).atexit = False
        self.slab: Any = None
        self.slab_nbytes = 0
        self.slab_shared = False
        self.generation = 0  # grows when the slab moves or a kept buffer goes: views made before are stale
        self.views: dict[tuple[int, int, np.dtype], Any] = {}
        self._rest = np.empty(0, np.uint8)  # of the block that kept buffers are cut from

    def keep(self, name: Hashable, size: int, dtype: Any, *, passing: bool = False) -> Any:
        """A zeroed buffer of `size` elements that lives until `drop`; the same name returns the same buffer.

        passing: it will be dropped before the others, so its memory must not be a part of theirs."""
        if name not in self.kept:
            make = self._allocate_zeros if self.xp is np and not passing else self.xp.zeros
            self.kept[name] = make((size,), dtype=dtype)
        return self.kept[name]

    def _allocate_zeros(self, shape: tuple[int], dtype: Any) -> Any:
        """From a cache line on, where NumPy's own begin 16 bytes behind one, and many in one block, so that small ones
        lie in huge pages, too."""
        used = shape[0] * np.dtype(dtype).itemsize
        nbytes = -(-used // ALIGN) * ALIGN
        if self._rest.nbytes < nbytes:
            self._rest = _map_zero_pages(max(nbytes, BLOCK_BYTES))
        buffer, self._rest = self._rest[:used].view(dtype), self._rest[nbytes:]
        return buffer

    def allocate(self, size: int, dtype: Any) -> Any:
        """A buffer of `size` elements that lives as long as it is referenced; its contents are arbitrary."""
        if self.xp is not np:
            return self.xp.empty((size,), dtype=dtype)
        nbytes = size * np.dtype(dtype).itemsize
        block = np.empty(nbytes + ALIGN, np.uint8)
        start = -data_pointer(block) % ALIGN
        return block[start : start + nbytes].view(dtype)

    def adopt_buffer(self, name: Hashable, buffer: Any) -> None:
        """Take `buffer`, made elsewhere, as the kept one of this name."""
        self.kept[name] = buffer

    def drop_buffer(self, name: Hashable) -> None:
        if self.kept.pop(name, None) is not None:
            self.generation += 1

    def grow_slab(self, plan: SlabPlan) -> None:
        """Make the slab large enough for a plan. Only between programs, when nothing lent is alive."""
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
        """Before there is a larger one."""
        old, self.slab = self.slab, None
        if self.slab_shared and self.memory is not None:
            self.blocks[:] = [block for block in self.blocks if block is not old]
            self.memory.free_shared(old)

    def close(self) -> None:
        """Forget all buffers and give shared memory back: no view of it may be used any more."""
        self.kept.clear()
        self.views.clear()
        self._free_slab()
        self._rest = np.empty(0, np.uint8)
        self.slab_nbytes, self.slab_shared = 0, False
        while self.blocks and self.memory is not None:
            self.memory.free_shared(self.blocks.pop())

    def view_slab(self, offset: int, size: int, dtype: Any) -> Any:
        """`size` elements of the slab from byte `offset`; the same object each time."""
        key = (offset, size, np.dtype(dtype))
        if key not in self.views:
            self.views[key] = self._slice_slab(offset, size, dtype)
        return self.views[key]

    def _slice_slab(self, offset: int, size: int, dtype: Any) -> Any:
        start = offset + (-data_pointer(self.slab)) % ALIGN
        nbytes = size * np.dtype(dtype).itemsize
        return self.slab[start : start + nbytes].view(dtype)


def data_pointer(array: Any) -> int:
    """The address of an array's first byte, on the host or a GPU; 0 for arrays without data."""
    if hasattr(array, "ctypes"):
        return int(array.ctypes.data)
    return int(array.data.ptr) if hasattr(array, "data") else 0
