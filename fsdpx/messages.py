"""Messages to the user, through one logger, and what takes long enough to be named while it lasts."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, TextIO

__all__ = ["LOGGER", "SILENCE", "TIMER", "last_words", "line", "on_terminal", "say", "slow"]

SILENCE = 1.0
"""Seconds that something may take before it is named."""
TIMER = "fsdpx timer"
"""The thread that names it."""


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes each line in one piece to the current standard error."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


LOGGER = logging.getLogger("fsdpx")
"""All messages go through it; `logging.getLogger("fsdpx").handlers` may be replaced."""
LOGGER.addHandler(_StandardError())
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False


def line(text: str) -> None:
    """A line on standard error, and wherever else the logger of fsdpx writes."""
    LOGGER.info("%s", text)


def say(who: Any, text: str) -> None:
    """A line on rank 0 of a trainer's host or of a communicator."""
    if who.rank == 0:
        line(f"fsdpx: {text}")


def last_words(text: str = "") -> None:
    """Write out what a rank has printed, and on standard error what it says before it ends the others. They are ended
    also where that cannot be: there is no stream, it is closed, or its disk is full."""
    with suppress(Exception):
        sys.stdout.flush()
    streams: tuple[Any, ...] = sys.stderr, sys.__stderr__, sys.stdout
    for stream in streams:
        with suppress(Exception):
            stream.write(text)
            stream.flush()
            return


def on_terminal() -> bool:
    """Whether standard error is one; it may not be there at all."""
    with suppress(Exception):
        return bool(sys.stderr.isatty())
    return False


@contextmanager
def slow(speaks: bool, what: str, outcome: Callable[[], str] = str) -> Iterator[None]:
    """If the block takes longer than `SILENCE`, a rank that speaks says what it does, and at its end how long it took.
    Others start no thread, for which a rank that does not exist may have no memory. outcome: is added to the end."""
    if not speaks:
        yield
        return
    begin, named = perf_counter(), threading.Event()

    def name() -> None:
        named.set()
        line(f"fsdpx: {what} ...")

    timer = threading.Timer(SILENCE, name)
    timer.name, timer.daemon = TIMER, True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if named.is_set():
            line(f"fsdpx: {what} took {perf_counter() - begin:.0f} s{outcome()}")
