"""CUDA graphs: record the work that a thread issues, and launch it any number of times.

A graph holds kernels with their arguments, so each launch uses the same memory. During recording, nothing is computed,
values cannot be read, and memory comes from a pool that the graphs share. As in PyTorch, graphs must be launched in the
order in which they were recorded. With this order, memory that was free when a graph was recorded is also free whenever
this graph is launched."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fsdpx.ext.gpu.cupy_devices import import_cupy

__all__ = ["Capture", "GraphMemory", "copy_into_fixed_memory", "get_active_capture", "make_unowned_view"]

NUMBERS_PER_BLOCK = 64
"""Number of random number streams per block. The positions of all streams in a block are copied to the GPU together."""
_thread = threading.local()


class GraphMemory:
    """The memory of CUDA graphs that are launched one after another.

    CuPy's pool reuses blocks while graphs are recorded. This class keeps all allocations of the pool alive so that the
    pool cannot return memory to the driver while a graph uses it."""

    def __init__(self) -> None:
        xp = import_cupy()
        cuda = xp.cuda
        cuda.set_pinned_memory_allocator(_allocate_pinned_or_raise_in_capture)
        # graphs use the work memory of FFT plans, so the plans must stay cached
        xp.fft.config.get_plan_cache().set_size(-1)
        self.pool = cuda.MemoryPool(self._allocate_memory)
        self.stream = cuda.Stream(non_blocking=True)
        self._kept: list[Any] = []
        self._starts: list[int] = []
        self._stops: list[int] = []

    def _allocate_memory(self, nbytes: int) -> Any:
        cuda = import_cupy().cuda
        memory = cuda.Memory(nbytes)
        self.add_range(memory, memory.ptr, nbytes)
        return cuda.MemoryPointer(memory, 0)

    def add_range(self, owner: Any, address: int, nbytes: int) -> None:
        """Add `nbytes` bytes at `address` to the graphs' memory. `owner` holds these bytes and is kept alive."""
        at = bisect_right(self._starts, address)
        self.keep(owner)
        self._starts.insert(at, address)
        self._stops.insert(at, address + nbytes)

    def keep(self, owner: Any) -> None:
        """Keep `owner` alive as long as the graphs that use its memory exist."""
        self._kept.append(owner)

    def has_address(self, address: int) -> bool:
        """Return whether an address is in the memory of the graphs."""
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._stops[at]

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return sum(self._stops) - sum(self._starts)


class Capture:
    """One CUDA graph. The context manager `recording` records it, and `launch_graph` runs it.

    A layer's random numbers depend on the step. Kernels therefore read the position in the stream of random numbers
    from memory of the GPU, and `launch_graph` writes the current position there."""

    def __init__(self, memory: GraphMemory) -> None:
        self.memory = memory
        self._graph: Any = None
        # random numbers that layers requested and no kernel has taken yet, keyed by id
        self._made: dict[int, tuple[Any, Callable[[], Any]]] = {}
        self._placed: list[Callable[[], Any]] = []
        self._blocks: list[Any] = []

    @contextmanager
    def recording(self, moment: Any) -> Iterator[None]:
        """Context manager that records the work of this thread. `moment` is the `TrainingMoment` (current step and
        position in the batch) that the layers read."""
        cuda = import_cupy().cuda
        stream = self.memory.stream
        _thread.active, moment.on_numbers = self, self._add_numbers
        try:
            with stream, cuda.using_allocator(self.memory.pool.malloc):
                stream.begin_capture()
                try:
                    yield
                finally:
                    self._graph = stream.end_capture()
        finally:
            _thread.active = moment.on_numbers = None
        if self._made:
            raise RuntimeError("its random numbers are made on the host")

    def _add_numbers(self, numbers: Any, make_again: Callable[[], Any]) -> None:
        self._made[id(numbers)] = numbers, make_again

    def make_random_position_on_device(self, numbers: Any) -> Any:
        """Return a GPU array that tells a kernel which random numbers to compute. It holds the index of the first
        number and the two words of the generator's key, as uint64."""
        self._placed.append(self._made.pop(id(numbers))[1])
        block, row = divmod(len(self._placed) - 1, NUMBERS_PER_BLOCK)
        if row == 0:
            self._blocks.append(import_cupy().empty((NUMBERS_PER_BLOCK, 3), dtype=np.uint64))
        return self._blocks[block][row]

    def launch_graph(self) -> None:
        """Run the graph on the current stream of this thread."""
        for first, block in enumerate(self._blocks):
            host = np.zeros((NUMBERS_PER_BLOCK, 3), np.uint64)
            some = self._placed[first * NUMBERS_PER_BLOCK : (first + 1) * NUMBERS_PER_BLOCK]
            for row, make_again in enumerate(some):
                numbers = make_again()
                host[row] = numbers.start, *numbers.keys
            block[...] = import_cupy().asarray(host)
        self._graph.launch()


def _allocate_pinned_or_raise_in_capture(nbytes: int) -> Any:
    """Allocate pinned memory from CuPy's pool, as CuPy does by default. Raise RuntimeError while a graph is recorded:
    CuPy would copy a host array through this memory, which may contain other values when the graph is launched."""
    if get_active_capture() is not None:
        raise RuntimeError("an array is copied from the host")
    return import_cupy().get_default_pinned_memory_pool().malloc(nbytes)


def get_active_capture() -> Capture | None:
    """Return the capture that is recording the work of this thread, or None."""
    return getattr(_thread, "active", None)


def copy_into_fixed_memory(memory: GraphMemory, array: Any) -> Any:
    """Return a copy of an array, with the same strides, in memory that is kept as long as the graphs exist."""
    xp = import_cupy()
    if any(stride < 0 for stride in array.strides):
        array = xp.ascontiguousarray(array)
    elements = 1 + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) // array.itemsize
    held = xp.empty((max(elements, 1) if array.size else 0,), dtype=array.dtype)
    memory.add_range(held, held.data.ptr, held.nbytes)
    fixed = (
        xp.lib.stride_tricks.as_strided(held, array.shape, array.strides) if array.size else held.reshape(array.shape)
    )
    fixed[...] = array
    return fixed


def make_unowned_view(array: Any) -> Any:
    """Return a view of an array that does not keep the array's memory alive, so that the pool may reuse this memory."""
    if not array.size:
        return array
    xp = import_cupy()
    pointer = xp.cuda.MemoryPointer(xp.cuda.UnownedMemory(array.data.ptr, array.nbytes, None), 0)
    return xp.ndarray(array.shape, array.dtype, pointer, array.strides)
