"""What waits for what on a GPU: all rules of streams are here.

Layers compute on the current stream of their thread, where one kernel follows another. Whatever goes on beside that,
copies and NCCL, is on a `SideStream`: it begins behind all that the thread has issued until then, and an event marks
its end. Memory is handed on, to MPI, to a layer or back to a pool, when the host has seen that event, not before. A
library that knows no streams, as MPI, gets memory of the GPU after `synchronise`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from fsdpx.ext.gpu.cupy_devices import current_device_of, get_gpu, import_cupy, is_on_gpu

__all__ = ["SideStream", "StreamEvent", "allocate_pinned", "get_copy_stream", "synchronize"]

TO_GPU, TO_HOST = 1, 2  # cudaMemcpyKind


def synchronize() -> None:
    """Return when the GPU has done all that this thread has issued."""
    import_cupy().cuda.get_current_stream().synchronize()


class SideStream:
    """A stream beside the one that computes, on the GPU that is current when it is made."""

    def __init__(self) -> None:
        self.stream = import_cupy().cuda.Stream(non_blocking=True)

    def wait_for_current_stream(self) -> None:
        """Work issued here from now on waits for all that this thread has issued."""
        cuda = import_cupy().cuda
        self.stream.wait_event(cuda.get_current_stream().record(cuda.Event(disable_timing=True)))

    @contextmanager
    def issue_on_stream(self) -> Iterator[Any]:
        """CuPy issues here, behind what this thread has issued; the event is at the end of it."""
        self.wait_for_current_stream()
        end = import_cupy().cuda.Event(disable_timing=True)
        with self.stream:
            yield end
        end.record(self.stream)

    def start_copy(self, target: Any, source: Any) -> StreamEvent:
        """target = source, of which one is pinned memory of the host, as bytes. Both belong to the copy until it is
        done."""
        down = is_on_gpu(source)
        ends = _get_address(target), _get_address(source)
        with current_device_of(source if down else target):
            import_cupy().cuda.runtime.memcpyAsync(*ends, source.nbytes, TO_HOST if down else TO_GPU, self.stream.ptr)
            end = import_cupy().cuda.Event(disable_timing=True)
            end.record(self.stream)
        return StreamEvent(end)


class StreamEvent:
    """The handle of what a stream does up to an event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def test(self) -> bool:
        return bool(self._event.done)

    def wait(self) -> None:
        self._event.synchronize()


def get_copy_stream(array: Any) -> SideStream:
    """The stream for copies of the GPU that `array` lies on; it follows what this thread has issued."""
    number = get_gpu(array)
    assert number is not None
    with current_device_of(array):
        side = _make_side_stream(number)
        side.wait_for_current_stream()
    return side


@cache
def _make_side_stream(number: int) -> SideStream:
    """One for each GPU: there is one engine for copies each way."""
    return SideStream()


def allocate_pinned(nbytes: int) -> np.ndarray:
    """Memory of the host that the GPU copies from and to by itself; CuPy keeps it for the next request."""
    return np.frombuffer(import_cupy().cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def _get_address(array: Any) -> int:
    return int(array.data.ptr) if is_on_gpu(array) else int(array.ctypes.data)
