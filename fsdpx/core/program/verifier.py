"""Check programs and schedules before they run. Buffers must be filled before they are read, and ranks must not
deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from fsdpx.core.program.compiler import Program, ProgramRequest, compile
from fsdpx.core.program.simulator import (
    UNIT_COSTS,
    Deadlock,
    Done,
    PipelineSchedule,
    get_completion_key,
    list_dependencies_of_action,
    simulate_programs_by_rank,
    simulate_until_deadlock,
)
from fsdpx.core.program.verbs import VERBS, Action, format_action_with_neighbors, get_buffer_slot, get_partner_verb
from fsdpx.errors import ProgramError

__all__ = ["check", "compile_and_check_pipe", "require_pipeline_programs_finish", "validate"]


def check(*programs: Program) -> None:
    """Raise ProgramError at the first action that uses its slots (named buffers) incorrectly, or if ranks of one stage
    would issue collectives in different orders.

    Parameters
    ----------
    programs : one program, whose slots are checked; or the programs of several ranks of one stage, which must also
        issue the same collectives

    Raises
    ------
    ProgramError : if a program is invalid; the message names the wrong action and shows it with its neighbors
    """
    for program in programs:
        _verify_slot_lifetimes(program)
    for rank, other in enumerate(programs[1:], start=1):
        _require_same_collective_order(programs[0], other, rank)


def _verify_slot_lifetimes(program: Program) -> None:
    alive = set(program.begins)
    buffers = {get_buffer_slot(slot): slot for slot in alive}
    for index, slots in enumerate(program.slots):
        for slot in (*slots.takes, *slots.reads):
            if slot not in alive:
                raise _make_program_error(program.actions, index, f"needs {slot}, which is empty")
        for slot in slots.takes:
            alive.discard(slot)
            buffers.pop(get_buffer_slot(slot), None)
        for slot in slots.gives:
            if slot in alive:
                raise _make_program_error(program.actions, index, f"gives {slot}, which is already filled")
        for slot in (*slots.gives, *slots.adds):
            occupant = buffers.setdefault(get_buffer_slot(slot), slot)
            if occupant != slot:
                raise _make_program_error(
                    program.actions, index, f"needs the memory of {slot}, where {occupant} is still stored"
                )
            alive.add(slot)
    left, missing = sorted(map(str, alive - program.ends)), sorted(map(str, program.ends - alive))
    if left or missing:
        fault = f"leaves {', '.join(left)} behind" if left else f"ends without {', '.join(missing)}"
        last = format_action_with_neighbors(program.actions, len(program.actions) - 1)
        raise ProgramError(f"the {program.kind} program {fault}\n{last}")


def _require_same_collective_order(first: Program, other: Program, rank: int) -> None:
    """Raise ProgramError unless both programs issue the same collectives in the same order. Their compute actions may
    differ. `rank` is the rank of the program `other`, for the error message."""
    ours, theirs = ([a for a in program.actions if VERBS[a.op].moves] for program in (first, other))
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            fault = f"collective {index} is {a} in program 0 but {b} in program {rank}"
            raise ProgramError(
                f"{fault}\n{format_action_with_neighbors(ours, index)}\n{format_action_with_neighbors(theirs, index)}"
            )
    if len(ours) != len(theirs):
        raise ProgramError(f"program 0 issues {len(ours)} collectives, program {rank} issues {len(theirs)}")


def require_pipeline_programs_finish(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless the programs of the pipeline ranks all finish when they run together.

    Sends and receives do not block. The first action that needs a received value waits for it, and synchronizing
    operations wait for all pipeline ranks.

    Parameters
    ----------
    programs : one program per pipeline rank, in rank order

    Raises
    ------
    ProgramError : if ranks deadlock, a message has no send or no receive, or ranks issue collectives over all ranks in
        different orders
    """
    simulate_programs_by_rank(programs, lambda rank, action: 0.0, blocking=True)
    _require_same_world_collectives(programs)
    _require_matched_messages(programs)


@lru_cache(maxsize=128)  # cached because all ranks in a process (threads or simulated ranks) do the same check
def compile_and_check_pipe(requests: tuple[ProgramRequest, ...]) -> None:
    """Compile the requests of all pipeline ranks and check the programs with `require_pipeline_programs_finish`. The
    result is cached."""
    require_pipeline_programs_finish([compile(request) for request in requests])


