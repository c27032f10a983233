"""Commands of fsdpx in the process of a test, and Python in others: what they print, and how they end."""

import io
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from trials import MPIEXEC, ROOT, environment

from fsdpx.__main__ import main

__all__ = ["command", "refused", "shown", "start"]

Stream = Callable[[], io.StringIO]


def command(words: str | Sequence[str], out: Stream = io.StringIO, err: Stream = io.StringIO) -> tuple[int, str, str]:
    """Status, output and errors of a command. out, err: make what it prints to."""
    out, err = out(), err()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(shlex.split(words) if isinstance(words, str) else words)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def shown(words: str | Sequence[str], stream: Stream = io.StringIO) -> str:
    """What a command prints that ends well."""
    status, out, err = command(words, out=stream)
    assert status == 0, err
    return out


def refused(words: str | Sequence[str]) -> str:
    """The errors of a command that cannot be."""
    status, _, err = command(words)
    assert status == 2, err
    return err


def start(ranks: int, *arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments in a folder, on so many ranks, to its end."""
    environ = environment(OPENBLAS_NUM_THREADS="1", **variables)  # on a busy machine its threads would only wait
    words = [*([str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []), sys.executable, *arguments]
    return subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=250, stdin=subprocess.DEVNULL
    )
