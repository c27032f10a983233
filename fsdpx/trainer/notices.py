"""What rank 0 says on standard error beside the progress of training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

__all__ = ["SILENCE", "line", "say", "slow"]

SILENCE = 1.0
"""Seconds that something may take before it is named."""


def line(text: str) -> None:
    """In one piece: where output is not buffered, `print` writes the end of a line by itself, and what others write
    comes between."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def say(who: Any, text: str) -> None:
    """A line on rank 0 of a trainer or a communicator."""
    if who.rank == 0:
        line(f"fsdpx: {text}")


@contextmanager
def slow(who: Any, what: str) -> Iterator[None]:
    """If the block takes longer than a second, rank 0 says what it does, and at its end how long it took."""
    begin, named = perf_counter(), threading.Event()

    def name() -> None:
        named.set()
        say(who, f"{what} ...")

    timer = threading.Timer(SILENCE, name)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if named.is_set():
            say(who, f"{what} took {perf_counter() - begin:.0f} s; what came of it is kept on disk")
