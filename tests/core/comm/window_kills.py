"""Ranks killed while they make windows: shared memory is as before. `python window_kills.py 40` kills at random times.

Two forks of this process make one window after the other in a folder of their own in /dev/shm. Without a number one of
them is killed at each of its system calls in turn.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsdpx.core.comm.mpi.start import find_leftover_files
from fsdpx.core.comm.node import shared_file, shared_windows

NBYTES = 1 << 20


class Pair:
    """As much of a communicator of two ranks as a window needs."""

    size = 2

    def __init__(self, rank: int, wire: socket.socket) -> None:
        self.rank, self.wire, self.lines = rank, wire, wire.makefile()

    def all_gather_value(self, value: Any) -> list[Any]:
        self.wire.sendall(f"{json.dumps(value)}\n".encode())
        if not (line := self.lines.readline()):
            raise EOFError("the other rank is dead")
        other = json.loads(line)
        return [value, other] if self.rank == 0 else [other, value]


def make_windows(comm: Pair, windows: int) -> None:
    for _ in range(windows):
        for window in (shared_windows.MappedWindow(comm, NBYTES, 5.0), shared_windows.HostWindow(comm, NBYTES)):
            window.parts[comm.rank][:] = 1
            window.close() if isinstance(window, shared_windows.MappedWindow) else window.free_memory()


def fork_pair(body: Callable[[Pair], None]) -> list[int]:
    ends, pids = socket.socketpair(), []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            ends[1 - rank].close()
            status = 1
            try:
                body(Pair(rank, ends[rank]))
                status = 0
            except (EOFError, ConnectionError):
                pass
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    for end in ends:
        end.close()
    return pids


def each_call(victim: int) -> Iterator[int]:
    """How many system calls the victim had made when it was killed, one by one, until it outlives them."""
    for calls in range(1, 1000):

        def make(comm: Pair, calls: int = calls) -> None:
            if comm.rank == victim:
                seen = iter(range(calls))
                sys.addaudithook(lambda *_: next(seen, None) is None and signal.raise_signal(signal.SIGKILL))
            make_windows(comm, 1)

        ends = [os.waitpid(pid, 0)[1] for pid in fork_pair(make)]
        if ends == [0, 0]:
            return
        assert ends[victim] == signal.SIGKILL, ends
        yield calls


def kill_at_each_call(folder: Path, refused: bool) -> int:
    """refused: the system lets no rank open the files of another. The number of kills."""
    kills = 0
    if refused:
        shared_file._open_descriptor_of_process = lambda *_: -1
    for victim in range(2):
        for calls in each_call(victim):
            kills += 1
            found = list(folder.iterdir())
            assert refused or not found, f"rank {victim} was killed at call {calls} and left {found}"
            assert not sum(path.stat().st_blocks for path in found), f"{found} hold memory"
            assert sorted(found) == find_leftover_files(folder, -10.0), "the next start does not find them"
            for path in found:
                path.unlink()
    return kills


def kill_at_random(folder: Path, kills: int, seed: int = 0) -> int:
    chance = random.Random(seed)
    for _ in range(kills):
        pids = fork_pair(lambda comm: make_windows(comm, 1_000_000))
        time.sleep(chance.random() / 20)
        os.kill(chance.choice(pids), signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        assert not list(folder.iterdir())
    return kills


if __name__ == "__main__":
    shared_windows.SHARED_MEMORY_FOLDER = tempfile.mkdtemp(prefix="windows-", dir=shared_windows.SHARED_MEMORY_FOLDER)
    try:
        place = Path(shared_windows.SHARED_MEMORY_FOLDER)
        if sys.argv[1:] and sys.argv[1].isdecimal():
            print(kill_at_random(place, int(sys.argv[1])), "kills: shared memory is as before")
        else:
            print(kill_at_each_call(place, "refused" in sys.argv), "kills")
    finally:
        shutil.rmtree(shared_windows.SHARED_MEMORY_FOLDER)
