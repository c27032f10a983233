"""check rejects every program that lacks an action or has one twice, and says where."""

from dataclasses import replace

import pytest
from amount import examples
from cases import CHAIN, PLACEMENTS, STAGES, golden, requests
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.errors import ProgramError
from fsdpx.program import Action, Program, Request, Slot, Stage, check, compile, parse

PROGRAMS = golden()


def mutants(program: Program) -> list[tuple[str, Program]]:
    actions = program.actions
    dropped = [(f"without {i} {a}", actions[:i] + actions[i + 1 :]) for i, a in enumerate(actions)]
    repeated = [(f"twice {i} {a}", actions[: i + 1] + actions[i:]) for i, a in enumerate(actions)]
    return [(what, replace(program, actions=made)) for what, made in dropped + repeated]


@pytest.mark.parametrize("name", PROGRAMS)
def test_deleted_or_repeated_actions_are_rejected(name: str) -> None:
    for what, mutant in mutants(PROGRAMS[name]):
        try:
            check(mutant)
        except ProgramError:
            continue
        pytest.fail(f"{name} {what} was accepted")


def test_message_names_the_action_and_points_at_it() -> None:
    program = compile(requests("step", CHAIN, 1, "fsdp"))
    without = tuple(a for a in program.actions if str(a) != "GATHER2")
    with pytest.raises(ProgramError) as caught:
        check(replace(program, actions=without))
    text = str(caught.value)
    assert "F2.0, needs full2, which is not there" in text
    line, arrow = text.splitlines()[1:]
    assert line[arrow.index("^") :].startswith("F2.0")


def test_a_gradient_may_not_be_added_to_while_its_reduce_is_under_way() -> None:
    program = compile(requests("step", CHAIN, 2, "fsdp"))
    early = list(program.actions)
    settle = early.index(Action("SETTLE", 3))
    moved = early.pop(settle)
    again = next(i for i, a in enumerate(early) if str(a) == "B3.1")
    early.insert(again + 1, moved)
    with pytest.raises(ProgramError, match="needs the memory of grad3, where sum3 still lies"):
        check(replace(program, actions=tuple(early)))


def test_different_collective_order_is_named() -> None:
    program = compile(requests("step", CHAIN, 1, "ddp"))
    check(program, program)
    other = list(program.actions)
    first, second = other.index(Action("GATHER", 0)), other.index(Action("GATHER", 1))
    other[first], other[second] = other[second], other[first]
    with pytest.raises(ProgramError, match="collective 0 is GATHER0 in program 0 but GATHER1 in program 1"):
        check(program, replace(program, actions=tuple(other)))


def test_parse_refuses_what_is_no_action() -> None:
    with pytest.raises(ProgramError, match="'f3' is no action"):
        parse("F0.0 f3")


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    """Chains with skips, tied pages, frozen pages and units without parameters."""
    units = draw(st.integers(1, 6))
    pages, trainable, rows = 0, [], []
    for u in range(units):
        own = list(range(pages, pages + draw(st.integers(0, 2))))
        trainable += [draw(st.booleans()) for _ in own]
        tied = draw(st.sets(st.integers(0, pages - 1), max_size=1)) if pages else set()
        pages += len(own)
        skip = draw(st.sets(st.integers(1, u - 1), max_size=1)) if u > 1 else set()
        rows.append(((*own, *sorted(tied)), tuple(dict.fromkeys((u, *sorted(skip)))), (u + 1,)))
    return Stage.of(rows, trainable, [0], [units])


@given(stages(), st.integers(1, 3), st.sampled_from(list(PLACEMENTS)), st.integers(0, 4))
@settings(max_examples=examples(150), derandomize=True, database=None, deadline=None)
def test_whatever_is_compiled_passes(stage: Stage, microbatches: int, placement: str, ahead: int) -> None:
    for kind in ("step", "accumulate", "local", "update", "evaluate", "predict", "forward", "backward"):
        check(compile(requests(kind, stage, microbatches, placement, ahead)))


@given(stages(), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=examples(100), derandomize=True, database=None, deadline=None)
def test_no_more_pages_are_resident_than_asked_for(stage: Stage, microbatches: int, ahead: int) -> None:
    program = compile(Request("step", stage, microbatches, ahead=ahead))
    resident: set[int] = set()
    widest = max((len(u.pages) for u in stage.units), default=0)
    for action in program.actions:
        if action.op == "GATHER":
            resident.add(action.unit)
        elif action.op == "FREE":
            resident.discard(action.unit)
        assert len(resident) <= ahead + max(widest, 1)


@pytest.mark.parametrize("name", STAGES)
def test_programs_of_accumulation_follow_each_other(name: str) -> None:
    """What one program leaves is what the next one begins with."""
    stage = STAGES[name]
    for keep, each in PLACEMENTS.values():
        first = compile(Request("accumulate", stage, 1, keep, each))
        check(first)

        def pages(slots: frozenset[Slot], kind: str) -> frozenset[int]:
            return frozenset(slot.at for slot in slots if slot.kind == kind and slot.at is not None)

        left = first.ends - {Slot("mean")}
        second = Request(
            "step", stage, 1, keep, each, resident=pages(left, "full"), grads=pages(left, "grad"),
            parts=pages(left, "part"), weighed=True,
        )  # fmt: skip
        program = compile(second)
        assert program.begins == left
        check(program)
