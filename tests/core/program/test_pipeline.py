"""Pipelines as programs: what travels between stages, and the proof that all ranks come to their end."""

from dataclasses import replace

import pytest
from cases import PLACEMENTS, demand_refusals, pipe, pipes, twins

from fsdpx.core.program.compiler import Program
from fsdpx.core.program.pipeline import make_stages
from fsdpx.core.program.schedules import SCHEDULES
from fsdpx.core.program.simulator import ActionTimes, simulate_programs
from fsdpx.core.program.verbs import Action
from fsdpx.core.program.verifier import check, require_pipeline_programs_finish
from fsdpx.errors import ProgramError

PIPES = pipes() | {f"{name}-again": pipe(name, 2, recompute=True) for name in SCHEDULES}


def prove(found: list[Program]) -> None:
    for program in found:
        check(program)
    require_pipeline_programs_finish(found)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_comes_to_its_end(name: str, placement: str, recompute: bool) -> None:
    for microbatches in (1, 5):
        prove(pipe(name, microbatches, placement, recompute))


@pytest.mark.parametrize("frozen", [(0, 4), (0, 1, 4), (2,), (1, 2, 3), (3,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_nobody_trains_has_no_backward(name: str, frozen: tuple[int, ...]) -> None:
    for recompute in (False, True):
        found = pipe(name, 3, recompute=recompute, frozen=frozen)
        prove(found)
        for program in found:
            stage = program.stage
            edges = [stage.edges[a.unit] for a in program.actions if a.op in ("SEND", "RECV")]
            assert not any(edge.gradient and edge.value in stage.constant for edge in edges)
            for action in program.actions:
                unit = action.unit
                if action.op in ("B", "I", "W", "C", "R"):
                    assert unit in stage.units_with_backward, action
                if action.op in ("I", "W"):
                    assert stage.is_unit_trainable(unit), action
                    assert not stage.constant.issuperset(stage.units[unit].inputs), action
                if action.op in ("REDUCE", "UPDATE"):
                    assert unit not in frozen


@pytest.mark.parametrize("name", PIPES)
def test_deleted_or_repeated_actions_are_rejected(name: str) -> None:
    """Whatever `check` cannot see on its rank, `require_pipeline_programs_finish` sees beside the others."""
    found = PIPES[name]
    for rank, program in enumerate(found):

        def require(mutant: Program, rank: int = rank) -> None:
            check(mutant)
            require_pipeline_programs_finish([*found[:rank], mutant, *found[rank + 1 :]])

        demand_refusals(f"{name}, rank {rank},", program, require)


def test_values_go_from_reader_to_reader() -> None:
    edges = twins((0, 1, 2, 3))[0].edges
    forward = [(e.value, e.source, e.target) for e in edges if not e.gradient]
    back = [(e.value, e.source, e.target) for e in edges if e.gradient]
    assert forward == [(1, 0, 1), (1, 1, 3), (2, 1, 2), (3, 2, 3)]
    assert back == [(1, 3, 1), (1, 1, 0), (2, 2, 1), (3, 3, 2)]


def test_no_rank_gets_a_value_twice() -> None:
    """Stages 0 and 2 are on rank 0: what stage 0 gave is there already, but gradients still pass through stage 1."""
    rows = [((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2,), (1, 2), (3,)), ((3,), (3,), (4,))]
    edges = make_stages(rows, [True] * 4, [0], [4], [0, 1, 2, 3], (0, 1, 0, 1))[0].edges
    assert [(e.value, e.sender, e.receiver) for e in edges if not e.gradient] == [(1, 0, 1), (2, 1, 0), (3, 0, 1)]
    assert [(e.value, e.source, e.target) for e in edges if e.gradient and e.value == 1] == [(1, 2, 1), (1, 1, 0)]


def move_to_mean(program: Program, moved: list[Action], behind: int) -> Program:
    """Move actions right before MEAN, or behind it."""
    rest = [action for action in program.actions if action not in moved]
    at = rest.index(Action("MEAN")) + behind
    return replace(program, actions=(*rest[:at], *moved, *rest[at:]))


def test_a_deadlock_is_shown_with_an_arrow_on_every_rank() -> None:
    found = pipe("gpipe", 2)
    found[0] = move_to_mean(found[0], [Action("SEND", 0, 0)], behind=0)
    with pytest.raises(ProgramError) as caught:
        require_pipeline_programs_finish(found)
    text = str(caught.value)
    assert text.startswith("the ranks of the pipe wait for each other")
    assert "rank 1 of the pipe, at SEND" in text or "rank 1 of the pipe, at F1.0, waits for SEND0.0 of rank 0" in text
    lines = text.splitlines()
    arrow = next(i for i, line in enumerate(lines) if line.strip() == "^")
    assert lines[arrow - 1][lines[arrow].index("^") :][0] in "FSRB"


def test_a_message_on_the_wrong_rank_is_named() -> None:
    found = pipe("1f1b", 1)
    strange = next(a for a in found[0].actions if a.op == "SEND")
    found[0] = replace(found[0], actions=tuple(a for a in found[0].actions if a != strange))
    other = found[2]
    found[2] = replace(other, actions=(strange, *other.actions))
    with pytest.raises(ProgramError, match=r"SEND\S+, is on rank 2 of the pipe, where it does not belong"):
        require_pipeline_programs_finish(found)


def test_a_message_behind_a_meeting_of_all_ranks_is_a_deadlock() -> None:
    """Nobody leaves MEAN before all have come; in simulated time, ranks go on until they need the mean."""
    found = pipe("1f1b", 1)
    found[0] = move_to_mean(found[0], [a for a in found[0].actions if a.op == "SEND"], behind=1)
    with pytest.raises(ProgramError, match=r"wait for each other\nrank 0 .* at B0\.0, waits for SEND\d\.0 of rank 1\n"):
        require_pipeline_programs_finish(found)
    late = pipe("1f1b", 1)
    last = next(a for a in reversed(late[3].actions) if a.op == "SEND")
    late[3] = move_to_mean(late[3], [last], behind=1)
    with pytest.raises(ProgramError, match=rf"rank 3 of the pipe, at {last}, waits for rank 0, rank 1, rank 2\n"):
        require_pipeline_programs_finish(late)
    assert simulate_programs(late, ActionTimes({}))


def test_all_ranks_meet_in_the_same_verbs() -> None:
    found = pipe("gpipe", 1, commit=True)
    found[2] = replace(found[2], actions=tuple(a for a in found[2].actions if a.op != "COMMIT"))
    with pytest.raises(ProgramError, match="rank 0 of the pipe synchronizes in MEAN COMMIT, rank 2 in MEAN"):
        require_pipeline_programs_finish(found)
