"""GPU streams and the rules for synchronization between computation, copies and NCCL.

Layers compute on the current stream of their thread, where kernels run one after another. Copies and NCCL run
concurrently on a `SideStream`. Their work starts after all work that the thread has issued earlier, and an event marks
its end. Memory that this work uses is passed to MPI, to a layer or back to a pool only after the host has seen this
event. Before GPU memory is passed to a library without streams, such as MPI, `synchronize` is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from fsdpx.ext.gpu.cupy_devices import get_gpu_number, import_cupy, is_on_gpu, using_gpu_of_array

__all__ = ["SideStream", "StreamEvent", "allocate_pinned", "get_copy_stream_after_current", "synchronize"]

TO_GPU, TO_HOST = 1, 2  # cudaMemcpyHostToDevice and cudaMemcpyDeviceToHost of CUDA's enum cudaMemcpyKind


def synchronize() -> None:
    """Wait until the GPU has completed all work that this thread has issued."""
    import_cupy().cuda.get_current_stream().synchronize()


class SideStream:
    """A stream for work that runs concurrently with computation, on the GPU that is current when the stream is
    created."""

    def __init__(self) -> None:
        self.stream = import_cupy().cuda.Stream(non_blocking=True)

    def wait_for_current_stream(self) -> None:
        """Make all later work on this stream wait for the work that this thread has issued so far on its current
        stream."""
        cuda = import_cupy().cuda
        self.stream.wait_event(cuda.get_current_stream().record(cuda.Event(disable_timing=True)))

    @contextmanager
    def issuing_on_stream(self) -> Iterator[Any]:
        """Context manager that makes CuPy issue work on this stream, after all work that this thread has issued so far.

        Yields the event that marks the end of the work issued in the block."""
        self.wait_for_current_stream()
        end = import_cupy().cuda.Event(disable_timing=True)
        with self.stream:
            yield end
        end.record(self.stream)

    def start_copy(self, target: Any, source: Any) -> StreamEvent:
        """Start to copy the bytes of `source` to `target`, and return an event that marks the end of the copy. One of
        the two arrays must be in pinned host memory.

        Neither array may be changed or freed until the event is complete."""
        down = is_on_gpu(source)
        ends = _get_address(target), _get_address(source)
        with using_gpu_of_array(source if down else target):
            import_cupy().cuda.runtime.memcpyAsync(*ends, source.nbytes, TO_HOST if down else TO_GPU, self.stream.ptr)
            end = import_cupy().cuda.Event(disable_timing=True)
            end.record(self.stream)
        return StreamEvent(end)


class StreamEvent:
    """Handle for all work that was issued on a stream before an event."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def test(self) -> bool:
        return bool(self._event.done)

    def wait(self) -> None:
        self._event.synchronize()


def get_copy_stream_after_current(array: Any) -> SideStream:
    """Make the copy stream of the GPU that holds `array` wait for all work that this thread has issued, and return the
    stream."""
    number = get_gpu_number(array)
    assert number is not None
    with using_gpu_of_array(array):
        side = _make_side_stream(number)
        side.wait_for_current_stream()
    return side


@cache
def _make_side_stream(number: int) -> SideStream:
    """Return the copy stream of GPU `number`. Copies in both directions share this stream, so they run one after
    another."""
    return SideStream()


def allocate_pinned(nbytes: int) -> np.ndarray:
    """Return `nbytes` bytes of pinned host memory, which asynchronous copies need. CuPy reuses the memory after the
    array is freed."""
    return np.frombuffer(import_cupy().cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def _get_address(array: Any) -> int:
    return int(array.data.ptr) if is_on_gpu(array) else int(array.ctypes.data)
