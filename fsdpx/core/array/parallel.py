"""Kernel threads of this process: the calling thread and a pool of workers run the pieces of a call, with denormals
flushed to 0 during a step.

Kernels are split by rows, columns or elements, and workers treat denormals as the calling thread does, so that no
result depends on which thread computed it or on how many there are. Numba's own `prange` is not used: its default layer
("workqueue") ends the process when two threads call it at once, as thread ranks do, and it would tie the split to the
number of threads.

Processors compute with denormals far more slowly. Vanishing gradients, their squares in an optimizer and the far tail
of a softmax are full of them (below 1.2e-38 in float32, 2.2e-308 in float64). GPUs and TensorFlow flush them to 0, too.
On processors other than x86, and without Numba, they are not flushed.
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
    "parallel_for_rows", "run_tasks", "set_threads", "split_range",
]  # fmt: skip


class flush_denormals:  # noqa: N801
    """Treat denormals as 0 in this thread within the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        control = _load_control_register()
        self._before = None if control is None else control.flush_denormals()

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _load_control_register().restore_control_register(self._before)


@functools.cache
def _load_control_register() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from fsdpx.core.array.kernels.compiled import scalar as register

    for kind in (np.float32, np.float64):
        np.finfo(kind)  # NumPy 1 computes it on first use, and would warn if denormals are flushed then
    return register


MIN_PIECE_ELEMENTS = 1 << 16
"""Minimum elements of a piece."""
MIN_PARALLEL_SIZE = 1 << 18
"""Elements from which splitting a call pays: a pass over these takes 80 us, waking a thread and its answer 30 us."""
PER_THREAD = 4  # pieces per thread: a worker that wakes late, or shares its core, delays the others less
PIECE_ALIGNMENT = 64  # splits fall on multiples of this many elements, so that two threads never write one cache line

_threads = 1
_started = 0
_lock = threading.Lock()
_calls: SimpleQueue[_ParallelCall] = SimpleQueue()


def get_threads() -> int:
    """Return the number of threads that work on one kernel."""
    return _threads


def set_threads(n: int) -> None:
    """Set the number of threads, including the calling one, that work on each kernel of this process."""
    global _threads
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"set_threads({n!r}): a number of threads, 1 or more, is needed")
    _threads = n


def split_range(size: int, grain: int = MIN_PIECE_ELEMENTS, line: int = PIECE_ALIGNMENT) -> list[tuple[int, int]]:
    """Return [0, size) as pieces (start, stop) of at least `grain`, split at multiples of `line`; one piece with one
    thread."""
    count = min(size // max(grain, 1), _threads * PER_THREAD) if _threads > 1 else 1
    if count < 2:
        return [(0, size)]
    step = -(-size // (count * line)) * line
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def parallel_for_rows(function: Callable[..., Any], arrays: tuple[Any, ...], *rest: Any, work: int = 0) -> None:
    """Run `function(*arrays, *rest)`, with the arrays split along dim 0 if that pays.

    `work`: elements that the whole call processes; 0: the size of the first array.
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
    """Run `function(start, stop, rows, *rest)` for ranges of columns [start, stop) that cover all columns of rows (n,
    columns).

    For sums over rows: each column is added in the order of the rows, whatever the split.
    """
    size = rows.shape[1]
    if _threads == 1 or rows.size < MIN_PARALLEL_SIZE or size < 2 * PIECE_ALIGNMENT:
        function(0, size, rows, *rest)
        return
    step = -(-size // (_threads * PIECE_ALIGNMENT)) * PIECE_ALIGNMENT
    run_tasks(function, [(start, min(start + step, size), rows, *rest) for start in range(0, size, step)])


def run_tasks(function: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> None:
    """Run `function(*piece)` for every piece, in any order and on any thread; return when all are done.

    Meant for compiled functions that release the GIL. All pieces are run even if one raises; the first error is raised
    at the end. Any thread may call this at any time, even from within a piece: the caller runs pieces of its own call,
    so it never waits for a worker that is busy elsewhere.
    """
    workers = min(_threads, len(pieces)) - 1
    if workers < 1:
        for piece in pieces:
            function(*piece)
        return
    _start_workers(workers)
    job = _ParallelCall(function, pieces)
    for _ in range(workers):
        _calls.put(job)
    errors = list(job.run_pieces())
    errors += [job.finished.get() for _ in range(len(pieces) - len(errors))]
    for error in errors:
        if error is not None:
            raise error


class _ParallelCall:
    """One call of `run_tasks`. The deque hands each piece to one thread only; workers report each piece in `finished`.

    `control`: control register of the caller's vector unit, which workers copy: flushed denormals turn Inf into NaN.
    """

    __slots__ = ("control", "finished", "function", "pieces")

    def __init__(self, function: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> None:
        self.function = function
        self.pieces = deque(pieces)
        self.control = None if _load_control_register() is None else _load_control_register().read_control_register()
        self.finished: SimpleQueue[BaseException | None] = SimpleQueue()

    def run_pieces(self) -> Iterator[BaseException | None]:
        """Run pieces until none is left; yield an error or None for each."""
        while True:
            try:
                piece = self.pieces.popleft()
            except IndexError:
                return
            yield self._run_piece(piece)

    def run_as_worker(self) -> None:
        """Run pieces in a worker thread and report each."""
        if self.control is not None:
            _load_control_register().restore_control_register(self.control)
        for result in self.run_pieces():
            self.finished.put(result)

    def _run_piece(self, piece: tuple[Any, ...]) -> BaseException | None:
        try:
            self.function(*piece)
        except BaseException as error:
            return error
        return None


def _start_workers(workers: int) -> None:
    """Start workers until there are at least this many; they sleep between calls and end with the process."""
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
    """Reset the pool in a child process: it has none of its parent's threads, and may have inherited a held lock."""
    global _started, _lock, _calls
    _started, _lock, _calls = 0, threading.Lock(), SimpleQueue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
