"""Messages to the user through one logger, and progress reports for slow tasks."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, TextIO

from fsdpx.core.base import environment
from fsdpx.errors import escape_control

__all__ = [
    "COLUMNS", "LOGGER", "SILENCE_SECONDS", "TIMER_NAME", "ProgressCallback", "SlowTaskReporter",
    "flush_and_write_stderr", "format_bytes", "format_count", "format_ranks", "format_table", "is_stderr_terminal",
    "log_line", "log_on_rank0", "reporting_if_slow", "shorten_value", "wrap_for_terminal", "wrap_lines",
]  # fmt: skip

COLUMNS = 80
"""Width in characters to assume for a terminal that does not report its width."""

SILENCE_SECONDS = 1.0
"""Time in seconds after which a running task is reported."""
TIMER_NAME = "fsdpx timer"
"""Name of the thread that reports slow tasks."""
CLEAR_LINE = "\r\x1b[K"
"""Terminal sequence that clears the current line."""
ProgressCallback = Callable[..., None]
"""Function that is called with the number of items done and the total number. If the total is unknown, it is called
with only the number of items done, or with a string."""


class _StderrHandler(logging.StreamHandler[TextIO]):
    """A log handler that writes each line with a single call to the current `sys.stderr`, so that lines from different
    ranks are not mixed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return wrap_lines(text, shutil.get_terminal_size().columns) if is_stderr_terminal() else text


LOGGER = logging.getLogger("fsdpx")
"""The logger for all messages. The user may replace its handlers, `logging.getLogger("fsdpx").handlers`."""
# otherwise the user's program has configured the logger, so nothing is added
if not LOGGER.handlers and LOGGER.level == logging.NOTSET:
    LOGGER.addHandler(_StderrHandler())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


def log_line(text: str) -> None:
    """Log one line of text to fsdpx's logger, which writes to standard error by default."""
    LOGGER.info("%s", text)


def log_on_rank0(who: Any, text: str) -> None:
    """Log one line of text on rank 0 only. `who` is an object with a `rank`, such as a communicator."""
    if who.rank == 0:
        log_line(f"fsdpx: {text}")


def flush_and_write_stderr(text: str = "") -> None:
    """Flush standard output, and write `text` to standard error. Called before this rank ends all other ranks.

    Errors are ignored, because the ranks must end even if the stream is missing or closed, or its disk is full.
    """
    with suppress(Exception):
        sys.stdout.flush()
    streams: tuple[Any, ...] = sys.stderr, sys.__stderr__, sys.stdout
    for stream in streams:
        with suppress(Exception):
            stream.write(text)
            stream.flush()
            return


def is_stderr_terminal() -> bool:
    """Return whether standard error is a terminal; False if the process has no standard error."""
    with suppress(Exception):
        return bool(sys.stderr.isatty())
    return False


@contextmanager
def reporting_if_slow(
    enabled: bool, what: str, outcome: Callable[[], str] | None = str
) -> Iterator[ProgressCallback]:
    """Return a context manager for the task `what`. If the task takes longer than `SILENCE_SECONDS`, a message says
    that it is running, and a final message says how long it took.

    The context manager yields a function (done, total) that the task calls to report its progress. On a terminal, the
    progress is updated in place; elsewhere it is printed as a few lines, at intervals that triple each time.

    Parameters
    ----------
    enabled : whether to report anything. If False, no thread is started, since a simulated rank may not have enough
        memory for it
    what : name of the task
    outcome : function that returns text to append to the last line; if None, there is no last line, because the caller
        prints a result
    """
    if not enabled:
        yield lambda *reached: None
        return
    shown = SlowTaskReporter(what)
    timer = threading.Timer(SILENCE_SECONDS, shown.show_progress)
    timer.name, timer.daemon = TIMER_NAME, True
    timer.start()
    try:
        yield shown.update_progress
    finally:
        timer.cancel()
        shown.report_end(outcome)


