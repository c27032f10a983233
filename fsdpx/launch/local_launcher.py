"""Starts the ranks of one host without MPI, like torchrun:

    python -m fsdpx.launch.local_launcher -n 4 python -m fsdpx.launch.rank script.py

The ranks of a single host find each other through a new file. On several hosts, `fsdpx run` is started on each, and the
ranks find each other at the address in FSDPX_STORE. In this case, --first is the lowest rank on this host, and --of is
the total number of ranks."""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from fsdpx.core.base.hooks import STOP_SIGNALS
from fsdpx.errors import LaunchError, install_hint

__all__ = ["make_local_launcher_command"]

_END_TIMEOUT_SECONDS = 5.0
"""After a rank has failed, the other ranks get this many seconds to report what they know about the failure. After
SIGTERM, they again get this many seconds to end."""
_POLL_SECONDS = 0.02


def make_local_launcher_command() -> list[str]:
    """Return the command line of this launcher. As with mpiexec, the caller appends -n and the command that each rank
    runs. Raise LaunchError if PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(f"--backend gloo needs PyTorch, which is not installed: {install_hint('gloo')}")
    return [sys.executable, "-m", "fsdpx.launch.local_launcher"]


def main(words: Sequence[str]) -> int:
    """Start the ranks and wait for them. When one rank fails, end all other ranks. Return the exit status of the first
    rank that failed, or 0."""
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--of", type=int)
    p.add_argument("-n", dest="ranks", type=int)
    p.add_argument("command", nargs=argparse.REMAINDER)
    args = p.parse_args(words)
    started: list[subprocess.Popen[bytes]] = []

    def forward_signal(number: int, frame: FrameType | None) -> None:
        for rank in started:
            with suppress(OSError):
                rank.send_signal(number)

    for name in ("INT", *STOP_SIGNALS):
        signal.signal(signal.Signals[f"SIG{name}"], forward_signal)
    with tempfile.TemporaryDirectory(prefix="fsdpx-meet-") as folder:
        common = dict(os.environ)
        if args.of is None:
            common = {"FSDPX_SECRET": secrets.token_hex(32), **common, "FSDPX_STORE": os.path.join(folder, "store")}
        for rank in range(args.ranks):
            numbers = _make_rank_variables(rank, args.ranks, args.first, args.of or args.ranks)
            started.append(subprocess.Popen(args.command, env=common | numbers))
        return _wait_for_ranks_or_end_them(started)


def _make_rank_variables(rank: int, ranks_here: int, first: int, size: int) -> dict[str, str]:
    """Return the environment variables of one rank, with the same names as in torchrun: RANK, WORLD_SIZE, LOCAL_RANK
    and LOCAL_WORLD_SIZE."""
    numbers = {"RANK": first + rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks_here}
    return {name: str(number) for name, number in numbers.items()}


def _wait_for_ranks_or_end_them(started: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks. When one fails, send SIGTERM and later SIGKILL to all other ranks. Return the exit status of
    the first rank that failed, or 0."""
    status, due, ends = 0, 0.0, [subprocess.Popen.terminate, subprocess.Popen.kill]
    while living := [rank for rank in started if rank.poll() is None]:
        status = status or _find_failed_status(started)
        now = time.monotonic()
        if status and not due:
            due = now + _END_TIMEOUT_SECONDS
        elif status and now >= due and ends:
            due, end = now + _END_TIMEOUT_SECONDS, ends.pop(0)
            for rank in living:
                end(rank)
        time.sleep(_POLL_SECONDS)
    return status or _find_failed_status(started)


def _find_failed_status(started: list[subprocess.Popen[bytes]]) -> int:
    """Return the exit status of a failed rank, or 0 if none has failed. The status of a killed rank is 128 + signal,
    as in a shell."""
    statuses = [rank.returncode for rank in started if rank.returncode]
    return next((status if status > 0 else 128 - status for status in statuses), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
