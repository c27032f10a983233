"""check: proves, before the first byte moves, that a program reads only what is there and leaves nothing behind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fsdpx.errors import ProgramError
from fsdpx.program.action import Action
from fsdpx.program.compiler import Program
from fsdpx.program.slots import Slot, buffer_of
from fsdpx.program.stage import Edge
from fsdpx.program.verbs import VERBS

__all__ = ["check", "check_pipe"]


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
    left, missing = sorted(map(str, alive - program.ends)), sorted(map(str, program.ends - alive))
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


def check_pipe(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless the programs of all ranks of a pipe, run together, come to their end.

    programs: by rank of the pipe. Sends and receives are issued at once; who first needs what was received waits for
    it, and verbs of the whole world wait for each other.
    """
    at, sent, due = [0] * len(programs), set[Action](), [dict[Slot, Action]() for _ in programs]
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program.actions) and not _waits(program, at[rank], due[rank], sent):
                action = program.actions[at[rank]]
                if VERBS[action.op].lane == "world":
                    break
                _issue(program, at[rank], due[rank], sent)
                at[rank] += 1
                moving = True
        if not moving and _all_meet(programs, at):
            at = [i + 1 for i in at]
            moving = True
    stuck = [rank for rank, program in enumerate(programs) if at[rank] < len(program.actions)]
    if stuck:
        raise ProgramError("\n".join(["the ranks of the pipe wait for each other", *_stuck(programs, at, due, sent)]))
    _check_pairs(programs)


def _waits(program: Program, at: int, due: dict[Slot, Action], sent: set[Action]) -> Action | None:
    """The message that an action cannot do without, if it was not sent yet."""
    slots = program.slots[at]
    return next((due[s] for s in (*slots.takes, *slots.reads, *slots.adds) if s in due and due[s] not in sent), None)


def _issue(program: Program, at: int, due: dict[Slot, Action], sent: set[Action]) -> None:
    action, slots = program.actions[at], program.slots[at]
    for slot in slots.takes:
        due.pop(slot, None)
    if VERBS[action.op].calls("send"):
        sent.add(action)
    if VERBS[action.op].calls("recv"):
        due |= dict.fromkeys(slots.gives, _other_end(action))


def _other_end(action: Action) -> Action:
    """The receive of a send, the send of a receive."""
    call = "recv" if VERBS[action.op].calls("send") else "send"
    return replace(action, op=next(op for op, verb in VERBS.items() if verb.calls(call)))


def _all_meet(programs: Sequence[Program], at: Sequence[int]) -> bool:
    """Whether all have come to the same action of the whole world."""
    if any(i == len(program.actions) for program, i in zip(programs, at, strict=True)):
        return False
    here = {program.actions[i] for program, i in zip(programs, at, strict=True)}
    return len(here) == 1 and VERBS[here.pop().op].lane == "world"


def _stuck(programs: Sequence[Program], at: list[int], due: list[dict[Slot, Action]], sent: set[Action]) -> list[str]:
    lines = []
    for rank, program in enumerate(programs):
        if at[rank] == len(program.actions):
            lines.append(f"rank {rank} of the pipe is done")
            continue
        message = _waits(program, at[rank], due[rank], sent)
        why = f"waits for {message} of rank {_edge(program, message).sender}" if message else "waits for all ranks"
        lines += [f"rank {rank} of the pipe, at {program.actions[at[rank]]}, {why}", _lines(program.actions, at[rank])]
    return lines


def _edge(program: Program, message: Action) -> Edge:
    assert message.unit is not None
    return program.stage.edges[message.unit]


def _check_pairs(programs: Sequence[Program]) -> None:
    """Every message is sent once, by its sender, and received once, by its receiver."""
    counts = Counter(a for program in programs for a in program.actions)
    for rank, program in enumerate(programs):
        for at, action in enumerate(program.actions):
            sends = VERBS[action.op].calls("send")
            if not sends and not VERBS[action.op].calls("recv"):
                continue
            edge = _edge(program, action)
            if rank != (edge.sender if sends else edge.receiver):
                raise _error(program.actions, at, f"stands on rank {rank} of the pipe, where it does not belong")
            if counts[action] > 1:
                raise _error(program.actions, at, f"stands there {counts[action]} times")
            if counts[_other_end(action)] != 1:
                other = f"received by rank {edge.receiver}" if sends else f"sent by rank {edge.sender}"
                raise _error(program.actions, at, f"is not {other} of the pipe")


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
