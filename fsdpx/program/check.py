"""check: proves, before the first byte moves, that a program reads only what is there and leaves nothing behind."""

from collections.abc import Sequence

from fsdpx.errors import ProgramError
from fsdpx.program.action import Action
from fsdpx.program.compiler import Program
from fsdpx.program.verbs import VERBS, buffer_of

__all__ = ["check"]


def check(*programs: Program) -> None:
    """Raise ProgramError at the first action that cannot run as the table of verbs says, or if ranks of one stage
    would issue collectives in different orders. One program: its slots. Several: their agreement too.
    """
    for program in programs:
        _check_slots(program)
    for rank, other in enumerate(programs[1:], start=1):
        _check_order(programs[0], other, rank)


def _check_slots(program: Program) -> None:
    alive = set(program.begins)
    buffers = {buffer_of(slot): slot for slot in alive}
    for at, slots in enumerate(program.slots):
        for slot in (*slots.takes, *slots.reads):
            if slot not in alive:
                raise _error(program.actions, at, f"needs {slot}, which is not there")
        for slot in slots.takes:
            alive.discard(slot)
            buffers.pop(buffer_of(slot), None)
        for slot in slots.gives:
            if slot in alive:
                raise _error(program.actions, at, f"gives {slot}, which is already there")
        for slot in (*slots.gives, *slots.adds):
            tenant = buffers.setdefault(buffer_of(slot), slot)
            if tenant != slot:
                raise _error(program.actions, at, f"needs the memory of {slot}, where {tenant} still lies")
            alive.add(slot)
    left, missing = sorted(alive - program.ends), sorted(program.ends - alive)
    if left or missing:
        what = f"leaves {', '.join(left)} behind" if left else f"ends without {', '.join(missing)}"
        raise ProgramError(f"the {program.kind} program {what}\n{_lines(program.actions, len(program.actions) - 1)}")


def _check_order(first: Program, other: Program, rank: int) -> None:
    """Collectives must come in one order on all ranks of a stage; compute between them may differ."""
    ours, theirs = _collectives(first), _collectives(other)
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise ProgramError(
                f"collective {at} is {a} in program 0 but {b} in program {rank}\n"
                f"{_lines(ours, at)}\n{_lines(theirs, at)}"
            )
    if len(ours) != len(theirs):
        raise ProgramError(f"program 0 issues {len(ours)} collectives, program {rank} issues {len(theirs)}")


def _collectives(program: Program) -> list[Action]:
    return [a for a in program.actions if VERBS[a.op].moves]


def _error(actions: Sequence[Action], at: int, what: str) -> ProgramError:
    return ProgramError(f"action {at}, {actions[at]}, {what}\n{_lines(actions, at)}")


def _lines(actions: Sequence[Action], at: int, around: int = 6) -> str:
    """The neighbourhood of an action with an arrow under it."""
    start = max(at - around, 0)
    words = [str(a) for a in actions[start : at + around + 1]]
    lead = "... " if start else ""
    arrow = len(lead) + sum(len(w) + 1 for w in words[: at - start])
    return f"  {lead}{' '.join(words)}\n  {' ' * arrow}^"
