"""Run kernels on several threads. The calling thread and the workers of a pool each compute part of a call. During a
step, they flush denormals to 0.

Kernels are split by rows, columns or elements, and workers treat denormals in the same way as the calling thread, so no
result depends on the number of threads or on which thread computed it. Numba's `prange` is not used for two reasons.
First, its default threading layer ("workqueue") ends the process when two threads call it at once; ranks that run as
threads would do so. Second, the way it splits work depends on the number of threads.

Processors compute far more slowly with denormals (numbers below 1.2e-38 in float32 or 2.2e-308 in float64). Vanishing
gradients, their squares in an optimizer, and the far tail of a softmax consist largely of denormals. GPUs and
TensorFlow flush denormals to 0 as well. fsdpx does not flush denormals on processors other than x86, or without Numba.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError

__all__ = [
    "MIN_PARALLEL_SIZE", "MIN_PIECE_ELEMENTS", "flush_denormals", "get_threads", "parallel_for_columns",
    "parallel_for_range", "parallel_for_rows", "run_tasks", "set_threads", "split_range",
]  # fmt: skip


class flush_denormals:  # noqa: N801
    """Context manager inside which this thread treats denormals as 0."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        control = _load_control_register_module()
        self._before = None if control is None else control.flush_denormals()

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _load_control_register_module().restore_control_register(self._before)


@functools.cache
def _load_control_register_module() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from fsdpx.core.array.kernels.compiled import scalar as register

    for kind in (np.float32, np.float64):
        np.finfo(kind)  # compute the limits now: NumPy 1 would warn if it computed them while denormals are flushed
    return register


MIN_PIECE_ELEMENTS = 1 << 16
"""Minimum number of elements per piece when a call is split over threads."""
MIN_PARALLEL_SIZE = 1 << 18
"""Minimum number of elements at which splitting a call pays off. A pass over this number of elements takes 80 us,
whereas waking a thread and getting its answer takes 30 us."""
# number of pieces per thread; with several small pieces instead of one, a worker that wakes up late delays the call
# less
PER_THREAD = 4

# arrays are split at multiples of this many elements, so that threads never write to the same cache line
PIECE_ALIGNMENT = 64

_threads = 1
_started = 0
_lock = threading.Lock()
_calls: SimpleQueue[_ParallelCall] = SimpleQueue()


def get_threads() -> int:
    """Return the number of threads that kernels are split over."""
    return _threads


def set_threads(n: int) -> None:
    """Set the number of threads that this process splits kernels over, including the calling thread."""
    global _threads
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"set_threads({n!r}): a number of threads, 1 or more, is needed")
    _threads = n


