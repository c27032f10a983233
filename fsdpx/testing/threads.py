"""Ranks that are threads share the user's objects: functions that run on threads which change at every bytecode."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

__all__ = ["run_interleaved", "switch_at_every_bytecode"]

_LIBRARIES = frozenset({"numpy", "numba", "llvmlite", "threading", "importlib", "contextlib", "functools"})
"""Packages whose frames are passed over: they are slow to step through, and are not what is tested."""


MAX_VISITS = 1
"""How often a thread gives way at the same bytecode: what is made once is made in the first visit, and more visits find
no more of layers that keep what one of their calls needs."""


@contextmanager
def switch_at_every_bytecode() -> Iterator[None]:
    """Offer the interpreter to other threads at every bytecode that this thread runs inside the block.

    Frames of NumPy, Numba and of the parts of Python's library that surround calls are run at full speed, and so are
    loops after their first turns."""
    before, visits = sys.gettrace(), Counter[tuple[CodeType, int]]()

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            at = frame.f_code, frame.f_lasti
            visits[at] += 1
            if visits[at] <= MAX_VISITS:
                time.sleep(0)  # gives up the lock of the interpreter
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
    """The results of functions that run at once, each on a thread that offers its turn at every bytecode.

    What one of them raises is raised here after all have ended."""
    together = threading.Barrier(len(bodies))

    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(at: int, body: Callable[[], Any]) -> None:
        together.wait()
        try:
            with switch_at_every_bytecode():
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
