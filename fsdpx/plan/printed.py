"""Formats Python calls for printing in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpx.core.base.messages import COLUMNS

__all__ = ["wrap_call_into_lines"]

DEEPER = "    "


def wrap_call_into_lines(code: str, indent: int = 0, end: str = "") -> str:
    """Wrap a Python call: if the call does not fit into one line of 80 characters, return the call with one argument
    per line. Each line is indented by at least `indent` spaces, and `end` is appended to the call."""
    line = " " * indent + code + end
    if len(line) <= COLUMNS or "(" not in code:
        return line
    start, stop = code.index("("), code.rindex(")")
    inside = [
        wrap_call_into_lines(one, indent + len(DEEPER), ",") for one in _split_arguments_text(code[start + 1 : stop])
    ]
    return "\n".join([" " * indent + code[: start + 1], *inside, " " * indent + code[stop:] + end])


def _split_arguments_text(code: str) -> Iterator[str]:
    """Split the text of a call's arguments at all commas that are not inside brackets, and yield the arguments."""
    depth, begin = 0, 0
    for at, letter in enumerate(code):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield code[begin:at].strip()
            begin = at + 1
    if code[begin:].strip():
        yield code[begin:].strip()