def _require_same_world_collectives(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless all pipeline ranks issue the same collectives over the world in the same order."""
    first, *others = [[a for a in p.actions if VERBS[a.op].lane == "world"] for p in programs]
    for rank, other in enumerate(others, start=1):
        if other != first:
            ours, theirs = (" ".join(map(str, some)) or "nothing" for some in (first, other))
            raise ProgramError(f"rank 0 of the pipe synchronizes in {ours}, rank {rank} in {theirs}")


def _require_matched_messages(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless every message is sent once by its sender and received once by its receiver."""
    counts = Counter(a for program in programs for a in program.actions)
    for rank, program in enumerate(programs):
        for index, action in enumerate(program.actions):
            sends = VERBS[action.op].is_send
            if not sends and not VERBS[action.op].is_receive:
                continue
            edge = program.stage.edge_of(action)
            if rank != (edge.sender if sends else edge.receiver):
                raise _make_program_error(
                    program.actions, index, f"is on rank {rank} of the pipe, where it does not belong"
                )
            if counts[action] > 1:
                raise _make_program_error(program.actions, index, f"occurs {counts[action]} times")
            if counts[Action(get_partner_verb(action.op), action.unit, action.mb)] != 1:
                other = f"received by rank {edge.receiver}" if sends else f"sent by rank {edge.sender}"
                raise _make_program_error(program.actions, index, f"is not {other} of the pipe")


def _make_program_error(actions: Sequence[Action], at: int, what: str) -> ProgramError:
    return ProgramError(f"action {at}, {actions[at]}, {what}\n{format_action_with_neighbors(actions, at)}")


ACTION_NAMES = {"F": "forward", "I": "gradient of the input", "W": "gradient of the parameters"}


def validate(schedule: PipelineSchedule) -> None:
    """Raise ProgramError unless a schedule can run and gives bitwise the same results as any other valid schedule.

    Every action must be F, B, I or W of an existing stage and microbatch, on the home rank of its stage. For each
    microbatch, every stage must run one F and then either one B, or one I and later one W. The gradients of a stage's
    parameters must be added in the order of the microbatches. There must be no deadlock: F waits for F of the previous
    stage, and B and I wait for B or I of the next stage.

    Parameters
    ----------
    schedule : the schedule to check

    Raises
    ------
    ProgramError : if a rule is broken; the message shows the schedule with an arrow at the wrong entry
    """
    for rank in range(len(schedule.ranks)):
        _require_valid_action_order_on_rank(schedule, rank)
    _require_complete_schedule(schedule)
    _, stuck = simulate_until_deadlock(schedule, UNIT_COSTS)
    if stuck:
        waits = "; ".join(line for wait in stuck for line in _explain_wait(schedule, wait))
        raise _make_schedule_error(schedule, stuck[0].rank, stuck[0].at, f"ranks wait for each other: {waits}")


def _require_valid_action_order_on_rank(schedule: PipelineSchedule, rank: int) -> None:
    done: set[Done] = set()
    added: dict[int, Action] = {}  # for each stage, the last action that added to its gradients
    for index, action in enumerate(schedule.ranks[rank]):
        wrong = _describe_misplaced_action(schedule, rank, action) or _describe_order_error(action, done)
        if wrong:
            raise _make_schedule_error(schedule, rank, index, f"{action} {wrong}")
        _, stage, mb = get_completion_key(action)
        if action.op in "BW":
            before = added.get(stage, action)
            if get_completion_key(before)[2] > mb:
                why = "they are added in the order of the microbatches, so that every schedule gives the same bits"
                fault = f"{action} adds to the gradients of stage {stage} after {before}; {why}"
                raise _make_schedule_error(schedule, rank, index, fault)
            added[stage] = action
        done |= {get_completion_key(action), *([("W", stage, mb)] if action.op == "B" else [])}


def _describe_misplaced_action(schedule: PipelineSchedule, rank: int, action: Action) -> str | None:
    stage, mb = action.unit, action.mb
    if action.op not in ("F", "B", "I", "W") or stage is None or mb is None:
        return "is no step of a schedule: expected F, B, I or W, a stage and .microbatch, as in F3.0"
    if stage >= schedule.stages or mb >= schedule.microbatches:
        there = f"stages 0 to {schedule.stages - 1} and microbatches 0 to {schedule.microbatches - 1}"
        return f"does not exist: there are {there}"
    if schedule.home[stage] != rank:
        return f"is on rank {rank}, but stage {stage} is on rank {schedule.home[stage]}"
    return None


def _describe_order_error(action: Action, done: set[Done]) -> str | None:
    """Return text that explains why `action` must not run next, given that the actions in `done` have run. Return None
    if it may run."""
    kind, stage, mb = get_completion_key(action)
    if (kind, stage, mb) in done:
        return f"occurs twice: the {ACTION_NAMES[kind]} of stage {stage}, microbatch {mb}, has already run"
    before = {"F": None, "I": "F", "W": "I"}[kind]
    if before and (before, stage, mb) not in done:
        return f"comes before the {ACTION_NAMES[before]} of stage {stage}, microbatch {mb}"
    return None


def _require_complete_schedule(schedule: PipelineSchedule) -> None:
    there = {(a.op, a.unit, a.mb) for row in schedule.ranks for a in row}
    for stage, mb in product(range(schedule.stages), range(schedule.microbatches)):
        ops = {op for op in "FBIW" if (op, stage, mb) in there}
        if ops not in ({"F", "B"}, {"F", "I", "W"}):
            missing = "F" if "F" not in ops else "W" if "I" in ops else "B (or I and W)"
            rank = schedule.home[stage]
            fault = f"rank {rank} has no {missing} of stage {stage}, microbatch {mb} of {schedule.microbatches}"
            raise _make_schedule_error(schedule, rank, len(schedule.ranks[rank]), fault)


def _explain_wait(schedule: PipelineSchedule, wait: Deadlock) -> Iterator[str]:
    action = schedule.ranks[wait.rank][wait.at]
    for kind, stage, mb in list_dependencies_of_action(action, schedule.stages):
        if (kind, stage, mb) in wait.keys:
            name = f"F{stage}.{mb}" if kind == "F" else f"B{stage}.{mb} or I{stage}.{mb}"
            yield f"rank {wait.rank} at {action} for {name} of rank {schedule.home[stage]}"


def _make_schedule_error(schedule: PipelineSchedule, rank: int, at: int, what: str) -> ProgramError:
    from fsdpx.core.program.drawing import format_marked_schedule_step

    return ProgramError(f"schedule {schedule.name!r}: {what}\n{format_marked_schedule_step(schedule, rank, at)}")
