"""CUDA graphs: kernels that are issued once and launched again, all at once, at the same addresses.

A graph knows addresses, not arrays. What it makes lies in memory of its own, which stays as long as the graphs do;
within it, memory that nothing holds any more goes to what is captured next. So graphs that share it are right only if
they are launched in the order in which they were captured, and whatever is kept longer must be copied out."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any

from fsdpx.cuda.devices import cupy, is_on_gpu
from fsdpx.cuda.streams import capture

__all__ = ["GraphMemory"]


class GraphMemory:
    """The memory of graphs that are launched in the order of their capture, on the GPU that is current when it is made.

    Arrays made inside `captured` lie here. `lasting` gives them again without holding their memory: what a graph writes
    each time, at its address."""

    def __init__(self) -> None:
        cuda = cupy().cuda
        chunks: list[tuple[int, int, Any]] = []  # held: a pool that is full gives back what looks free to it

        def chunk(nbytes: int) -> Any:
            pointer = cuda.MemoryPointer(cuda.Memory(nbytes), 0)
            insort(chunks, (int(pointer.ptr), nbytes, pointer.mem), key=lambda one: one[0])
            return pointer

        self._chunks = chunks
        self._pool = cuda.MemoryPool(chunk)
        self._stream = cuda.Stream(non_blocking=True)
        self._lasting: dict[tuple[Any, ...], Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes taken from the GPU."""
        return sum(nbytes for _, nbytes, _ in self._chunks)

    def captured(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph of what `body` issues, and what it returns; errors as `fsdpx.cuda.streams.capture`."""
        with cupy().cuda.using_allocator(self._pool.malloc):
            return capture(self._stream, body)

    def like(self, array: Any) -> Any:
        """Memory for what comes from elsewhere, in the shape and order of `array`; None: it has gaps, or overlaps."""
        cuda = cupy().cuda
        with cuda.using_allocator(self._pool.malloc), self._stream:  # a pool has blocks by stream
            made = cupy().empty_like(array)
        return made if made.strides == array.strides else None

    def owns(self, array: Any) -> bool:
        """Whether it lies here."""
        return is_on_gpu(array) and self._chunk_of(int(array.data.ptr)) is not None

    def lasting(self, array: Any) -> Any:
        """The same memory as another array, of which it is no part of the lifetime; the same object each time. What
        lies elsewhere is given back as it is."""
        address = int(array.data.ptr)
        chunk = self._chunk_of(address)
        if chunk is None:
            return array
        key = (address, array.shape, array.dtype, array.strides)
        if key not in self._lasting:
            cuda = cupy().cuda
            start, nbytes, memory = chunk
            whole = cuda.UnownedMemory(start, nbytes, memory)
            pointer = cuda.MemoryPointer(whole, address - start)
            self._lasting[key] = cupy().ndarray(array.shape, array.dtype, pointer, array.strides)
        return self._lasting[key]

    def _chunk_of(self, address: int) -> tuple[int, int, Any] | None:
        at = bisect_right(self._chunks, address, key=lambda one: one[0]) - 1
        found = self._chunks[at] if at >= 0 else None
        return found if found is not None and address < found[0] + found[1] else None
