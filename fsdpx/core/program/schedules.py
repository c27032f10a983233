"""Pipeline schedules as data: for each pipeline rank, the order of the forward and backward actions of its stages.

An entry of a schedule is an Action whose `unit` is a stage: F3.0 is the forward pass of stage 3 for microbatch 0. B is
the backward pass. I is its first half, which computes the gradient of the input, and W is its second half, which
computes the gradient of the parameters. A schedule is a function of the numbers of ranks, microbatches and stages per
rank. It contains no messages or collectives; compiler passes add them. In this module, P is the number of ranks, m is
the number of microbatches, and TF, TI and TW are the times of F, I and W.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.safe_files import describe_read_error, expanduser, read_file
from fsdpx.core.program.simulator import PipelineSchedule
from fsdpx.core.program.verbs import Action
from fsdpx.core.program.verifier import validate
from fsdpx.errors import ConfigError

__all__ = [
    "SCHEDULES",
    "ScheduleFunction",
    "build_greedy_schedule",
    "count_in_flight",
    "gpipe",
    "interleaved",
    "make_placed_schedule",
    "make_schedule",
    "one_f_one_b",
    "validate",
    "zb_h1",
    "zb_h2",
    "zbv",
]  # fmt: skip

MAX_SCHEDULE_FILE_BYTES = 100_000_000
"""Maximum size of a schedule file, in bytes."""
Actions = list[Action]
ScheduleFunction = Callable[..., Any]
"""Function (ranks, microbatches, per_rank) that returns a PipelineSchedule, or the actions of each rank as a list or as
text."""


def gpipe(ranks: int, microbatches: int, per_rank: int = 1) -> PipelineSchedule:
    """Return the GPipe schedule: all forwards, then all backwards (Huang et al., NeurIPS 2019).

    Every rank has all m microbatches in flight. If all stages take equal time, the bubble on P ranks is (P - 1) / (m +
    P - 1) of the step.
    """
    _require_valid_counts("gpipe", ranks, microbatches, per_rank, 1)
    return _build_one_stage_per_rank("gpipe", ranks, microbatches, lambda rank: microbatches)


def one_f_one_b(ranks: int, microbatches: int, per_rank: int = 1) -> PipelineSchedule:
    """Return the 1F1B schedule, which alternates forwards and backwards, as in PipeDream-flush (Narayanan et al., ICML
    2021). It is the default of Megatron-LM.

    The bubble is the same as for `gpipe`, but at most P - r microbatches are in flight on rank r of P."""
    _require_valid_counts("1f1b", ranks, microbatches, per_rank, 1)
    return _build_one_stage_per_rank("1f1b", ranks, microbatches, lambda rank: ranks - rank - 1)


def interleaved(ranks: int, microbatches: int, per_rank: int = 2) -> PipelineSchedule:
    """Return the interleaved 1F1B schedule with v stages per rank, where stage s is on rank s % P of P ranks
    (Narayanan et al., SC 2021, section 2.2).

    Microbatches pass through the stages of a rank in rounds of P; the last round may be shorter. The bubble is (P - 1)
    / (v m + P - 1) if the number of microbatches m is a multiple of P. This schedule sends (v P - 1) / (P - 1) times
    as many messages as 1F1B.
    """
    _require_valid_counts("interleaved", ranks, microbatches, per_rank, 2, allows_more=True)
    # build complete rounds, then drop the surplus microbatches: the order stays valid without them
    rounds = [range(start, start + ranks) for start in range(0, microbatches, ranks)]
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * per_rank, ranks)
        forwards = [Action("F", s, m) for group in rounds for s in stages for m in group]
        backwards = [Action("B", s, m) for group in rounds for s in reversed(stages) for m in group]
        both = _alternate_actions(forwards, backwards, warm=2 * (ranks - rank - 1) + (per_rank - 1) * ranks)
        rows.append([action for action in both if action.mb in range(microbatches)])
    return PipelineSchedule.from_rows("interleaved", rows, microbatches)


def build_greedy_schedule(name: str, home: Sequence[int], microbatches: int) -> PipelineSchedule:
    """Build a schedule for any placement of stages, following the rules of `name` ("gpipe", "1f1b" or "interleaved").
    `home` is the rank of each stage.

    The schedule is greedy: in each time step, each rank runs one of the actions that are ready. In gpipe, all forwards
    run first. Otherwise, a ready backward has priority, and at most S - s microbatches are in flight at stage s of S.
    This limit never blocks the oldest microbatch, so there is no deadlock. If several stages are ready, the last one
    has priority. In interleaved, forwards run in rounds, with one microbatch per rank in each round."""
    stages, ranks, all_first, in_rounds = len(home), max(home) + 1, name == "gpipe", SCHEDULES[name].interleaves
    done = {"F": [0] * stages, "B": [0] * stages}  # number of microbatches that each stage has completed

    def is_ready(op: str, stage: int) -> bool:
        done_count, forward = done[op][stage], done["F"][stage]
        if op == "F":
            free = all_first or forward - done["B"][stage] < stages - stage
            return done_count < microbatches and free and (stage == 0 or done["F"][stage - 1] > done_count)
        whole = all(done["F"][s] == microbatches for s in range(stages) if home[s] == home[stage])
        after = stage == stages - 1 or done["B"][stage + 1] > done_count
        return done_count < forward and after and (whole or not all_first)

    def get_urgency(step: tuple[str, int]) -> tuple[int, ...]:
        op, stage = step
        return (1, done["F"][stage] // ranks, stage) if op == "F" and in_rounds else (op == "F", -stage)

    rows: list[Actions] = [[] for _ in range(ranks)]
    while done["B"][0] < microbatches:
        ready_actions = [
            [(op, s) for op in "BF" for s in range(stages) if home[s] == r and is_ready(op, s)] for r in range(ranks)
        ]
        for row, steps in zip(rows, ready_actions, strict=True):
            if steps:
                op, stage = min(steps, key=get_urgency)
                row.append(Action(op, stage, done[op][stage]))
                done[op][stage] += 1
    return PipelineSchedule.from_rows(name, rows, microbatches)


def zb_h1(ranks: int, microbatches: int, per_rank: int = 1) -> PipelineSchedule:
    """Return the zero-bubble schedule ZB-H1 (Qi et al., ICLR 2024, section 2.1): 1F1B with each backward split into two
    halves, I and W. W is delayed to fill the bubble at the end.

    As in 1F1B, at most P - r microbatches wait for I on rank r of P. Another r microbatches wait for W, which makes P
    in total on every rank. The idle time is (P - 1)(TF + TI - TW) for m >= P microbatches and TW <= TF.
    """
    _require_valid_counts("zb-h1", ranks, microbatches, per_rank, 1)
    return _build_one_stage_per_rank("zb-h1", ranks, microbatches, lambda rank: ranks - rank - 1, lambda rank: rank)


def zb_h2(ranks: int, microbatches: int, per_rank: int = 1) -> PipelineSchedule:
    """Return the zero-bubble schedule ZB-H2 (Qi et al., ICLR 2024, section 2.2): ZB-H1 with twice the warm-up, which
    also fills the bubble at the start.

    At most 2(P - r) - 1 microbatches wait for I on rank r of P. Another 2r microbatches wait for W, which makes 2P - 1
    in total on every rank. The idle time is max(0, (P - 1)(TF + TI - 2TW)) for m >= 2P - 1 microbatches and TW <= TF.
    """
    _require_valid_counts("zb-h2", ranks, microbatches, per_rank, 1)
    return _build_one_stage_per_rank(
        "zb-h2", ranks, microbatches, lambda rank: 2 * (ranks - rank - 1), lambda rank: 2 * rank
    )


def zbv(ranks: int, microbatches: int, per_rank: int = 2) -> PipelineSchedule:
    """Return the zero-bubble schedule ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024).
    Each of P ranks has two stages, placed in the shape of a V: stage s is on rank s in the first half and on rank 2P -
    1 - s in the second half.

    There is no idle time if TF = TI = TW and m >= 2P - 1 microbatches. At most 2P (stage, microbatch) pairs are in
    flight on each rank. These stages are half as large as the stages of 1F1B, so each rank needs as much memory as the
    first rank in 1F1B."""
    _require_valid_counts("zbv", ranks, microbatches, per_rank, 2)
    # build the order for at least 2P - 1 microbatches; the actions of surplus microbatches are removed below
    whole = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        after = ranks - rank
        # lower case stands for this rank's stage in the first half, and upper case for its stage in the second half
        start = "f" * (2 * after - 1) + "Ff" * rank + "FIW" * after
        end = "iI" * rank + "iw" * after + "W" * whole + "w" * whole
        all_of_them = _expand_letters(start + "fiwFIW" * (whole - ranks) + end, rank, 2 * ranks - 1 - rank)
        rows.append([action for action in all_of_them if action.mb in range(microbatches)])
    return PipelineSchedule.from_rows("zbv", rows, microbatches)


def _expand_letters(letters: str, down: int, back: int) -> Actions:
    """Return the actions that `letters` abbreviate. Lower case stands for stage `down`, and upper case for stage
    `back`. The first occurrence of a letter is the action for microbatch 0, the second is for microbatch 1, and so
    on."""
    count = {letter: itertools.count() for letter in "fiwFIW"}
    return [Action(x.upper(), down if x.islower() else back, next(count[x])) for x in letters]


def _build_one_stage_per_rank(
    name: str, ranks: int, microbatches: int, warm: Callable[[int], int], late: Callable[[int], int] | None = None
) -> PipelineSchedule:
    """Build a schedule with stage r on rank r.

    `warm(rank)` is the number of forwards that run before forwards and backwards alternate. `late(rank)` is the number
    of microbatches by which W lags behind I. If `late` is None, backwards are not split into I and W."""
    rows = []
    for rank in range(ranks):
        forwards, backwards, weights = (
            [Action(op, rank, m) for m in range(microbatches)] for op in ("F", "B" if late is None else "I", "W")
        )
        rows.append(
            _alternate_actions(forwards, backwards, warm(rank), weights if late else [], late(rank) if late else 0)
        )
    return PipelineSchedule.from_rows(name, rows, microbatches)


def _alternate_actions(
    forwards: Actions, backwards: Actions, warm: int, weights: Sequence[Action] = (), late: int = 0
) -> Actions:
    """Return `warm` forwards, followed by alternating forwards and backwards. The nth action of `weights` runs after
    backward n + `late`."""
    actions = forwards[:warm]
    for n, backward in enumerate(backwards):
        actions += [*forwards[warm + n : warm + n + 1], backward]
        actions += weights[n - late : n - late + 1] if n >= late else []
    return actions + list(weights[max(len(backwards) - late, 0) :])


def _require_valid_counts(
    name: str, ranks: int, microbatches: int, per_rank: int, wanted_per_rank: int, allows_more: bool = False
) -> None:
    if ranks < 1 or microbatches < 1:
        raise ConfigError(f"schedule {name!r}: ranks={ranks} and microbatches={microbatches} must both be at least 1")
    if per_rank < wanted_per_rank or (per_rank > wanted_per_rank and not allows_more):
        wanted = f"{wanted_per_rank} stage{'s' * (wanted_per_rank > 1)}{' or more' * allows_more}"
        raise ConfigError(
            f"schedule {name!r} puts {wanted} on each rank, not per_rank={per_rank}, which makes "
            f"{ranks * per_rank} stages on {ranks} ranks; 'interleaved' takes 2 or more per rank, 'zbv' 2, the others 1"
        )


@dataclass(frozen=True)
class NamedSchedule:
    """The entry of one schedule in `SCHEDULES`.

    Attributes
    ----------
    make_schedule : function of the numbers of ranks, microbatches and stages per rank
    steady : number of microbatches per pipeline rank above which each additional microbatch lengthens the step by the
        same time. If it is None (unknown), plans do not search this schedule, and list it as not searched
    fixed : if the schedule allows only one placement of stages, text that describes this placement; otherwise "".
        Schedules with a fixed placement fill idle time with W actions
    interleaves : whether each rank has several stages, which run in rounds with one microbatch per rank
    frugal : whether the number of microbatches in flight never exceeds that of 1F1B
    """

    make_schedule: Callable[[int, int, int], PipelineSchedule]
    steady: int | None
    fixed: str = ""
    interleaves: bool = False
    frugal: bool = False


_IN_ORDER = "has one stage on each rank, in order"
_IN_A_V = "goes down the ranks and comes back in a V, stage s on rank s and stage 2P - 1 - s as well"
SCHEDULES = {
    "gpipe": NamedSchedule(gpipe, steady=None),
    "1f1b": NamedSchedule(one_f_one_b, steady=3, frugal=True),
    "interleaved": NamedSchedule(interleaved, steady=4, interleaves=True),
    "zb-h1": NamedSchedule(zb_h1, steady=3, fixed=_IN_ORDER, frugal=True),
    "zb-h2": NamedSchedule(zb_h2, steady=None, fixed=_IN_ORDER),
    "zbv": NamedSchedule(zbv, steady=None, fixed=_IN_A_V),
}
"""Schedules by name. Plans, error messages and suggestions read all properties of a schedule from here."""


def make_schedule(
    choice: str | Path | ScheduleFunction, ranks: int, microbatches: int, per_rank: int | None = None
) -> PipelineSchedule:
    """Build and validate a schedule for a number of ranks and microbatches.

    Parameters
    ----------
    choice : a name in `SCHEDULES`; a function (ranks, microbatches, per_rank) that returns either a PipelineSchedule
        or, for each rank, its actions as a list or as text; or the path of a text file with one line of actions per
        rank, in which blanks separate actions and # begins a comment
    ranks : number of pipeline ranks
    microbatches : number of microbatches per step
    per_rank : stages per rank; if None (default), the schedule's own default (2 for interleaved and zbv, 1 for the
        others)

    Returns
    -------
    PipelineSchedule : a schedule that can run; its results are bitwise equal to the results of any other schedule

    Raises
    ------
    ConfigError : if the schedule does not allow these numbers
    ProgramError : if the schedule cannot run
    """
    if callable(choice):
        return _call_pipeline_schedule_function(choice, ranks, microbatches, per_rank)
    if isinstance(choice, str) and choice in SCHEDULES:
        return _make_named_schedule(choice, ranks, microbatches, per_rank)
    if not isinstance(choice, str | Path):
        raise ConfigError(f"schedule={choice!r}: a name, a function or the path of a text file is needed")
    try:
        text = read_file(expanduser(choice), MAX_SCHEDULE_FILE_BYTES, ours=False).decode()
    except FileNotFoundError:
        names = ", ".join(map(repr, SCHEDULES))
        raise ConfigError(
            f"schedule={str(choice)!r} is none of {names}, no function, and no text file of that name"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"schedule={str(choice)!r} cannot be read: {describe_read_error(error, choice)}") from error
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return _convert_and_validate_schedule(Path(choice).name, filter(None, lines), ranks, microbatches, per_rank)


@lru_cache(maxsize=64)
def _make_named_schedule(name: str, ranks: int, microbatches: int, per_rank: int | None) -> PipelineSchedule:
    return _call_pipeline_schedule_function(SCHEDULES[name].make_schedule, ranks, microbatches, per_rank)


def make_placed_schedule(
    choice: str | Path | ScheduleFunction, ranks: int, microbatches: int, stages: int | Sequence[int]
) -> PipelineSchedule:
    """Build and validate a schedule with a given placement of stages. `stages` is the number of stages, or the rank of
    each stage. Raise ConfigError if the schedule needs another placement."""
    number = isinstance(stages, int)
    home = tuple(s % ranks for s in range(stages)) if isinstance(stages, int) else tuple(stages)
    per_rank, rest = divmod(len(home), ranks)
    known = SCHEDULES.get(choice) if isinstance(choice, str) else None
    free = known is not None and not known.fixed
    if not rest and (known is None or known.fixed or (per_rank > 1) == known.interleaves):
        pipeline_schedule = make_schedule(choice, ranks, microbatches, per_rank)
        if pipeline_schedule.home == home or (number and not free):
            return pipeline_schedule
    if free:
        pipeline_schedule = build_greedy_schedule(str(choice), home, microbatches)
        validate(pipeline_schedule)
        return pipeline_schedule
    name = choice if isinstance(choice, str) else getattr(choice, "__name__", str(choice))
    *some, last = [repr(one) for one, found in SCHEDULES.items() if not found.fixed]
    raise ConfigError(
        f"schedule {name!r} {'places its stages itself' if known is None else known.fixed}; here {len(home)} "
        f"stages are assigned to ranks {', '.join(map(str, home))}: choose {', '.join(some)} or {last}, which take any"
    )


def _call_pipeline_schedule_function(
    function: ScheduleFunction, ranks: int, microbatches: int, per_rank: int | None
) -> PipelineSchedule:
    parameter = inspect.signature(function).parameters.get("per_rank")
    default = parameter.default if parameter and isinstance(parameter.default, int) else 1
    name = getattr(function, "__name__", "schedule")
    try:
        inspect.signature(function).bind(ranks, microbatches, default)
    except TypeError as error:
        raise ConfigError(f"schedule {name!r} must take (ranks, microbatches, per_rank): {error}") from error
    drawn = function(ranks, microbatches, default if per_rank is None else per_rank)
    if not isinstance(drawn, PipelineSchedule | list | tuple):
        wanted = "a PipelineSchedule or a list of actions per rank"
        raise ConfigError(f"schedule {name!r} returned {drawn!r}: {wanted} is needed")
    return _convert_and_validate_schedule(name, drawn, ranks, microbatches, per_rank)


Rows = Iterable[str | Sequence[Action | str]]


def _convert_and_validate_schedule(
    name: str, made: PipelineSchedule | Rows, ranks: int, microbatches: int, per_rank: int | None
) -> PipelineSchedule:
    """Return the schedule as a `PipelineSchedule`. Raise ConfigError if it was made for other numbers of ranks,
    microbatches or stages, and ProgramError if it cannot run."""
    pipeline_schedule = (
        made if isinstance(made, PipelineSchedule) else PipelineSchedule.from_rows(name, made, microbatches)
    )
    who = f"schedule {pipeline_schedule.name!r}"
    if len(pipeline_schedule.ranks) != ranks:
        raise ConfigError(f"{who} is for {len(pipeline_schedule.ranks)} ranks, but the pipe has {ranks}")
    if pipeline_schedule.microbatches != microbatches:
        raise ConfigError(
            f"{who} is for {pipeline_schedule.microbatches} microbatches, but microbatches={microbatches}"
        )
    if per_rank is not None and pipeline_schedule.stages != ranks * per_rank:
        wanted = f"the {ranks * per_rank} of per_rank={per_rank}"
        raise ConfigError(f"{who} has {pipeline_schedule.stages} stages on {ranks} ranks, not {wanted}")
    validate(pipeline_schedule)
    return pipeline_schedule


def count_in_flight(schedule: PipelineSchedule, until: str = "W") -> tuple[int, ...]:
    """Return, for each rank, the largest number of (stage, microbatch) pairs that are in flight at the same time. A
    pair is in flight from its F until the last action that uses its activations.

    Parameters
    ----------
    schedule : any schedule
    until : the action that ends a pair: "W" (default) or "I". If the backward pass is not split into I and W, B ends
        the pair. After I, only the arrays that W needs are kept. Let n_I and n_W be the results for "I" and "W". In the
        notation of Qi et al., the activation memory is then `n_I M_B + (n_W - n_I) M_W`

    Returns
    -------
    tuple of int : one number per rank
    """
    changes = [[(action.op == "F") - (action.op in ("B", until)) for action in row] for row in schedule.ranks]
    return tuple(max(itertools.accumulate(row), default=0) for row in changes)
