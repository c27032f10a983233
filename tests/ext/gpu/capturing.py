"""Graphs of the stand-in for CuPy. While a stream is captured nothing is computed: what operations would write is put
back when the capture ends, and what they return holds garbage until the graph is launched. A launch repeats them on
the same memory. Memory comes from a pool that hands freed blocks out again, and arrays that a graph reads must live."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["OF_DRIVER", "Capturing", "Graph", "at_address", "owner_of", "using_allocator"]

GARBAGE = 0x7F
READS = {"item", "tolist", "tobytes", "allclose", "array_equal"}
"""Functions that give numbers to Python."""
WAITS = {"nonzero", "flatnonzero", "argwhere", "unique", "argsort", "sort", "lexsort"}
"""Functions in which CuPy waits for the stream: shapes that depend on values, and Thrust."""
PRODUCTS = {"matmul", "dot", "vdot", "inner", "tensordot", "einsum"}
_thread = threading.local()


class Memory:
    """An allocation of the driver."""

    def __init__(self, size: int) -> None:
        self.size, self.bytes = size, np.full(max(size, 1), GARBAGE, np.uint8)
        self.ptr = self.bytes.ctypes.data


class UnownedMemory:
    """Memory that others keep."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Block:
    """Memory of a pool as long as someone refers to it; then the pool has it again. by: the capture that took it."""

    by: Any = None

    def __init__(self, pool: MemoryPool, pointer: MemoryPointer, size: int) -> None:
        self.pool, self.pointer, self.size = pool, pointer, size

    def __del__(self) -> None:
        self.pool.free.append((self.size, self.pointer))


class MemoryPool:
    def __init__(self, allocator: Callable[[int], MemoryPointer]) -> None:
        self.allocator = allocator
        self.free: list[tuple[int, MemoryPointer]] = []

    def malloc(self, size: int) -> Block:
        size = -(-max(size, 1) // 512) * 512
        fitting = min((one for one in self.free if one[0] >= size), key=lambda one: one[0], default=None)
        if fitting is None:
            return Block(self, self.allocator(size), size)
        self.free.remove(fitting)
        return Block(self, fitting[1], fitting[0])

    def free_all_blocks(self) -> None:
        self.free.clear()


OF_DRIVER = Memory, MemoryPointer, MemoryPool, UnownedMemory
"""What `cupy.cuda` has of memory."""


@contextmanager
def using_allocator(allocator: Callable[[int], Any]) -> Iterator[None]:
    _thread.allocator = allocator
    try:
        yield
    finally:
        del _thread.allocator


def at_address(address: int, shape: Any, dtype: Any, strides: Any, owner: Any = None) -> np.ndarray:
    """An array that keeps nothing alive but `owner`."""
    dtype = np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    reach = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + dtype.itemsize
    memory: Any = (ctypes.c_char * (high - low)).from_address(address + low)
    memory.owner = owner
    return np.ndarray(shape, dtype, memory, -low, strides)


def like(array: np.ndarray, owner: Any = None) -> np.ndarray:
    return at_address(array.ctypes.data, array.shape, array.dtype, array.strides, owner)


def owner_of(array: Any) -> Any:
    """What keeps the memory of an array; None if nothing does."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return getattr(array, "owner", None) if isinstance(array, ctypes.Array) else array


class Graph:
    def __init__(self, work: list[Callable[[], Any]], alive: list[weakref.ref[Any]]) -> None:
        self.work, self.alive = work, alive

    def launch(self, stream: Any = None) -> None:
        assert all(one() is not None for one in self.alive), "cudaErrorIllegalAddress: a graph reads freed memory"
        for one in self.work:
            one()


class Capturing:
    """What a stream holds while it is captured."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []
        self.before: list[tuple[np.ndarray, np.ndarray]] = []
        self.alive: dict[int, weakref.ref[Any]] = {}
        self.invalid = False

    def refuse(self, what: str, invalidates: bool = False) -> None:
        self.invalid |= invalidates
        raise RuntimeError(f"{what}: the stream is capturing")

    def end(self) -> Graph:
        for array, content in reversed(self.before):
            array[...] = content
        if self.invalid:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        return Graph(self.work, list(self.alive.values()))

    def look_at(self, array: np.ndarray) -> np.ndarray:
        """The same array, of which nothing is kept alive. What it holds is put back at the end."""
        owner = owner_of(array)
        if getattr(owner, "by", None) is not self:
            self.keep(like(array))
            if owner is not None and not isinstance(owner, Block):
                self.alive[id(owner)] = weakref.ref(owner)
        return like(array)

    def look_into(self, value: Any, looked: list[np.ndarray]) -> Any:
        """Look at arrays, also inside tuples and lists. (A function that called itself would keep them in a cycle.)"""
        if isinstance(value, tuple | list):
            return type(value)(self.look_into(one, looked) for one in value)
        if not isinstance(value, np.ndarray):
            return value
        looked.append(value)
        return self.look_at(value)

    def keep(self, array: np.ndarray) -> None:
        """Put back what an array holds when the capture ends."""
        self.before.append((array, array.copy()))

    def issue(self, work: Callable[[], Any]) -> None:
        work()
        self.work.append(work)

    def call(self, function: Any, given: Any, options: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS | WAITS:
            self.refuse(name, name in WAITS)
        if name in PRODUCTS:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        looked: list[np.ndarray] = []
        if isinstance(getattr(function, "__self__", None), np.ndarray):  # a method, of the array at the same place
            function = getattr(self.look_into(function.__self__, looked), name)
        raw, raw_options = self.look_into(given, looked), {k: self.look_into(v, looked) for k, v in options.items()}
        if name == "getitem" and any(one.dtype == bool for one in looked[1:]):
            self.refuse("a mask as an index", True)
        result = function(*raw, **raw_options)
        several = isinstance(result, tuple | list)
        placed = [self.place(one, looked) for one in (result if several else [result])]
        targets = [target for _, target in placed]

        def again() -> None:
            found = function(*raw, **raw_options)
            for target, one in zip(targets, found if several else [found], strict=True):
                if target is not None:
                    target[...] = one

        if not name.startswith("empty"):
            self.work.append(again)
        return type(result)(one for one, _ in placed) if several else placed[0][0]

    def place(self, result: Any, looked: list[np.ndarray]) -> tuple[Any, Any]:
        """(what a call returns, where a launch writes it): views lie where they did, and new arrays in the pool."""
        if isinstance(result, np.generic):
            result = np.asarray(result)
        if not isinstance(result, np.ndarray):
            return result, None
        for one in looked:
            if np.may_share_memory(result, one):
                return like(result, owner_of(one)), None
        block = _thread.allocator(result.nbytes)
        block.by = self
        address, model = block.pointer.ptr, np.empty_like(result)
        if sorted(model.strides) != sorted(result.strides):
            model = np.empty(result.shape, result.dtype)
        raw = at_address(address, result.shape, result.dtype, model.strides)
        raw[...] = result
        self.before.append((at_address(address, (block.size,), np.uint8, (1,)), np.full(block.size, GARBAGE, np.uint8)))
        return like(raw, block) if result.size else np.empty(result.shape, result.dtype), raw
