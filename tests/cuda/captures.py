"""Graphs of the stand-in for CuPy: while a thread captures, nothing is computed, and all that would be is written down
with its addresses. Memory that is given back is spoilt where it is given back, in a graph each time that it runs, so
that what is read too late is wrong."""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = [
    "CUDARuntimeError", "Graph", "Memory", "MemoryPointer", "MemoryPool", "UnownedMemory", "begin", "capturing", "end",
    "placed", "record", "recorded", "refuse", "using_allocator",
]  # fmt: skip

SPOILT = 0x7F
GRAIN = 512
_at = threading.local()


class CUDARuntimeError(RuntimeError):
    pass


class Graph:
    def __init__(self, work: list[Callable[[], Any]]) -> None:
        self.work = work

    def launch(self, stream: Any = None) -> None:
        refuse("a graph inside a graph")
        for one in self.work:
            one()


def capturing() -> bool:
    return getattr(_at, "tape", None) is not None


def refuse(what: str) -> None:
    """As CUDA does; the capture is void from then on."""
    if capturing():
        _at.void = True
        raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what}")


def begin() -> None:
    assert not capturing()
    _at.tape, _at.void = [], False


def end() -> Graph:
    made, _at.tape = Graph(_at.tape), None
    if _at.void:
        raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
    return made


def record(work: Callable[[], Any]) -> None:
    """To be done at each launch."""
    _at.tape.append(work)


# -- memory ------------------------------------------------------------------------------------------------------------


class Memory:
    """A part of the GPU's, spoilt when it is freed."""

    known: dict[int, weakref.ref[Memory]] = {}  # noqa: RUF012
    lock = threading.RLock()

    def __init__(self, nbytes: int, buffer: np.ndarray | None = None) -> None:
        self.buffer = np.empty(nbytes + GRAIN, np.uint8) if buffer is None else buffer
        self.buffer[:] = SPOILT
        self.start = -self.buffer.ctypes.data % GRAIN
        self.ptr, self.size = self.buffer.ctypes.data + self.start, nbytes
        with self.lock:
            self.known[self.ptr] = weakref.ref(self)

    def __del__(self) -> None:
        with self.lock:
            self.known.pop(self.ptr, None)
        self.buffer[:] = SPOILT

    def at(self, address: int, shape: Any, dtype: Any, strides: Any) -> np.ndarray:
        return np.ndarray(shape, dtype, self.buffer, address - self.ptr + self.start, strides)

    @classmethod
    def of(cls, address: int) -> Memory | None:
        with cls.lock:
            starts = sorted(cls.known)
            i = bisect.bisect_right(starts, address) - 1
            found = cls.known[starts[i]]() if i >= 0 else None
        return found if found is not None and address < found.ptr + found.size else None


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner
        assert Memory.of(ptr) is not None


class MemoryPointer:
    """block: keeps what it points to from being given back."""

    def __init__(self, mem: Any, offset: int, block: Any = None) -> None:
        self.mem, self.ptr, self.block = mem, mem.ptr + offset, block

    def array(self, shape: Any, dtype: Any, strides: Any = None) -> np.ndarray:
        if self.block is not None:
            return np.ndarray(shape, dtype, self.block, 0, strides)
        found = Memory.of(self.ptr)
        assert found is not None
        return found.at(self.ptr, shape, dtype, strides)


