"""What the examples do about a mistake on their command lines."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpx import environment
from fsdpx.errors import FsdpxError

__all__ = ["status_of"]


def status_of(main: Callable[[], Any]) -> int:
    """Run `main`; the exit status. In a process alone, a mistake that fsdpx has found is one line and status 2. Among
    ranks it goes on its way as any uncaught error: it is printed once, and ends all of them."""
    try:
        found = main()
    except FsdpxError as error:
        if environment.read().launcher is not None:
            raise
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 2
    return found if isinstance(found, int) else 0
