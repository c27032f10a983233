"""`report`: one HTML page about a run, in its folder."""

import argparse

from fsdpx.observe.folder import RunFolder
from fsdpx.observe.page import write_page

__all__ = ["report"]


def report(args: argparse.Namespace) -> int:
    """Write the page and say where it is; the exit status."""
    folder = RunFolder(args.run)
    write_page(folder)
    print(folder.page)
    return 0
