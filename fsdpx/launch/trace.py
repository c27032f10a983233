"""`trace merge`: the traces of all ranks in one file, on one clock."""

import argparse

from fsdpx.observe.chrome import merge

__all__ = ["trace"]


def trace(args: argparse.Namespace) -> int:
    """Run one action and print its result; the exit status."""
    path, error, messages = merge(args.folder)
    print(
        f"{path}: open it in https://ui.perfetto.dev\n"
        f"clocks of two ranks differ by at most {1e6 * error:.1f} us; {messages} messages with both ends"
    )
    return 0
