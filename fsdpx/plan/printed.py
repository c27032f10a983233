"""Formats text in 80 columns: prose, tables whose last column may be prose, and Python calls."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from fsdpx.errors import escape_control

__all__ = ["COLUMNS", "format_narrow_table", "wrap_prose", "wrap_python_call"]

COLUMNS = 80
"""Width of a terminal, which no line exceeds."""
GAP, DEEPER = "  ", "    "


def wrap_prose(text: str, indent: str = "") -> str:
    """Return the text wrapped to `COLUMNS`; lines after the first are indented by `indent`."""
    wrapped = textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_long_words=True, break_on_hyphens=False)
    return escape_control("\n".join(wrapped))


def format_narrow_table(head: Sequence[str], rows: Sequence[Sequence[str]], wrap: bool = False) -> str:
    """Return a table with the first column left-aligned and the other columns right-aligned.

    wrap: whether the last column is left-aligned text. If the table would then exceed the width of a terminal, this
    text is placed below each row, so that no cell is broken."""
    cut = len(head) - wrap
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(cut)]
    lines = [_pad_cells(row[:cut], widths) for row in (head, *rows)]
    last = [row[-1] if wrap else "" for row in (head, *rows)]
    wide = max(len(line) + len(GAP) + len(text) for line, text in zip(lines, last, strict=True))
    if wide <= COLUMNS:
        lines = [f"{line}{GAP}{text}".rstrip() for line, text in zip(lines, last, strict=True)]
        return escape_control("\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]]))
    below = [wrap_prose(f"{DEEPER}{text}", DEEPER) if text else "" for text in last[1:]]
    pairs = [one for pair in zip([line.rstrip() for line in lines[1:]], below, strict=True) for one in pair if one]
    return escape_control("\n".join([lines[0].rstrip(), "-" * len(lines[0]), *pairs]))


def _pad_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    right = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return GAP.join([cells[0].ljust(widths[0]), *right])


def wrap_python_call(code: str, indent: int = 0, end: str = "") -> str:
    """Return a Python call, with one argument per line if it does not fit into one line."""
    line = " " * indent + code + end
    if len(line) <= COLUMNS or "(" not in code:
        return line
    start, stop = code.index("("), code.rindex(")")
    inside = [wrap_python_call(one, indent + len(DEEPER), ",") for one in _split_arguments_text(code[start + 1 : stop])]
    return "\n".join([" " * indent + code[: start + 1], *inside, " " * indent + code[stop:] + end])


def _split_arguments_text(code: str) -> Iterator[str]:
    """Yield the arguments of a call, split at the commas outside of brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(code):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield code[begin:at].strip()
            begin = at + 1
    if code[begin:].strip():
        yield code[begin:].strip()
