"""Messages to the user, through one logger, and what takes long enough to be named while it lasts."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, TextIO

from fsdpx.errors import printable

__all__ = [
    "LOGGER", "SILENCE", "TIMER", "Count", "Slow", "bytes_text", "last_words", "line", "on_terminal", "ranks_text",
    "say", "shorten", "slow", "table",
]  # fmt: skip

SILENCE = 1.0
"""Seconds that something may take before it is named."""
TIMER = "fsdpx timer"
"""The thread that names it."""
ANEW = "\r\x1b[K"
"""Writes the line of a terminal anew."""
Count = Callable[[int, int], None]
"""Told how many are done, and of how many."""


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes each line in one piece to the current standard error."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


LOGGER = logging.getLogger("fsdpx")
"""All messages go through it; `logging.getLogger("fsdpx").handlers` may be replaced."""
if not LOGGER.handlers and LOGGER.level == logging.NOTSET:  # else the program has said where messages go
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
def slow(speaks: bool, what: str, outcome: Callable[[], str] = str) -> Iterator[Count]:
    """If the block takes longer than `SILENCE`, a rank that speaks says what it does, and at its end how long it took.
    Others start no thread, for which a rank that does not exist may have no memory. outcome: is added to the end.

    The block gets a function (done, total) that says how far it is: on a terminal in place, elsewhere in a few lines,
    each after three times as long as the one before."""
    if not speaks:
        yield lambda done, total: None
        return
    shown = Slow(what)
    timer = threading.Timer(SILENCE, shown.show)
    timer.name, timer.daemon = TIMER, True
    timer.start()
    try:
        yield shown.count
    finally:
        timer.cancel()
        shown.end(outcome)


class Slow:
    """What takes long: shown for the first time by a timer, then when it is counted."""

    def __init__(self, what: str) -> None:
        self.what, self.reached, self.again = what, "", 0.0
        self.begin, self.lock = perf_counter(), threading.Lock()

    def show(self) -> None:
        with self.lock:
            if on_terminal():
                sys.stderr.write(f"{ANEW}fsdpx: {self.what}{self.reached} ...")
                sys.stderr.flush()
            else:
                line(f"fsdpx: {self.what}{self.reached} ...")
            self.again = 3 * (perf_counter() - self.begin)

    def count(self, done: int, total: int) -> None:
        self.reached = f" {done}/{total}"
        if self.again and (on_terminal() or perf_counter() - self.begin > self.again):
            self.show()

    def end(self, outcome: Callable[[], str]) -> None:
        with self.lock:
            if self.again:
                if on_terminal():
                    sys.stderr.write(ANEW)
                line(f"fsdpx: {self.what} took {perf_counter() - self.begin:.0f} s{outcome()}")


def bytes_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.2f} {unit}"
        n /= 1024
    raise AssertionError


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows under a line below the first one, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [_row(row, widths) for row in rows]
    return printable("\n".join([lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])]))


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    right = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *right])


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3" or "ranks 0, 2"."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def shorten(value: Any) -> str:
    """A value as text in one line, for errors."""
    try:
        first, *more = repr(value).splitlines() or [""]
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({error})"
    return first if not more and len(first) < 100 else f"{first[:80]}... ({type(value).__name__})"
