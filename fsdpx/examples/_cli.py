"""What the examples do about a mistake on their command lines."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment
from fsdpx.errors import FsdpxError

__all__ = ["get_exit_status", "nonnegative_int", "positive_int"]


def positive_int(text: str, least: int = 1) -> int:
    """An argument of a command line that is a whole number, 1 or more."""
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, {least} or more, is needed")
    return found


def nonnegative_int(text: str) -> int:
    """An argument of a command line that is a whole number, 0 or more."""
    return positive_int(text, 0)


def get_exit_status(main: Callable[[], Any]) -> int:
    """Run `main`; the exit status. In a process alone, a mistake that fsdpx has found is one line and status 2. Among
    ranks it goes on its way as any uncaught error: it is printed once, and ends all of them."""
    try:
        found = main()
    except FsdpxError as error:
        if environment.read_environment().launcher is not None:
            raise
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 2
    return found if isinstance(found, int) else 0
