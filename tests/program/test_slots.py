"""Slots as values, and the words of the table that name what lasts from step to step."""

from dataclasses import replace

import pytest

from fsdpx.errors import ProgramError
from fsdpx.program import SLOTS, VERBS, Action, Request, Slot, Stage, buffer_of, check, compile, expand, pipeline

ROWS = [((0,), (0,), (1,)), ((1, 2), (1,), (2,)), ((3,), (2,), (3,))]
STAGE = Stage.of(ROWS, [True, False, True, True], [0], [3], moving=[1], coded=[1, 2])


def texts(slots: tuple[Slot, ...]) -> list[str]:
    return [str(slot) for slot in slots]


def test_slots_print_as_kind_number_and_microbatch() -> None:
    assert texts((Slot("full", 3), Slot("act", 5, 0), Slot("seed", None, 0), Slot("mean"))) == [
        "full3", "act5.0", "seed.0", "mean",
    ]  # fmt: skip


def test_buffers_keep_number_and_microbatch() -> None:
    assert buffer_of(Slot("sum", 3)) == Slot("grad", 3)
    assert buffer_of(Slot("tied", 0)) == Slot("part", 0)
    assert buffer_of(Slot("act", 5, 1)) == Slot("act", 5, 1)
    assert all(SLOTS[kind.buffer].buffer == kind.buffer for kind in SLOTS.values())
    assert all(SLOTS[kind.buffer].lent == kind.lent for kind in SLOTS.values())


def test_every_kind_of_the_table_is_a_kind_of_slot() -> None:
    words = {word for verb in VERBS.values() for word in (*verb.takes, *verb.reads, *verb.adds, *verb.gives)}
    assert {word.partition(":")[0] for word in words} - {"edge", "final", "record"} <= set(SLOTS)
    assert {scratch.kind for verb in VERBS.values() for scratch in verb.scratch} <= set(SLOTS)


def test_a_forward_moves_statistics_and_a_backward_reads_them() -> None:
    forward, backward = (expand(Action(op, 1, 0), STAGE, 1) for op in "FB")
    assert texts(forward.gives) == ["act2.0", "saved1.0"]
    assert texts(forward.adds) == ["stats1"]
    assert texts(backward.reads) == ["full1", "full2", "stats1"]
    assert texts(backward.adds) == ["grad2", "dact1.0"]
    assert expand(Action("F", 0, 0), STAGE, 1).adds == ()
    assert texts(expand(Action("E", 1, 0), STAGE, 1).reads) == ["full1", "full2", "stats1"]


def test_a_reduce_touches_the_part_and_the_memory_of_its_codec() -> None:
    assert texts(expand(Action("REDUCE", 2), STAGE, 1).adds) == ["part2", "memory2"]
    assert texts(expand(Action("REDUCE", 0), STAGE, 1).adds) == ["part0"]
    assert texts(expand(Action("UPDATE", 2), STAGE, 1).adds) == ["shard2", "slots2"]


@pytest.mark.parametrize("kind", ["step", "local", "update", "predict", "backward"])
def test_what_lasts_is_there_before_and_after(kind: str) -> None:
    updates = kind == "update"
    program = compile(Request(kind, STAGE, grads=frozenset({0, 2, 3} if updates else ()), weighed=updates))
    check(program)
    lasting = {"shard0", "shard1", "shard2", "shard3", "slots0", "slots2", "slots3", "memory2", "stats1"}
    assert lasting <= set(texts(tuple(program.begins)))
    assert lasting <= set(texts(tuple(program.ends)))


def test_each_rank_of_a_pipe_has_what_lasts_of_its_own_units() -> None:
    found = [
        {str(slot) for slot in compile(Request("predict", stage)).begins if slot.kind in ("memory", "stats")}
        for stage in pipeline(ROWS, [True, False, True, True], [0], [3], [0, 0, 1], (0, 1), moving=[1], coded=[0, 3])
    ]
    assert found == [{"memory0", "stats1"}, {"memory3"}]


@pytest.mark.parametrize("kind", ["accumulate", "local", "evaluate", "predict", "forward", "backward"])
def test_only_a_step_is_committed(kind: str) -> None:
    program = compile(Request(kind, STAGE, commit=True))
    check(program)
    assert "COMMIT" not in str(program)


def test_a_program_that_all_ranks_commit_says_so() -> None:
    program = compile(Request("step", STAGE, commit=True))
    assert texts(program.results) == ["mean", "scale", "agreed"]
    check(program)
    hasty = replace(program, actions=tuple(a for a in program.actions if a.op != "COMMIT"))
    with pytest.raises(ProgramError, match="ends without agreed"):
        check(hasty)
