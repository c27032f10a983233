"""A value on its way to this rank."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from fsdpx.comm.communicator import Handle

__all__ = ["Transfer"]


class Transfer:
    """`wait` ends the transfer and gives the value.

    issued, landed: when the transfer began, and when this rank saw its end. busy: seconds of the time between in which
    this rank moved it on or waited for it; the rest was computed over."""

    __slots__ = ("busy", "finish", "handle", "issued", "landed")

    def __init__(self, handle: Handle, finish: Callable[[], Any]) -> None:
        self.handle = handle
        self.finish = finish
        self.issued = perf_counter()
        self.landed = 0.0
        self.busy = 0.0

    def wait(self) -> Any:
        begin = perf_counter()
        self.handle.wait()
        self._note(begin)
        return self.finish()

    def test(self) -> bool:
        """Move the transfer on; whether it is complete."""
        begin = perf_counter()
        done = self.handle.test()
        if self._note(begin) and not done:
            self.landed = 0.0
        return done

    def _note(self, begin: float) -> bool:
        """Whether the transfer was still under way at `begin`."""
        under_way = self.landed == 0.0
        if under_way:
            self.landed = perf_counter()
            self.busy += self.landed - begin
        return under_way
