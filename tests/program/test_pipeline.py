"""Pipelines as programs: what travels between stages, and the proof that all ranks come to their end."""

from dataclasses import replace

import pytest
from cases import PLACEMENTS

from fsdpx.errors import ProgramError
from fsdpx.program import SCHEDULES, Action, Program, Request, Stage, check, check_pipe, compile, pipeline, schedule

TWINS = [((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2,), (2,), (3,)), ((3, 4), (3, 1), (4,))]
"""Four units in a row; the last one reads what the first one gave as well, and has a copy of its page."""


def stages(home: tuple[int, ...], cuts: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Stage, ...]:
    return pipeline(TWINS, [True] * 5, [0], [4], cuts, home, ((0, 4),))


def programs(name: str, microbatches: int = 4, placement: str = "fsdp", recompute: bool = False) -> list[Program]:
    per_rank = {"interleaved": 2, "zbv": 2}.get(name, 1)
    plan = schedule(name, 4 // per_rank, microbatches, per_rank)
    keep, each = PLACEMENTS[placement]
    again = frozenset(range(4)) if recompute else frozenset()
    request = Request("step", stages(plan.home)[0], microbatches, keep_full=keep, reduce_each=each)
    return [
        compile(replace(request, stage=stage, order=plan.ranks[stage.rank], recompute=again & set(stage.here)))
        for stage in stages(plan.home)
    ]


def prove(found: list[Program]) -> None:
    for program in found:
        check(program)
    check_pipe(found)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_comes_to_its_end(name: str, placement: str, recompute: bool) -> None:
    for microbatches in (1, 2, 5):
        prove(programs(name, microbatches, placement, recompute))


@pytest.mark.parametrize("name", SCHEDULES)
def test_mutants_are_rejected(name: str) -> None:
    """Without any action of any rank, or with it twice, or with a message moved behind its reader."""
    found = programs(name, 2, recompute=True)
    for rank, program in enumerate(found):
        actions = program.actions
        for i, action in enumerate(actions):
            for made in (actions[:i] + actions[i + 1 :], actions[: i + 1] + actions[i:]):
                try:
                    prove([*found[:rank], replace(program, actions=made), *found[rank + 1 :]])
                except ProgramError:
                    continue
                pytest.fail(f"{name}, rank {rank}: a program with {action} dropped or repeated was accepted")


def test_values_go_from_reader_to_reader() -> None:
    edges = stages((0, 1, 2, 3))[0].edges
    forward = [(e.value, e.source, e.target) for e in edges if not e.gradient]
    back = [(e.value, e.source, e.target) for e in edges if e.gradient]
    assert forward == [(1, 0, 1), (1, 1, 3), (2, 1, 2), (3, 2, 3)]
    assert back == [(1, 3, 1), (1, 1, 0), (2, 2, 1), (3, 3, 2)]


def test_no_rank_gets_a_value_twice() -> None:
    """Stages 0 and 2 are on rank 0: what stage 0 gave is there already, but gradients still pass through stage 1."""
    rows = [((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2,), (1, 2), (3,)), ((3,), (3,), (4,))]
    edges = pipeline(rows, [True] * 4, [0], [4], [0, 1, 2, 3], (0, 1, 0, 1))[0].edges
    assert [(e.value, e.sender, e.receiver) for e in edges if not e.gradient] == [(1, 0, 1), (2, 1, 0), (3, 0, 1)]
    assert [(e.value, e.source, e.target) for e in edges if e.gradient and e.value == 1] == [(1, 2, 1), (1, 1, 0)]


def test_a_deadlock_is_shown_with_an_arrow_on_every_rank() -> None:
    found = programs("gpipe", 2)
    first, message = found[0], Action("SEND", 0, 0)
    late = [a for a in first.actions if a != message]
    late.insert(late.index(Action("MEAN")), message)
    found[0] = replace(first, actions=tuple(late))
    with pytest.raises(ProgramError) as caught:
        check_pipe(found)
    text = str(caught.value)
    assert text.startswith("the ranks of the pipe wait for each other")
    assert "rank 1 of the pipe, at SEND" in text or "rank 1 of the pipe, at F1.0, waits for SEND0.0 of rank 0" in text
    lines = text.splitlines()
    arrow = next(i for i, line in enumerate(lines) if line.strip() == "^")
    assert lines[arrow - 1][lines[arrow].index("^") :][0] in "FSRB"


def test_a_message_on_the_wrong_rank_is_named() -> None:
    found = programs("1f1b", 1)
    strange = next(a for a in found[0].actions if a.op == "SEND")
    found[0] = replace(found[0], actions=tuple(a for a in found[0].actions if a != strange))
    other = found[2]
    found[2] = replace(other, actions=(strange, *other.actions))
    with pytest.raises(ProgramError, match=r"SEND\S+, stands on rank 2 of the pipe, where it does not belong"):
        check_pipe(found)
