"""validate: proves that a schedule can run, and that what it adds up does not depend on it."""

from collections.abc import Iterator

from fsdpx.errors import ProgramError
from fsdpx.program.action import Action
from fsdpx.program.grid import UNIT, arrow
from fsdpx.program.plan import Plan
from fsdpx.program.simulate import Done, done_as, needs, reached

__all__ = ["validate"]

WHAT = {"F": "forward", "I": "gradient of the input", "W": "gradient of the parameters"}


def validate(plan: Plan) -> None:
    """Raise ProgramError, with the schedule and an arrow under the step, unless

    every action is F, B, I or W of a stage and a microbatch there are, on the rank of its stage;
    every stage has for each microbatch one F, then one B, or one I and then one W;
    the gradients of a stage's parameters are added in the order of the microbatches;
    and no rank waits for ever: F follows F of the stage before, B and I follow B or I of the stage after.
    """
    for rank in range(len(plan.ranks)):
        _check_rank(plan, rank)
    _check_complete(plan)
    _check_progress(plan)


def _check_rank(plan: Plan, rank: int) -> None:
    done: set[Done] = set()
    added: dict[int, Action] = {}  # the last action of each stage that added to its gradients
    for at, action in enumerate(plan.ranks[rank]):
        wrong = _misplaced(plan, rank, action) or _early(action, done)
        if wrong:
            raise _error(plan, rank, at, f"{action} {wrong}")
        stage, mb = action.unit, action.mb
        assert stage is not None
        assert mb is not None
        if action.op in "BW":
            before = added.setdefault(stage, action)
            if before.mb is not None and before.mb > mb:
                why = "they are added in the order of the microbatches, so that every schedule gives the same bits"
                raise _error(plan, rank, at, f"{action} adds to the gradients of stage {stage} after {before}; {why}")
            added[stage] = action
        done |= {done_as(action), *([("W", stage, mb)] if action.op == "B" else [])}


def _misplaced(plan: Plan, rank: int, action: Action) -> str | None:
    stage, mb = action.unit, action.mb
    if action.op not in ("F", "B", "I", "W") or stage is None or mb is None:
        return "is no step of a schedule: expected F, B, I or W, a stage and .microbatch, as in F3.0"
    if stage >= plan.stages or mb >= plan.microbatches:
        return f"does not exist: there are stages 0 to {plan.stages - 1} and microbatches 0 to {plan.microbatches - 1}"
    if plan.home[stage] != rank:
        return f"stands on rank {rank}, but stage {stage} is on rank {plan.home[stage]}"
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


def _check_complete(plan: Plan) -> None:
    there = {(a.op, a.unit, a.mb) for row in plan.ranks for a in row}
    for stage in range(plan.stages):
        for mb in range(plan.microbatches):
            missing = _missing({op for op in "FBIW" if (op, stage, mb) in there})
            if missing:
                rank = plan.home[stage]
                what = f"rank {rank} has no {missing} of stage {stage}, microbatch {mb} of {plan.microbatches}"
                raise _error(plan, rank, len(plan.ranks[rank]), what)


def _missing(ops: set[str]) -> str | None:
    if "F" not in ops:
        return "F"
    if not ops & {"B", "I"}:
        return "B (or I and W)"
    return "W" if "I" in ops and "W" not in ops else None


def _check_progress(plan: Plan) -> None:
    far = reached(plan, UNIT)
    stuck = [rank for rank, row in enumerate(far) if len(row) < len(plan.ranks[rank])]
    if stuck:
        done = {done_as(event.action) for row in far for event in row}
        waits = "; ".join(line for rank in stuck for line in _waits(plan, rank, len(far[rank]), done))
        raise _error(plan, stuck[0], len(far[stuck[0]]), f"ranks wait for each other: {waits}")


def _waits(plan: Plan, rank: int, at: int, done: set[Done]) -> Iterator[str]:
    action = plan.ranks[rank][at]
    for kind, stage, mb in needs(action, plan.stages):
        if (kind, stage, mb) not in done:
            name = f"F{stage}.{mb}" if kind == "F" else f"B{stage}.{mb} or I{stage}.{mb}"
            yield f"rank {rank} at {action} for {name} of rank {plan.home[stage]}"


def _error(plan: Plan, rank: int, at: int, what: str) -> ProgramError:
    return ProgramError(f"schedule {plan.name!r}: {what}\n{arrow(plan, rank, at)}")
