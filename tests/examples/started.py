"""Examples as users start them, several in one job under mpiexec, or on ranks that are threads."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from commands import start

from fsdpx import spawn

__all__ = ["run_several", "run_threads"]

BETWEEN = "=" * 40 + "\n"
SEVERAL = f"""
import json, runpy, sys
import fsdpx

for command in json.loads(sys.argv[1]):
    print("begins:", command, file=sys.stderr, flush=True)
    kind, *sys.argv = command
    try:
        if kind == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            exec(sys.argv[0], {{}})
    except SystemExit as end:
        if end.code:
            raise
    if fsdpx.init().rank == 0:
        print({BETWEEN!r}, end="", flush=True)
"""


def run_several(ranks: int, *commands: list[str]) -> list[str]:
    """What each of these commands, arguments of Python, prints where one job runs them in turn: every process of a job
    takes longer to import than most examples to run."""
    done = start(ranks, "-c", SEVERAL, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    *found, rest = done.stdout.split(BETWEEN)
    assert (len(found), rest) == (len(commands), "")
    return found


def run_threads(ranks: int, main: Callable[[list[str]], Any], *arguments: str, **options: Any) -> tuple[str, str]:
    """What `main` prints on ranks that are threads, and what it says on standard error."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        spawn(lambda comm: main([*arguments]), ranks, **options)
    return out.getvalue(), err.getvalue()
