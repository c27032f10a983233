"""Starts ranks on this host without any MPI: python -m fsdpx.launch.here -n 4 python -m fsdpx.launch.rank script.py

They meet at a new file."""

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

from fsdpx.errors import LaunchError

__all__ = ["starter"]

_SECONDS_TO_END = 5.0
"""Seconds that the others may take to report what they know of a failed rank, and again to end when told to."""
_LOOK = 0.02


def starter() -> list[str]:
    """The command that starts ranks here, like mpiexec: it takes -n and a command. LaunchError without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("--backend gloo needs PyTorch, which is not installed: pip install 'fsdpx[gloo]'")
    return [sys.executable, "-m", "fsdpx.launch.here"]


def main(words: Sequence[str]) -> int:
    """Start the ranks; the status of the first that fails, which ends the others."""
    p = argparse.ArgumentParser()
    p.add_argument("-n", dest="ranks", type=int)
    p.add_argument("command", nargs=argparse.REMAINDER)
    args = p.parse_args(words)
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in started:
            with suppress(OSError):
                rank.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)):
        signal.signal(number, forward)
    with tempfile.TemporaryDirectory(prefix="fsdpx-meet-") as folder:
        size, store = str(args.ranks), os.path.join(folder, "store")
        common = {"FSDPX_SECRET": secrets.token_hex(32), **os.environ, "FSDPX_STORE": store}
        common |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for rank in map(str, range(args.ranks)):
            started.append(subprocess.Popen(args.command, env={**common, "RANK": rank, "LOCAL_RANK": rank}))
        return _wait(started)


def _wait(started: list[subprocess.Popen[bytes]]) -> int:
    status, due, ends = 0, 0.0, [subprocess.Popen.terminate, subprocess.Popen.kill]
    while living := [rank for rank in started if rank.poll() is None]:
        status = status or _failed(started)
        now = time.monotonic()
        if status and not due:
            due = now + _SECONDS_TO_END
        elif status and now >= due and ends:
            due, end = now + _SECONDS_TO_END, ends.pop(0)
            for rank in living:
                end(rank)
        time.sleep(_LOOK)
    return status or _failed(started)


def _failed(started: list[subprocess.Popen[bytes]]) -> int:
    """The status of a rank that has failed, as a shell says it; 0 if none has."""
    statuses = [rank.returncode for rank in started if rank.returncode]
    return next((status if status > 0 else 128 - status for status in statuses), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
