"""Commands of fsdpx in the process of a test: what they print, and how they end."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from fsdpx.__main__ import main

__all__ = ["command", "refused", "shown"]


def command(words: str | Sequence[str]) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(shlex.split(words) if isinstance(words, str) else words)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def shown(words: str | Sequence[str]) -> str:
    """What a command prints that ends well."""
    status, out, err = command(words)
    assert status == 0, err
    return out


def refused(words: str | Sequence[str]) -> str:
    """The errors of a command that cannot be."""
    status, _, err = command(words)
    assert status == 2, err
    return err
