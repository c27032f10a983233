"""Messages of rank 0 on standard error beside the progress of training."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TextIO

from fsdpx.comm.backend import FakeCommunicator

__all__ = ["LOGGER", "SILENCE", "line", "say", "slow"]

SILENCE = 1.0
"""Seconds that something may take before it is named."""


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
    """A line on rank 0 of a trainer or a communicator."""
    if who.rank == 0:
        line(f"fsdpx: {text}")


@contextmanager
def slow(who: Any, what: str, outcome: Callable[[], str] = str) -> Iterator[None]:
    """If the block takes longer than a second, rank 0 says what it does, and at its end how long it took.

    Ranks that do not exist say nothing, and start no thread, for which there may be no memory. outcome: what is added
    to the end."""
    if isinstance(who, FakeCommunicator):
        yield
        return
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
            say(who, f"{what} took {perf_counter() - begin:.0f} s{outcome()}")
