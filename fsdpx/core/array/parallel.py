"""The threads of this process for kernels: pieces of one call, run by the calling thread and a pool of workers; in each
of them denormal numbers count as 0 while a step runs.

Kernels cut their arrays by rows, columns or elements, and workers treat denormals as the calling thread does, so that
no result depends on which thread computed it or on how many there are. Numba's own `prange` is not used: its default
layer ("workqueue") ends the process when two threads call it at once, as thread ranks do, and it would tie the cut to
the number of threads.

Processors compute with denormals far slower. Vanishing gradients, their squares in an optimiser and the far tail of a
softmax are full of them (below 1.2e-38 in float32, 2.2e-308 in float64). GPUs and TensorFlow flush them to 0 too. On
processors other than x86, and without Numba, nothing is changed."""

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
    "MIN_PARALLEL_SIZE",
    "MIN_PIECE_ELEMENTS",
    "flush_denormals",
    "get_threads",
    "parallel_for_columns",
    "parallel_for_rows",
    "run_tasks",
    "set_threads",
    "split_range",
]  # fmt: skip


class flush_denormals:  # noqa: N801
    """Within the block, denormals count as 0 in this thread."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        control = _load_control_register()
        self._before = None if control is None else control.flush_denormals()

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _load_control_register().restore_control(self._before)


@functools.cache
def _load_control_register() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from fsdpx.core.array.kernels.compiled import scalar as register

    for kind in (np.float32, np.float64):
        np.finfo(kind)  # NumPy 1 would compute it when first asked, and warn where denormals count as 0
    return register


MIN_PIECE_ELEMENTS = 1 << 16
"""Elements of a piece, at least."""
MIN_PARALLEL_SIZE = 1 << 18
"""Elements from which a call is worth cutting: a pass over these takes 80 us, waking a thread and its answer 30 us."""
PER_THREAD = 4  # pieces per thread: a worker that wakes late, or shares its core, delays the others less
PIECE_ALIGNMENT = 64  # cuts fall on multiples of this many elements, so that two threads never write one cache line

_threads = 1
_started = 0
_lock = threading.Lock()
_calls: SimpleQueue[_ParallelCall] = SimpleQueue()


def get_threads() -> int:
    """How many threads work on one kernel."""
    return _threads


def set_threads(n: int) -> None:
    """From now on `n` threads, the calling one included, work on each kernel of this process."""
    global _threads
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"set_threads({n!r}): a number of threads, 1 or more, is needed")
    _threads = n


def split_range(size: int, grain: int = MIN_PIECE_ELEMENTS, line: int = PIECE_ALIGNMENT) -> list[tuple[int, int]]:
    """[0, size) as pieces (start, stop) of at least `grain`, cut at multiples of `line`; one piece at one thread."""
    count = min(size // max(grain, 1), _threads * PER_THREAD) if _threads > 1 else 1
    if count < 2:
        return [(0, size)]
    step = -(-size // (count * line)) * line
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def parallel_for_rows(function: Callable[..., Any], arrays: tuple[Any, ...], *rest: Any, work: int = 0) -> None:
    """`function(*arrays, *rest)`, with the arrays cut along dim 0 where that pays.

    work: elements of the whole call, that of the first array if 0."""
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
    """`function(start, stop, rows, *rest)` for columns [start, stop) of rows (n, columns), all of them together.

    For sums over rows: each column is added in the order of the rows, whatever the cut."""
    size = rows.shape[1]
    if _threads == 1 or rows.size < MIN_PARALLEL_SIZE or size < 2 * PIECE_ALIGNMENT:
        function(0, size, rows, *rest)
        return
    step = -(-size // (_threads * PIECE_ALIGNMENT)) * PIECE_ALIGNMENT
    run_tasks(function, [(start, min(start + step, size), rows, *rest) for start in range(0, size, step)])


def run_tasks(function: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> None:
    """`function(*piece)` for every piece, in any order and on any thread; returns when all are done.

    Meant for compiled functions that release the GIL. All pieces are run even if one raises; the first error is raised
    at the end. Any thread may call this at any time, from within a piece too: the caller runs pieces of its own call,
    so it never waits for a worker that is busy elsewhere."""
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
    """One call of `run`. The deque gives each piece to one thread only; workers report each piece in `finished`.

    control: of the caller's vector unit, which workers take over: denormals that count as 0 turn Inf into NaN."""

    __slots__ = ("control", "finished", "function", "pieces")

    def __init__(self, function: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> None:
        self.function = function
        self.pieces = deque(pieces)
        self.control = None if _load_control_register() is None else _load_control_register().read_control()
        self.finished: SimpleQueue[BaseException | None] = SimpleQueue()

    def run_pieces(self) -> Iterator[BaseException | None]:
        """Run pieces until none is left; an error or None for each."""
        while True:
            try:
                piece = self.pieces.popleft()
            except IndexError:
                return
            yield self._run_piece(piece)

    def run_as_worker(self) -> None:
        """A worker's part."""
        if self.control is not None:
            _load_control_register().restore_control(self.control)
        for result in self.run_pieces():
            self.finished.put(result)

    def _run_piece(self, piece: tuple[Any, ...]) -> BaseException | None:
        try:
            self.function(*piece)
        except BaseException as error:
            return error
        return None


def _start_workers(workers: int) -> None:
    """Have at least this many workers; they sleep between calls and end with the process."""
    global _started
    if _started >= workers:
        return
    with _lock:
        for n in range(_started, workers):
            threading.Thread(target=_serve_calls, args=(_calls,), name=f"fsdpx kernel {n + 1}", daemon=True).start()
        _started = max(_started, workers)


def _serve_calls(calls: SimpleQueue[_ParallelCall]) -> None:
    while True:
        calls.get().run_as_worker()


def _after_fork() -> None:
    """A child process has none of its parent's threads, and may have a lock that one of them held."""
    global _started, _lock, _calls
    _started, _lock, _calls = 0, threading.Lock(), SimpleQueue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
