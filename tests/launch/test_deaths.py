"""In which order ranks end: `fsdpx run` names the one whose death made a launcher kill the others."""

import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from lab import until

from fsdpx.launch.exit_status import DeathRecorder
from fsdpx.launch.rank_status import open_and_unlink_lifeline_pipe, open_pipe_that_reveals_rank_death

pytestmark = [
    pytest.mark.mpi_skip,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells of the death of any process"),
]
RANK = """
import os, platform, socket, sys, threading, time
from pathlib import Path
from fsdpx.launch.rank_status import RankStatus, open_pipe_that_reveals_rank_death

folder, rank, what, *inherited = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
open_pipe_that_reveals_rank_death(folder, rank)
if what == "fork" and os.fork() == 0:
    os.close(int(inherited[0]))
    os.close(1)
    time.sleep(100)
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
RankStatus(rank, os.getpid(), platform.node()).write_to_folder(folder)
if what == "closes":  # as a process does that takes its time to die
    input()
    os.closerange(3, 5000)
    print("closed", flush=True)
time.sleep(100)
"""


def rank(folder, number, what="", inherited=()):
    """A process that has written its note. inherited: a descriptor, if any."""
    words = [sys.executable, "-c", RANK, str(folder), str(number), what, *map(str, inherited)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen(words, **pipes, pass_fds=inherited, text=True, process_group=0)
    until((folder / f"rank-{number:05}.json").exists, f"the note of rank {number}")
    return started


def end(*started):
    for one in started:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, 9)  # its children as well
        one.communicate()


def find_order(deaths, started, killed):
    """In which order ranks are found to have died that are killed one after the other."""
    for number in killed:
        started[number].kill()
        until(lambda number=number: number in deaths.order, f"the death of rank {number}")
    deaths.close()
    end(*started)
    return deaths.order


@pytest.mark.parametrize("what", ["", "fork"], ids=["alone", "with a child that lives on"])
def test_a_lifeline_closes_before_all_other_files_of_a_process(tmp_path, what):
    """Where launchers see a socket close, they have killed others before the process itself counts as dead."""
    ours, theirs = socket.socketpair()
    with ours, select.epoll() as events:
        with theirs:
            one = rank(tmp_path, 0, what, (theirs.fileno(),))
        lifeline, process = open_and_unlink_lifeline_pipe(tmp_path, 0), os.pidfd_open(one.pid)
        names = {lifeline: "lifeline", ours.fileno(): "socket", process: "process"}
        for descriptor in reversed(names):
            events.register(descriptor, select.EPOLLIN)
        assert not events.poll(0)
        one.kill()
        one.wait()
        assert [names[descriptor] for descriptor, _ in events.poll(10)] == [*names.values()]
        os.close(lifeline)
        os.close(process)
    end(one)


def test_who_closes_its_files_first_died_first(tmp_path):
    deaths = DeathRecorder(tmp_path, 3)
    started = [rank(tmp_path, 0, "closes"), rank(tmp_path, 1), rank(tmp_path, 2)]
    until(lambda: not [*tmp_path.glob("*.lifeline")], "a look at all of them")
    started[0].stdin.write("now\n")
    started[0].stdin.flush()
    assert started[0].stdout.readline() == "closed\n"
    assert find_order(deaths, started, [2, 0, 1]) == [0, 2, 1]


def test_without_pipes_the_processes_themselves_are_looked_at(tmp_path, monkeypatch):
    deaths = DeathRecorder(tmp_path, 2)
    (tmp_path / "rank-00001.lifeline").mkdir()  # a file system that has none
    started = [rank(tmp_path, 0), rank(tmp_path, 1)]
    until(lambda: not (tmp_path / "rank-00000.lifeline").exists(), "a look at rank 0")
    time.sleep(0.3)
    assert find_order(deaths, started, [1, 0]) == [1, 0]
    monkeypatch.delattr(os, "mkfifo")
    open_pipe_that_reveals_rank_death(tmp_path, 2)
    assert open_and_unlink_lifeline_pipe(tmp_path, 2) is None
