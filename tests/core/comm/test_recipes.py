"""What users copy: a wrapper is a few lines around `issue`, a communicator is one file, a backend one entry."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fsdpx import Communicator, FakeCommunicator, Handle, spawn
from fsdpx.core.comm import Backend, CommunicatorWrapper, CountingCommunicator, TrafficCounters, init
from fsdpx.core.comm.calls import COMPLETED, Call, GeneratorHandle, Progress, spin_until
from fsdpx.core.comm.communicator import CALL_SPECS, CallSpec
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.comm.p2p_collectives import COLLECTIVES
from fsdpx.testing import CommunicatorContract


class Delayed(CommunicatorWrapper):
    """Every call begins up to a millisecond later."""

    def issue(self, call: Call) -> Handle:
        time.sleep(random.Random(call.verb).random() / 1000)
        return super().issue(call)


class Traced(CommunicatorWrapper):
    """Every call leaves a line."""

    def __init__(self, comm: Communicator, lines: list[str]) -> None:
        super().__init__(comm)
        self.lines = lines

    def issue(self, call: Call) -> Handle:
        self.lines.append(f"{call.name} on rank {self.rank}")
        return super().issue(call)

    def wrap_group(self, group: Communicator) -> Communicator:
        return Traced(group, self.lines)


class TestDelayed(CommunicatorContract):
    dtypes = "float32", "float16", "bool"

    def run(self, body: Callable[[Communicator], Any]) -> Any:
        spawn(lambda comm: body(Delayed(comm)), 3, timeout=60)


def test_a_trace_names_every_call_of_groups_too() -> None:
    lines: list[str] = []
    comm = Traced(FakeCommunicator(1, 4), lines)
    comm.all_reduce(np.ones(3), what="the loss")
    comm.subgroup([0, 1]).barrier()
    assert lines == ["all_reduce of the loss on rank 1", "barrier on rank 1"]


def test_wrappers_go_around_each_other() -> None:
    lines, counters = list[str](), TrafficCounters()
    comm = CountingCommunicator(Delayed(Traced(FakeCommunicator(0, 2), lines)), "data", counters)
    comm.reduce_scatter(np.ones(6), np.ones(3))
    assert lines == ["reduce_scatter on rank 0"]
    assert list(counters) == [("data", "reduce_scatter", 1, 24)]


# -- a communicator in one file ----------------------------------------------------------------------------------------

Queues = dict[tuple[Any, ...], "queue.SimpleQueue[np.ndarray]"]
"""All threads share them; one is made when it is first asked for."""


class Arrival:
    """The handle of a receive: complete when the message is there, those before it with the same tag taken first."""

    def __init__(self, line: list[Arrival], letters: Any, into: np.ndarray, progress: Progress) -> None:
        self.line, self.letters, self.into, self.here, self.progress = line, letters, into, False, progress
        line.append(self)

    def test(self) -> bool:
        while not self.here and not self.letters.empty():
            first = self.line.pop(0)
            first.into[...] = self.letters.get()
            first.here = True
        return self.here

    def wait(self) -> None:
        assert spin_until(self.test, self.progress, timeout=30)


class QueueCommunicator(Backend):
    """Ranks are threads, messages are copies in queues: all that a backend has to know is to send and to receive."""

    def __init__(self, queues: Queues, name: tuple[Any, ...], members: list[int], rank: int) -> None:
        super().__init__(rank, len(members))
        self.queues, self.name, self.members = queues, name, members
        self.lines: dict[tuple[int, int], list[Arrival]] = {}
        self.splits = 0

    def letters(self, sender: int, receiver: int, tag: int) -> queue.SimpleQueue[np.ndarray]:
        return self.queues.setdefault((self.name, sender, receiver, tag), queue.SimpleQueue())

    def start_call(self, call: Call) -> Handle:
        if call.verb == "send":
            self.letters(self.rank, call.root, call.tag).put(call.arrays[0].copy())
            return COMPLETED
        if call.verb == "recv":
            line = self.lines.setdefault((call.root, call.tag), [])
            return Arrival(line, self.letters(call.root, self.rank, call.tag), call.arrays[0], self.progress)
        return super().start_call(call)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        self.splits += 1
        asked = self.all_gather_value((color, key, self.rank))
        if color is None:
            return None
        ranks = [rank for other, _, rank in sorted(a for a in asked if a[0] is not None) if other == color]
        name, members = (*self.name, self.splits, color), [self.members[rank] for rank in ranks]
        part = QueueCommunicator(self.queues, name, members, ranks.index(self.rank))
        part.progress = self.progress
        return part

    def close(self) -> None: ...

    def abort(self, code: int = 1) -> None:
        raise SystemExit(code)


class TestACommunicatorIsOneFile(CommunicatorContract):
    def run(self, body: Callable[[Communicator], Any]) -> Any:
        def on_queues(comm: Communicator, queues: Queues) -> None:
            body(QueueCommunicator(queues, (), list(range(comm.size)), comm.rank))

        for size in (1, 3):
            spawn(on_queues, size, {}, timeout=60)


def test_a_backend_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        """A communicator of another library."""

    opener = init.BackendOpener(
        lambda asked: make_single_rank_communicator(), lambda comm: isinstance(comm, Foreign), lambda asked: asked.comm
    )
    monkeypatch.setitem(init.BACKENDS, "foreign", opener)
    assert init.open_world("foreign").size == 1
    assert init.as_communicator(Foreign()).size == 1
    with pytest.raises(ValueError, match="but backend='mpi': leave backend out"):
        init.as_communicator(Foreign(), "mpi")
    with pytest.raises(ValueError, match="use one of node, mpi, nccl, gloo, local, fake, foreign, or None to find out"):
        init.open_world("smoke")


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_collective_is_a_copy_on_one_rank_only_where_its_row_says_so(ranks: int, monkeypatch: Any) -> None:
    """An exclusive scan leaves the sum of the ranks before: nothing, on the first one."""

    def exclusive_scan(comm: Any, call: Call) -> Handle:
        send, recv = call.arrays
        rows = [np.empty_like(send) for _ in range(comm.rank)]
        later, before = range(comm.rank + 1, comm.size), list(enumerate(rows))

        def steps() -> Any:
            yield comm.start_messages(call, [(rank, send) for rank in later], before)
            recv[...] = sum(rows, np.zeros_like(send))

        return GeneratorHandle(steps(), comm.progress)

    def run(comm: Communicator) -> list[float]:
        send, recv = np.full(2, comm.rank + 1.0), np.full(2, -1.0)
        comm.issue(Call("exclusive_scan", (send, recv))).wait()
        return recv.tolist()

    monkeypatch.setitem(CALL_SPECS, "exclusive_scan", CallSpec())
    monkeypatch.setitem(COLLECTIVES, "exclusive_scan", exclusive_scan)
    assert spawn(run, ranks) == [[sum(range(1, rank + 1))] * 2 for rank in range(ranks)]


def test_every_row_says_what_one_rank_does_alone() -> None:
    for name, spec in CALL_SPECS.items():
        assert spec.on_one_rank in ("copy", "nothing", "move"), name
        assert spec.on_one_rank != "copy" or len(spec.arrays) == 2, name
