"""validate: proves that a schedule can run, and that its sums do not depend on it."""

from collections.abc import Iterator
from itertools import product

from fsdpx.errors import ProgramError
from fsdpx.program.action import Action
from fsdpx.program.grid import UNIT, arrow
from fsdpx.program.pipeline_schedule import PipelineSchedule
from fsdpx.program.simulate import Done, done_as, needs, walked
from fsdpx.program.timeline import Stuck

__all__ = ["validate"]

WHAT = {"F": "forward", "I": "gradient of the input", "W": "gradient of the parameters"}


def validate(schedule: PipelineSchedule) -> None:
    """See that a schedule can run, and that it gives the same bits as any other.

    Every action is F, B, I or W of a stage and a microbatch there are, on the rank of its stage. Every stage has for
    each microbatch one F, then one B, or one I and then one W. The gradients of a stage's parameters are added in the
    order of the microbatches. No rank waits forever: F follows F of the stage before, B and I follow B or I of the
    stage after.

    Parameters
    ----------
    schedule : of any origin

    Raises
    ------
    ProgramError : one of these does not hold; with the schedule, and an arrow under the step
    """
    for rank in range(len(schedule.ranks)):
        _check_rank(schedule, rank)
    _check_complete(schedule)
    _check_progress(schedule)


def _check_rank(schedule: PipelineSchedule, rank: int) -> None:
    done: set[Done] = set()
    added: dict[int, Action] = {}  # the last action of each stage that added to its gradients
    for at, action in enumerate(schedule.ranks[rank]):
        wrong = _misplaced(schedule, rank, action) or _early(action, done)
        if wrong:
            raise _error(schedule, rank, at, f"{action} {wrong}")
        _, stage, mb = done_as(action)
        if action.op in "BW":
            before = added.get(stage, action)
            if done_as(before)[2] > mb:
                why = "they are added in the order of the microbatches, so that every schedule gives the same bits"
                what = f"{action} adds to the gradients of stage {stage} after {before}; {why}"
                raise _error(schedule, rank, at, what)
            added[stage] = action
        done |= {done_as(action), *([("W", stage, mb)] if action.op == "B" else [])}


def _misplaced(schedule: PipelineSchedule, rank: int, action: Action) -> str | None:
    stage, mb = action.unit, action.mb
    if action.op not in ("F", "B", "I", "W") or stage is None or mb is None:
        return "is no step of a schedule: expected F, B, I or W, a stage and .microbatch, as in F3.0"
    if stage >= schedule.stages or mb >= schedule.microbatches:
        there = f"stages 0 to {schedule.stages - 1} and microbatches 0 to {schedule.microbatches - 1}"
        return f"does not exist: there are {there}"
    if schedule.home[stage] != rank:
        return f"stands on rank {rank}, but stage {stage} is on rank {schedule.home[stage]}"
    return None


def _early(action: Action, done: set[Done]) -> str | None:
    """What is wrong with an action after what its rank has done."""
    kind, stage, mb = done_as(action)
    if (kind, stage, mb) in done:
        return f"comes twice: the {WHAT[kind]} of stage {stage}, microbatch {mb}, was already made"
    before = {"F": None, "I": "F", "W": "I"}[kind]
    if before and (before, stage, mb) not in done:
        return f"comes before the {WHAT[before]} of stage {stage}, microbatch {mb}"
    return None


def _check_complete(schedule: PipelineSchedule) -> None:
    there = {(a.op, a.unit, a.mb) for row in schedule.ranks for a in row}
    for stage, mb in product(range(schedule.stages), range(schedule.microbatches)):
        ops = {op for op in "FBIW" if (op, stage, mb) in there}
        if ops not in ({"F", "B"}, {"F", "I", "W"}):
            missing = "F" if "F" not in ops else "W" if "I" in ops else "B (or I and W)"
            rank = schedule.home[stage]
            what = f"rank {rank} has no {missing} of stage {stage}, microbatch {mb} of {schedule.microbatches}"
            raise _error(schedule, rank, len(schedule.ranks[rank]), what)


def _check_progress(schedule: PipelineSchedule) -> None:
    _, stuck = walked(schedule, UNIT)
    if stuck:
        waits = "; ".join(line for wait in stuck for line in _explained(schedule, wait))
        raise _error(schedule, stuck[0].rank, stuck[0].at, f"ranks wait for each other: {waits}")


def _explained(schedule: PipelineSchedule, wait: Stuck) -> Iterator[str]:
    action = schedule.ranks[wait.rank][wait.at]
    for kind, stage, mb in needs(action, schedule.stages):
        if (kind, stage, mb) in wait.keys:
            name = f"F{stage}.{mb}" if kind == "F" else f"B{stage}.{mb} or I{stage}.{mb}"
            yield f"rank {wait.rank} at {action} for {name} of rank {schedule.home[stage]}"


def _error(schedule: PipelineSchedule, rank: int, at: int, what: str) -> ProgramError:
    return ProgramError(f"schedule {schedule.name!r}: {what}\n{arrow(schedule, rank, at)}")