class MemoryPool:
    """Best fit; what is free is split, not merged. It belongs to the stream that was current when it was taken."""

    def __init__(self, allocator: Callable[[int], MemoryPointer]) -> None:
        self.allocator = allocator
        self.free: list[tuple[int, int, Any, Memory]] = []  # size, address, stream, chunk
        self.chunks: list[Memory] = []

    def malloc(self, nbytes: int) -> MemoryPointer:
        size, stream = max(-(-nbytes // GRAIN), 1) * GRAIN, _stream()
        fits = sorted((one for one in self.free if one[0] >= size and one[2] is stream), key=lambda one: one[:2])
        if fits:
            self.free.remove(fits[0])
            length, address, _, chunk = fits[0]
        else:
            made = self.allocator(size)
            length, address, chunk = size, made.ptr, made.mem
            self.chunks.append(chunk)
        if length > size:
            self.free.append((length - size, address + size, stream, chunk))
        block = (ctypes.c_char * size).from_address(address)
        weakref.finalize(block, self._give_back, size, address, stream, chunk)
        return MemoryPointer(chunk, address - chunk.ptr, block)

    def _give_back(self, size: int, address: int, stream: Any, chunk: Memory) -> None:
        self.free.append((size, address, stream, chunk))
        bytes_of = chunk.at(address, (size,), np.uint8, None)
        if capturing():
            record(lambda: bytes_of.fill(SPOILT))
        else:
            bytes_of.fill(SPOILT)


def _stream() -> Any:
    return getattr(_at, "stream", None)


@contextmanager
def current(stream: Any) -> Iterator[None]:
    before, _at.stream = _stream(), stream
    try:
        yield
    finally:
        _at.stream = before


@contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer]) -> Iterator[None]:
    before, _at.allocator = getattr(_at, "allocator", None), allocator
    try:
        yield
    finally:
        _at.allocator = before


def _allocated(like: np.ndarray) -> np.ndarray:
    allocator = getattr(_at, "allocator", None)
    if allocator is None:
        refuse("memory that is not of the graph's own pool")
    assert allocator is not None
    strides = np.empty_like(like).strides
    return allocator(like.nbytes).array(like.shape, like.dtype, strides)


def placed(result: np.ndarray) -> np.ndarray:
    """New memory from where this thread takes it."""
    return result if getattr(_at, "allocator", None) is None else _allocated(result)


# -- calls -------------------------------------------------------------------------------------------------------------

WAITING = {"nonzero", "flatnonzero", "argwhere", "unique", "argsort", "sort", "tolist", "item", "tobytes"}
"""Functions and methods for which CuPy waits for the GPU."""
PRODUCTS = {"matmul", "dot", "vdot", "inner", "tensordot", "einsum", "vecdot"}
"""Those for which CuPy calls cuBLAS, which it refuses."""


def recorded(function: Callable[..., Any], given: Any, options: dict[str, Any], into: bool = False) -> Any:
    """A call on memory, written down. What it returns is memory of its own, or a view of what it was given. into: it
    changes what it was given, and returns nothing."""
    given, options = tuple(given), dict(options)
    if into:
        later = _mapped((given, options), unowned)
        record(lambda: function(*later[0], **later[1]))
        return None
    twins: dict[int, np.ndarray] = {}
    args, named = _mapped((given, options), lambda a: twins.setdefault(id(a), _zeros(a)))
    with np.errstate(all="ignore"):
        found = function(*args, **named)
    parts = found if isinstance(found, tuple | list) else (found,)
    if any(isinstance(p, np.ndarray) and any(np.may_share_memory(p, t) for t in twins.values()) for p in parts):
        return function(*given, **options)
    made = [_allocated(np.asarray(p)) for p in parts]
    if getattr(function, "__name__", "") not in ("empty", "empty_like"):
        later, outs = _mapped((given, options), unowned), [unowned(a) for a in made]

        def work() -> None:
            results = function(*later[0], **later[1])
            for out, result in zip(outs, results if isinstance(found, tuple | list) else (results,), strict=True):
                out[...] = result

        record(work)
    return type(found)(made) if isinstance(found, tuple | list) else made[0]


def unowned(a: np.ndarray) -> np.ndarray:
    """The same memory, which this does not keep from being given back."""
    chunk = Memory.of(a.ctypes.data)
    return a if chunk is None else chunk.at(a.ctypes.data, a.shape, a.dtype, a.strides)


def _zeros(a: np.ndarray) -> np.ndarray:
    """In the strides of `a`."""
    reach = [(n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)] if a.size else []
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    return np.ndarray(a.shape, a.dtype, np.zeros(high - low + a.itemsize, np.uint8), -low, a.strides)


def _mapped(value: Any, change: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return type(value)(_mapped(part, change) for part in value) if type(value) in (tuple, list) else value
