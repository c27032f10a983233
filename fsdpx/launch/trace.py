"""`trace merge`: the traces of all ranks in one file, on one clock."""

import argparse
from pathlib import Path

from fsdpx.observe.chrome import merge

__all__ = ["add_options", "trace"]


def add_options(p: argparse.ArgumentParser) -> None:
    actions = p.add_subparsers(dest="action", required=True)
    one = actions.add_parser("merge", help="write trace.json.gz beside the files of the ranks")
    one.add_argument("folder", type=Path, help="what distribute(trace=...), --trace or FSDPX_TRACE named")


def trace(args: argparse.Namespace) -> int:
    """Run one action and print its result; the exit status."""
    path, error, messages = merge(args.folder)
    print(
        f"{path}: open it in https://ui.perfetto.dev\n"
        f"clocks of two ranks differ by at most {1e6 * error:.1f} us; {messages} messages with both ends"
    )
    return 0
