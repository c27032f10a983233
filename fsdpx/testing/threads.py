"""Helpers for testing objects that are shared by ranks that run as threads. They run functions in threads, and Python
can switch between these threads at every bytecode."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

__all__ = ["run_interleaved", "switching_at_every_bytecode"]

_LIBRARIES = frozenset({"numpy", "numba", "llvmlite", "threading", "importlib", "contextlib", "functools"})
"""Packages whose frames are not traced: tracing them is slow, and they are not under test."""


MAX_VISITS = 1
"""Number of times that a thread yields at the same bytecode. One visit is enough to find two kinds of errors: errors in
the lazy creation of objects, which happens on the first visit, and layers that incorrectly store the data of a call in
their own attributes."""


@contextmanager
def switching_at_every_bytecode() -> Iterator[None]:
    """Return a context manager that lets other threads run at every bytecode that this thread executes.

    Threads do not switch in frames of NumPy, Numba, or standard library modules that wrap calls. They also do not
    switch at a bytecode that has already been executed `MAX_VISITS` times, for example in a loop."""
    before, visits = sys.gettrace(), Counter[tuple[CodeType, int]]()

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            at = frame.f_code, frame.f_lasti
            visits[at] += 1
            if visits[at] <= MAX_VISITS:
                time.sleep(0)  # sleeping releases the GIL
        return step

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def run_interleaved(*bodies: Callable[[], Any]) -> list[Any]:
    """Run functions concurrently, each in a thread that yields to the other threads at every bytecode. Return their
    results.

    If functions raise errors, the first error is raised after all threads have ended."""
    together = threading.Barrier(len(bodies))

    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(at: int, body: Callable[[], Any]) -> None:
        together.wait()
        try:
            with switching_at_every_bytecode():
                results[at] = body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=one) for one in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
