"""Command-line helpers that the examples share."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment
from fsdpx.errors import FsdpxError

__all__ = ["nonnegative_int", "positive_int", "run_main"]


def positive_int(text: str, minimum: int = 1) -> int:
    """Parse a command-line argument as an int. Raise an argparse error if it is not an integer or is less than
    `minimum`."""
    try:
        found = int(text)
    except ValueError:
        found = minimum - 1
    if found < minimum:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, {minimum} or more, is needed")
    return found


def nonnegative_int(text: str) -> int:
    """Parse a command-line argument as an int. Raise an argparse error if it is not an integer or is negative."""
    return positive_int(text, 0)


def run_main(main: Callable[[], Any]) -> int:
    """Run an example's `main`, and return the exit status.

    In a single process, an fsdpx error is printed as one line, and the status is 2. In a job of several ranks, the
    error is raised like any other uncaught error, so it is printed once and ends all ranks."""
    try:
        found = main()
    except FsdpxError as error:
        if environment.read_environment().launcher is not None:
            raise
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 2
    return found if isinstance(found, int) else 0