class SlowTaskReporter:
    """Shows the progress of a slow task: first when a timer fires, then whenever progress is reported."""

    def __init__(self, what: str) -> None:
        self.what, self.reached, self.again = what, "", 0.0
        self.begin, self.lock = perf_counter(), threading.Lock()

    def show_progress(self) -> None:
        with self.lock:
            if is_stderr_terminal():
                sys.stderr.write(f"{CLEAR_LINE}fsdpx: {self.what}{self.reached} ...")
                sys.stderr.flush()
            else:
                log_line(f"fsdpx: {self.what}{self.reached} ...")
            self.again = 3 * (perf_counter() - self.begin)

    def update_progress(self, *reached: object) -> None:
        self.reached = f" {'/'.join(map(str, reached))}"
        if self.again and (is_stderr_terminal() or perf_counter() - self.begin > self.again):
            self.show_progress()

    def report_end(self, outcome: Callable[[], str] | None) -> None:
        with self.lock:
            if self.again:
                if is_stderr_terminal():
                    sys.stderr.write(CLEAR_LINE)
                    sys.stderr.flush()
                if outcome is not None:
                    log_line(f"fsdpx: {self.what} took {perf_counter() - self.begin:.0f} s{outcome()}")


def format_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.2f} {unit}"
        n /= 1024
    raise AssertionError


def format_count(number: int, word: str, plural: str = "s") -> str:
    """Return a number with a word in singular or plural, such as "1 rank" or "2 ranks"."""
    return f"{number:,} {word}{plural * (number != 1)}"


def format_table(rows: Sequence[tuple[str, ...]], text: bool = False) -> str:
    """Format rows as a text table with a rule below the first row. The first column is left-aligned, all other columns
    are right-aligned.

    If `text` is true, the last column is left-aligned text. If it would make the table wider than `COLUMNS`, it is
    placed on separate lines below each row instead.
    """
    cut = len(rows[0]) - text
    widths = [max(len(row[i]) for row in rows) for i in range(cut)]
    lines = [_format_row(row[:cut], widths) for row in rows]
    wide = len(lines[0])
    if text:
        beside = [f"{line}  {row[-1]}".rstrip() for line, row in zip(lines, rows, strict=True)]
        if (most := max(map(len, beside))) <= COLUMNS:
            lines, wide = beside, most
        else:
            below = zip(lines[1:], rows[1:], strict=True)
            lines[1:] = [wrap_lines(f"{line.rstrip()}\n    {row[-1]}".rstrip()) for line, row in below]
    return escape_control("\n".join([lines[0].rstrip(), "-" * wide, *(line.rstrip() for line in lines[1:])]))


def wrap_lines(text: str, columns: int = COLUMNS) -> str:
    """Wrap text to at most `columns` characters per line. If a line consists of a label and a value, its continuation
    lines are indented to the column where the value begins."""
    lines = []
    for line in escape_control(text).splitlines():
        label = re.match(r"\s*\S+(?: \S+)*\s{2,}", line)
        indent = label.end() if label and label.end() < columns // 2 else 4
        lines += textwrap.wrap(line, columns, subsequent_indent=" " * indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def wrap_for_terminal(text: str, stream: TextIO | None = None) -> str:
    """Wrap text to the width of the terminal if `stream` (default: standard output) is a terminal. Also wrap it if this
    process is a rank, because a launcher forwards the output of ranks. Otherwise return the text unchanged."""
    if (stream or sys.stdout).isatty() or environment.read_environment().launcher is not None:
        return wrap_lines(text, shutil.get_terminal_size().columns)
    return text


def _format_row(cells: tuple[str, ...], widths: list[int]) -> str:
    right = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *right])


def format_ranks(ranks: Iterable[int]) -> str:
    """Return a string that lists rank numbers, such as "rank 3" or "ranks 0, 2"."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def shorten_value(value: Any) -> str:
    """Return a value as one short line of text, for error messages."""
    try:
        first, *more = repr(value).splitlines() or [""]
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({error})"
    return first if not more and len(first) < 100 else f"{first[:80]}... ({type(value).__name__})"
