"""check: proves, before the first byte moves, that a program reads only what is there and leaves nothing behind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fsdpx.errors import ProgramError
from fsdpx.program.action import Action, marked
from fsdpx.program.compiler import Program
from fsdpx.program.machine import run
from fsdpx.program.slots import buffer_of
from fsdpx.program.verbs import VERBS, partner

__all__ = ["check", "check_pipe"]


def check(*programs: Program) -> None:
    """Raise ProgramError at the first action that cannot run as the table of verbs says, or if ranks of one stage
    would issue collectives in different orders. One program: its slots. Several: their agreement too."""
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
            occupant = buffers.setdefault(buffer_of(slot), slot)
            if occupant != slot:
                raise _error(program.actions, at, f"needs the memory of {slot}, where {occupant} still lies")
            alive.add(slot)
    left, missing = sorted(map(str, alive - program.ends)), sorted(map(str, program.ends - alive))
    if left or missing:
        what = f"leaves {', '.join(left)} behind" if left else f"ends without {', '.join(missing)}"
        raise ProgramError(f"the {program.kind} program {what}\n{marked(program.actions, len(program.actions) - 1)}")


def _check_order(first: Program, other: Program, rank: int) -> None:
    """Collectives must come in one order on all ranks of a stage; compute between them may differ."""
    ours, theirs = ([a for a in program.actions if VERBS[a.op].moves] for program in (first, other))
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            what = f"collective {at} is {a} in program 0 but {b} in program {rank}"
            raise ProgramError(f"{what}\n{marked(ours, at)}\n{marked(theirs, at)}")
    if len(ours) != len(theirs):
        raise ProgramError(f"program 0 issues {len(ours)} collectives, program {rank} issues {len(theirs)}")


def check_pipe(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless the programs of all ranks of a pipe, run together, finish.

    programs: by rank of the pipe. Sends and receives are issued at once; the first action that needs what was
    received waits for it, and verbs in which ranks meet wait for all of them."""
    run(programs, lambda rank, action: 0.0, blocking=True)
    _check_meetings(programs)
    _check_pairs(programs)


def _check_meetings(programs: Sequence[Program]) -> None:
    """Every rank takes part in what the whole world does together."""
    first, *others = [[a for a in p.actions if VERBS[a.op].lane == "world"] for p in programs]
    for rank, other in enumerate(others, start=1):
        if other != first:
            ours, theirs = (" ".join(map(str, some)) or "nothing" for some in (first, other))
            raise ProgramError(f"rank 0 of the pipe meets all others in {ours}, rank {rank} in {theirs}")


def _check_pairs(programs: Sequence[Program]) -> None:
    """Every message is sent once, by its sender, and received once, by its receiver."""
    counts = Counter(a for program in programs for a in program.actions)
    for rank, program in enumerate(programs):
        for at, action in enumerate(program.actions):
            sends = VERBS[action.op].sends
            if not sends and not VERBS[action.op].receives:
                continue
            edge = program.stage.edge(action)
            if rank != (edge.sender if sends else edge.receiver):
                raise _error(program.actions, at, f"stands on rank {rank} of the pipe, where it does not belong")
            if counts[action] > 1:
                raise _error(program.actions, at, f"stands there {counts[action]} times")
            if counts[replace(action, op=partner(action.op))] != 1:
                other = f"received by rank {edge.receiver}" if sends else f"sent by rank {edge.sender}"
                raise _error(program.actions, at, f"is not {other} of the pipe")


def _error(actions: Sequence[Action], at: int, what: str) -> ProgramError:
    return ProgramError(f"action {at}, {actions[at]}, {what}\n{marked(actions, at)}")