def split_range(size: int, grain: int = MIN_PIECE_ELEMENTS, line: int = PIECE_ALIGNMENT) -> list[tuple[int, int]]:
    """Split [0, size) into parts (start, stop) of at least `grain` elements, with boundaries at multiples of `line`.
    Return a single part if there is only one thread."""
    count = min(size // max(grain, 1), _threads * PER_THREAD) if _threads > 1 else 1
    if count < 2:
        return [(0, size)]
    step = -(-size // (count * line)) * line
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def parallel_for_rows(function: Callable[..., Any], arrays: tuple[Any, ...], *rest: Any, work: int = 0) -> None:
    """Run `function(*arrays, *rest)`. If there is enough work, dim 0 of the arrays is split over threads.

    `work` is the number of elements that the entire call processes; 0 means the size of the first array.
    """
    size = arrays[0].shape[0]
    elements = work or arrays[0].size
    if _threads == 1 or elements < MIN_PARALLEL_SIZE or size < 2:
        function(*arrays, *rest)
        return
    width = max(elements // size, 1)
    line = PIECE_ALIGNMENT if width == 1 else 1
    run_tasks(
        function,
        [
            (*(a[start:stop] for a in arrays), *rest)
            for start, stop in split_range(size, MIN_PIECE_ELEMENTS // width, line)
        ],
    )


def parallel_for_columns(function: Callable[..., Any], rows: Any, *rest: Any) -> None:
    """Run `function(start, stop, rows, *rest)` for ranges [start, stop) that together cover all columns of the array
    `rows` (n, columns).

    Use this for sums over rows: each column is summed in row order, no matter how the columns are split.
    """
    size = rows.shape[1]
    if _threads == 1 or rows.size < MIN_PARALLEL_SIZE or size < 2 * PIECE_ALIGNMENT:
        function(0, size, rows, *rest)
        return
    step = -(-size // (_threads * PIECE_ALIGNMENT)) * PIECE_ALIGNMENT
    run_tasks(function, [(start, min(start + step, size), rows, *rest) for start in range(0, size, step)])


def parallel_for_range(function: Callable[..., Any], start: int, stop: int, *rest: Any) -> None:
    """Run `function(first, last, *rest)` on ranges of equal size that together cover [start, stop), one range per
    thread."""
    if _threads == 1 and start < stop:
        function(start, stop, *rest)
        return
    edges = [start + (stop - start) * i // _threads for i in range(_threads + 1)]
    run_tasks(function, [(a, b, *rest) for a, b in zip(edges, edges[1:], strict=False) if a < b])


def run_tasks(function: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> None:
    """Run `function(*piece)` for every piece (a tuple of arguments), on several threads and in any order. Return when
    all calls are done.

    The function should be compiled and release the GIL. All pieces are run even if one of them raises an error, and the
    first error is raised at the end. Any thread may call this at any time, even from within a piece: the caller runs
    pieces of its own call and never waits for a worker that is busy with another call.
    """
    workers = min(_threads, len(pieces)) - 1
    if workers < 1:
        for piece in pieces:
            function(*piece)
        return
    _ensure_workers(workers)
    job = _ParallelCall(function, pieces)
    for _ in range(workers):
        _calls.put(job)
    errors = list(job.run_pieces_and_yield_errors())
    errors += [job.finished.get() for _ in range(len(pieces) - len(errors))]
    for error in errors:
        if error is not None:
            raise error


class _ParallelCall:
    """The state of one call to `run_tasks`. Threads take pieces from a deque, so that each piece is taken by only one
    thread. Workers report each finished piece in the queue `finished`.

    `control` is the control register of the caller's vector unit. Workers copy it, because results depend on whether
    denormals are flushed: flushing can turn Inf into NaN.
    """

    __slots__ = ("control", "finished", "function", "pieces")

    def __init__(self, function: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> None:
        self.function = function
        self.pieces = deque(pieces)
        self.control = (
            None if _load_control_register_module() is None else _load_control_register_module().read_control_register()
        )
        self.finished: SimpleQueue[BaseException | None] = SimpleQueue()

    def run_pieces_and_yield_errors(self) -> Iterator[BaseException | None]:
        """Run pieces until none is left. For each piece, yield its exception, or None."""
        while True:
            try:
                piece = self.pieces.popleft()
            except IndexError:
                return
            yield self._run_piece(piece)

    def run_as_worker(self) -> None:
        """Run pieces in a worker thread, and report each finished piece."""
        if self.control is not None:
            _load_control_register_module().restore_control_register(self.control)
        for result in self.run_pieces_and_yield_errors():
            self.finished.put(result)

    def _run_piece(self, piece: tuple[Any, ...]) -> BaseException | None:
        try:
            self.function(*piece)
        except BaseException as error:
            return error
        return None


def _ensure_workers(workers: int) -> None:
    """Start worker threads until there are `workers` of them. The threads sleep between calls, and end with the
    process."""
    global _started
    if _started >= workers:
        return
    with _lock:
        for n in range(_started, workers):
            threading.Thread(target=_run_worker, args=(_calls,), name=f"fsdpx kernel {n + 1}", daemon=True).start()
        _started = max(_started, workers)


def _run_worker(calls: SimpleQueue[_ParallelCall]) -> None:
    while True:
        calls.get().run_as_worker()


def _reset_after_fork() -> None:
    """Reset the pool in a forked child process, which has no worker threads and may have inherited a held lock."""
    global _started, _lock, _calls
    _started, _lock, _calls = 0, threading.Lock(), SimpleQueue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
