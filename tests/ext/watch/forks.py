"""A rank whose forked children fail and end in every way; test_forks.py runs it."""

import multiprocessing
import os
import signal
import threading

import fsdpx
from fsdpx.ext.watch.preempt import Preemption


def in_thread() -> None:
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()


def fails() -> None:
    raise ValueError("of a child")


def forked(way: str) -> int:
    child = os.fork()
    if child == 0:
        if way == "raises":
            fails()
        if way == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


comm = fsdpx.init()
if comm.rank == 0:
    children = [multiprocessing.get_context("fork").Process(target=does) for does in (in_thread, fails)]
    for child in children:
        child.start()
        child.join()
    with Preemption():
        print([child.exitcode for child in children], *map(forked, ("raises", "ends", "stopped")), flush=True)
print(sum(comm.all_gather_value(1)), "ranks go on", flush=True)
