"""Helpers for testing objects that are shared by ranks that run as threads. They run functions in threads, and Python
can switch between these threads at every bytecode."""

import dis
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

__all__ = ["run_interleaved", "switching_at_every_bytecode"]

_LIBRARIES = frozenset("numpy numba llvmlite threading importlib contextlib functools dataclasses typing abc".split())
"""Packages whose frames are not traced: tracing them is slow, and they are not under test."""
_LOCAL = "LOAD_FAST STORE_FAST LOAD_CONST PUSH_NULL PRECALL KW_NAMES RESUME COPY SWAP POP_TOP RETURN_VALUE".split()
_LOCAL_OPERATIONS = {code for name, code in dis.opmap.items() if name.startswith(tuple(_LOCAL))}
"""Bytecodes that use only local variables and the stack. Other threads can't tell whether a switch comes before or
after them."""


@contextmanager
def switching_at_every_bytecode() -> Iterator[None]:
    """Return a context manager that lets other threads run at every bytecode that this thread executes and that may
    use objects of other threads.

    Threads do not switch in frames of NumPy, Numba, or standard library modules that wrap calls. They also do not
    switch at a bytecode that has already been executed, for example in a loop. One visit is enough to find two kinds of
    errors: errors in the lazy creation of objects, which happens on the first visit, and layers that incorrectly store
    the data of a call in their own attributes."""
    before, tracers = sys.gettrace(), dict[CodeType, Any]()

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in tracers:
            library = frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES
            tracers[frame.f_code] = None if library else _make_tracer(frame.f_code)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return tracers[frame.f_code]

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def _make_tracer(code: CodeType) -> Any:
    """Return a trace function for frames of one code object. It sleeps at the first visit of each bytecode."""
    unvisited = {at for at, operation in enumerate(code.co_code) if operation not in _LOCAL_OPERATIONS}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in unvisited:
            unvisited.discard(frame.f_lasti)
            time.sleep(0)  # sleeping releases the GIL
        return trace

    return trace


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
