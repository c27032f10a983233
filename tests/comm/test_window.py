"""One-sided memory: what any rank changes any other reads, nobody loses a change, and a death frees its locks."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest

from fsdpx import spawn
from fsdpx.comm import Communicator, Died
from fsdpx.errors import CommTimeout, ConfigError, DesyncError

BYTES, TIMES = 256, 40


def counts(comm: Communicator) -> None:
    """All ranks add to numbers in all parts; parts differ in size."""
    window = comm.window(BYTES + 8 * comm.rank)
    assert window.own.size >= BYTES
    assert not window.own.any()
    comm.barrier().wait()
    for i in range(TIMES):
        other = (comm.rank + i) % comm.size
        with window.open(other, 64, 80) as block:
            numbers = block.view(np.int64)
            before = numbers.copy()
            numbers[0] = before[0] + 1
            numbers[1] = before[1] + comm.rank
    window.say(2, 7 + comm.rank)
    comm.barrier().wait()
    total = np.zeros(2, np.int64)
    for rank in range(comm.size):
        with window.open(rank, 64, 80, write=False) as block:
            total += block.view(np.int64)
        assert window.word(rank, 2) == 7 + rank
        assert not window.gone(rank)
    assert total.tolist() == [TIMES * comm.size, TIMES * sum(range(comm.size))]
    comm.barrier().wait()
    window.close()


def test_among_threads() -> None:
    spawn(counts, 3, delays=1)


def test_a_wait_ends_with_the_rank_and_what_it_waited_for() -> None:
    def run(comm: Communicator) -> None:
        window = comm.window(64)
        with pytest.raises(CommTimeout, match=f"rank {comm.rank} waited 0.2 s for rank {1 - comm.rank}: a word"):
            window.wait(lambda: [1 - comm.rank], "a word")
        comm.barrier().wait()

    spawn(run, 2, timeout=0.2)


def test_a_thread_that_returned_is_named_at_once() -> None:
    def run(comm: Communicator) -> None:
        window = comm.window(64)
        if comm.rank == 0:
            window.wait(lambda: [1] * (window.word(1, 0) != 1), "its first step")

    with pytest.raises(DesyncError, match=r"^rank 1 has returned while ranks \[0\] wait in a window for its first"):
        spawn(run, 2)


def test_a_thread_that_died_is_gone() -> None:
    def run(comm: Communicator) -> None:
        window = comm.window(64)
        comm.barrier().wait()
        if comm.rank == 1:
            with window.open(0, 0, 8):
                raise Died
        window.wait(lambda: [1] * (not window.gone(1)), "its death")
        with window.open(0, 0, 8):
            assert not window.gone(0)

    spawn(run, 2, survive=True)


@pytest.mark.world
@pytest.mark.mpi
def test_among_processes(world: Communicator) -> None:
    counts(world)


@pytest.mark.jobs
def test_a_killed_process_frees_its_locks_and_is_gone() -> None:
    """Two processes without MPI, as survivors of a job are; the second is killed with the lock of the first."""
    code = """
        import sys
        from fsdpx.comm.node.memory import MappedWindow

        class Pipe:  # as much of a communicator as the window needs
            rank, size = int(sys.argv[1]), 2

            def all_gather_plain(self, obj):
                print(repr(obj), flush=True)
                return eval(sys.stdin.readline())

        window = MappedWindow(Pipe(), 64, 5.0)
        if Pipe.rank:
            with window.open(0, 8, 16):
                window.say(0, 1)
                sys.stdin.read()
        window.wait(lambda: [1] * (window.word(1, 0) != 1), "the lock")
        assert not window.gone(1)
        print("held", flush=True)
        window.wait(lambda: [1] * (not window.gone(1)), "the death")
        with window.open(0, 8, 16):
            print("free", flush=True)
        window.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "0"], **piped) as first, subprocess.Popen([*command, "1"], **piped) as second:
        for _ in range(3):  # collective calls
            said = f"[{first.stdout.readline().strip()}, {second.stdout.readline().strip()}]\n"
            for rank in (first, second):
                rank.stdin.write(said)
                rank.stdin.flush()
        assert first.stdout.readline() == "held\n"
        time.sleep(0.2)  # the first waits for it
        os.kill(second.pid, signal.SIGKILL)
        assert first.stdout.readline() == "free\n"
        assert first.wait(20) == 0


def test_no_room_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdpx.comm.node.memory import MappedWindow

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    def run(comm: Communicator) -> None:
        with pytest.raises(
            ConfigError, match=r"bytes of shared memory for a window: .*: No space left on device; give"
        ):
            MappedWindow(comm, 64, 1.0)

    spawn(run, 2)
