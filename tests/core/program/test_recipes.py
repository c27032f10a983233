"""What CONTRIBUTING promises: a schedule is one function, a verb is one row of the table."""

from dataclasses import replace

import pytest
from cases import TWINS, requests

from fsdpx.core.program.compiler import Program, compile
from fsdpx.core.program.pipeline import Stage, get_buffer_slots_of_action
from fsdpx.core.program.simulator import ActionTimes, simulate_programs
from fsdpx.core.program.traffic import TrafficSizes, count_traffic, find_lifetimes
from fsdpx.core.program.verbs import SLOTS, VERBS, Action, ScratchBuffer, Slot, SlotKind, Verb, VerbTransfer
from fsdpx.core.program.verifier import check
from fsdpx.errors import ProgramError
from fsdpx.testing import ScheduleContract


def eager(ranks: int, microbatches: int, per_rank: int) -> list[list[str]]:
    """1F1B in which a rank runs ahead by two forwards more than it must."""

    def row(rank: int) -> list[str]:
        warm = min(ranks - rank + 1, microbatches)
        steps = [f"F{rank}.{m}" for m in range(warm)]
        for m in range(microbatches):
            steps += [f"B{rank}.{m}", *([f"F{rank}.{m + warm}"] if m + warm < microbatches else [])]
        return steps

    return [row(rank) for rank in range(ranks)]


class TestEager(ScheduleContract):
    ranks, microbatches = (1, 3, 4), (1, 4, 6)

    def make(self) -> object:
        return eager

    def max_in_flight(self, ranks: int, microbatches: int, rank: int) -> int:
        return min(ranks - rank + 1, microbatches)


COPY = Verb(
    reads=("shard:page",),
    gives=("copy:page",),
    lane="copies",
    moves=(VerbTransfer("replica", "broadcast", "shard", "param"),),
    about="page",
    scratch=(ScratchBuffer("staging", "copy:page"),),
)
"""A new verb: this rank's part of a page goes to the other replicas."""

DROP = Verb(takes=("copy:page",), lane="host", about="page")


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A step that copies page 0 while it computes."""
    monkeypatch.setitem(VERBS, "COPY", COPY)
    monkeypatch.setitem(VERBS, "DROP", DROP)
    monkeypatch.setitem(SLOTS, "copy", SlotKind("copy", "copies", in_slab=True))
    monkeypatch.setitem(SLOTS, "staging", SlotKind("staging", "scratch", in_slab=True))
    program = compile(requests("step", Stage.single_stage_from_units(TWINS, [True] * 5, [0], [4]), 1, "fsdp"))
    return replace(program, actions=(Action("COPY", 0), *program.actions[:-1], Action("DROP", 0), program.actions[-1]))


def test_a_verb_is_a_row(copying: Program) -> None:
    assert get_buffer_slots_of_action(COPY_0, copying.stage, 1).gives == (Slot("copy", 0),)
    check(copying)
    for action in (COPY_0, Action("DROP", 0)):
        with pytest.raises(ProgramError, match="copy0"):
            check(replace(copying, actions=tuple(a for a in copying.actions if a != action)))
    with pytest.raises(ProgramError, match="collective 0 is COPY0 in program 0 but GATHER0 in program 1"):
        check(copying, replace(copying, actions=(*copying.actions[1:-2], COPY_0, *copying.actions[-2:])))


def test_a_verb_is_counted(copying: Program) -> None:
    sizes = TrafficSizes([100] * 5, [50] * 5, [10] * 5, 4, 4, {"shard": 2, "replica": 5})
    moved = count_traffic(copying, sizes)["replica", "broadcast"]
    assert (moved.calls, moved.bytes) == (1, (50 - 10) * 4)
    lives = {str(life.slot): (life.start, life.stop) for life in find_lifetimes(copying)}
    assert lives["copy0"] == lives["staging0"] == (0, len(copying.actions) - 2)


def test_a_verb_is_simulated(copying: Program) -> None:
    seconds = {("COPY", None): 3.0, ("F", None): 1.0, ("B", None): 1.0}
    events = {str(event.action): event for event in simulate_programs([copying], ActionTimes(seconds))}
    assert (events["COPY0"].start, events["COPY0"].end) == (0, 3)
    assert (events["F0.0"].start, events["B0.0"].end) == (0, 8)  # it runs beside the computing
    slow = simulate_programs([copying], ActionTimes(seconds | {("COPY", None): 30.0}))
    assert slow[-1].start == 30  # UPDATE stands behind DROP, which waits for the copy


COPY_0 = Action("COPY", 0)
