"""What waits for what on a GPU: all rules of streams are here.

Layers compute on the current stream of their thread, where one kernel follows another. Whatever goes on beside that,
copies and NCCL, is on a `Side`: it begins behind all that the thread has issued until then, and an event marks its end.
Memory is handed on, to MPI, to a layer or back to a pool, when the host has seen that event, not before. A library that
knows no streams, as MPI, gets memory of the GPU after `synchronise`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from fsdpx.ext.gpu.cupy_devices import cupy, gpu_of, is_on_gpu, on

__all__ = ["Landmark", "Side", "pinned", "side_of", "synchronise"]

TO_GPU, TO_HOST = 1, 2  # cudaMemcpyKind


def synchronise() -> None:
    """Return when the GPU has done all that this thread has issued."""
    cupy().cuda.get_current_stream().synchronize()


class Side:
    """A stream beside the one that computes, on the GPU that is current when it is made."""

    def __init__(self) -> None:
        self.stream = cupy().cuda.Stream(non_blocking=True)

    def follow(self) -> None:
        """Work issued here from now on waits for all that this thread has issued."""
        cuda = cupy().cuda
        self.stream.wait_event(cuda.get_current_stream().record(cuda.Event(disable_timing=True)))

    @contextmanager
    def inside(self) -> Iterator[Any]:
        """CuPy issues here, behind what this thread has issued; the event is at the end of it."""
        self.follow()
        end = cupy().cuda.Event(disable_timing=True)
        with self.stream:
            yield end
        end.record(self.stream)

    def copy(self, target: Any, source: Any) -> Landmark:
        """target = source, of which one is pinned memory of the host, as bytes. Both belong to the copy until it is
        done."""
        down = is_on_gpu(source)
        ends = _address(target), _address(source)
        with on(source if down else target):
            cupy().cuda.runtime.memcpyAsync(*ends, source.nbytes, TO_HOST if down else TO_GPU, self.stream.ptr)
            end = cupy().cuda.Event(disable_timing=True)
            end.record(self.stream)
        return Landmark(end)


class Landmark:
    """The handle of what a stream does up to an event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def test(self) -> bool:
        return bool(self._event.done)

    def wait(self) -> None:
        self._event.synchronize()


def side_of(array: Any) -> Side:
    """The stream for copies of the GPU that `array` lies on; it follows what this thread has issued."""
    number = gpu_of(array)
    assert number is not None
    with on(array):
        side = _side(number)
        side.follow()
    return side


@cache
def _side(number: int) -> Side:
    """One for each GPU: there is one engine for copies each way."""
    return Side()


def pinned(nbytes: int) -> np.ndarray:
    """Memory of the host that the GPU copies from and to by itself; CuPy keeps it for the next request."""
    return np.frombuffer(cupy().cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def _address(array: Any) -> int:
    return int(array.data.ptr) if is_on_gpu(array) else int(array.ctypes.data)
