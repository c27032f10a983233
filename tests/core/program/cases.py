"""Small stages and requests that the program tests share."""

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import pytest
from present import is_present

from fsdpx.core.program import Program, ProgramRequest, Slot, Stage, compile, make_schedule, make_stages
from fsdpx.errors import ProgramError

CHAIN = Stage.single_stage_from_units([((u,), (u,), (u + 1,)) for u in range(4)], [True] * 4, [0], [4])
"""Four units in a row, one page each."""

TIED = Stage.single_stage_from_units(
    [((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2, 0), (2,), (3,))], [True] * 3, [0], [3]
)
"""The last unit uses the first one's page as well, like a GPT with tied embeddings."""

SKIP = Stage.single_stage_from_units(
    [((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2,), (1, 2), (3,))], [True, True, True], [0], [3]
)
"""A value that is read by two units."""

FROZEN = Stage.single_stage_from_units([((0, 1), (0,), (1,)), ((2,), (1,), (2,))], [True, False, True], [0], [2])
"""The first unit has a page that is not trained."""

TRUNK = Stage.single_stage_from_units([((u,), (u,), (u + 1,)) for u in range(4)], [False, False, True, False], [0], [4])
"""Four units in a row, of which the third one is trained."""

RECORDS = (*(Slot("slots", p) for p in range(3)), *(Slot("shard", p) for p in range(3)))
"""Optimizer state and parameters of three pages, on disk between uses."""

STAGES = {"chain": CHAIN, "tied": TIED, "skip": SKIP, "frozen": FROZEN, "trunk": TRUNK}
PLACEMENTS = {"ddp": (True, False), "zero2": (True, True), "fsdp": (False, True), "kept-grads": (False, False)}


def requests(
    kind: str, stage: Stage, microbatches: int, placement: str, ahead: int = 1, scales: tuple[str, ...] = ("SCALE",)
) -> ProgramRequest:
    """placement: one of PLACEMENTS, or "hybrid" for several replicas of shards."""
    keep_full, reduce_each = PLACEMENTS["fsdp" if placement == "hybrid" else placement]
    stage = replace(stage, needs_join=placement in ("ddp", "hybrid"))
    carried = frozenset(stage.trained_pages) if kind == "update" else frozenset()
    return ProgramRequest(
        kind, stage, microbatches, keep_full=keep_full, reduce_each=reduce_each, ahead=ahead,
        grads=carried, has_loss_weight=kind == "update", scales=scales,
    )  # fmt: skip


TWINS = [((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2,), (2,), (3,)), ((3, 4), (3, 1), (4,))]
"""Four units in a row; the last one reads what the first one gave as well, and has a copy of its page."""


def twins(home: Iterable[int], frozen: Iterable[int] = ()) -> tuple[Stage, ...]:
    """One stage per unit of TWINS; unit 1 has running statistics, the codec of page 2 keeps memory."""
    trained = [page not in frozen for page in range(5)]
    known = TWINS, trained, [0], [4], (0, 1, 2, 3), tuple(home), ((0, 4),)
    return make_stages(*known, units_with_statistics=[1], pages_with_codec_memory=[2])


def pipe(
    name: str,
    microbatches: int = 4,
    placement: str = "fsdp",
    recompute: bool = False,
    commit: bool = False,
    scales: tuple[str, ...] = ("SCALE",),
    frozen: tuple[int, ...] = (),
) -> list[Program]:
    """The programs of all ranks of a pipe with four stages."""
    per_rank = {"interleaved": 2, "zbv": 2}.get(name, 1)
    made = make_schedule(name, 4 // per_rank, microbatches, per_rank)
    again = frozenset(range(4)) if recompute else frozenset()
    scales = (*scales, *(["COMMIT"] if commit else []))
    asked = [requests("step", stage, microbatches, placement, scales=scales) for stage in twins(made.home, frozen)]
    return [
        compile(replace(one, order=made.ranks[one.stage.rank], recompute=again & set(one.stage.own_units)))
        for one in asked
    ]


def pipes() -> dict[str, list[Program]]:
    """The pipes whose programs are kept in tests/golden, one per rank."""
    return {
        "1f1b-fsdp": pipe("1f1b", 2),
        "zb-h1-zero2-recompute": pipe("zb-h1", 2, "zero2", recompute=True),
        "interleaved-kept-grads-commit": pipe("interleaved", 2, "kept-grads", commit=True),
        "zbv-ddp": pipe("zbv", 2, "ddp", scales=("NORM",)),
        "trunk-zb-h1-fsdp": pipe("zb-h1", 2, recompute=True, frozen=(0, 1, 3, 4)),
    }


def golden() -> dict[str, Program]:
    """The programs of one rank whose text is kept in tests/golden."""
    names = product(("step",), STAGES, PLACEMENTS, (1, 2))
    steps = {f"{k}-{s}-{p}-{m}": compile(requests(k, STAGES[s], m, p)) for k, s, p, m in names}
    others = ("accumulate", "local", "update", "evaluate", "predict", "forward", "backward")
    normed = {f"{k}-tied-normed-1": compile(requests(k, TIED, 1, "fsdp", scales=("NORM",))) for k in ("step", "update")}
    rest = {f"{k}-tied-{p}-1": compile(requests(k, TIED, 1, p)) for k in others for p in ("ddp", "fsdp")}
    return steps | normed | rest | offloaded() | own_speed()


def offloaded() -> dict[str, Program]:
    """With state or activations on disk; none where that extension is not there."""
    if not is_present("offload"):
        return {}
    from fsdpx.ext.offload.choice import OffloadConfig as OffloadConfig  # its verbs and its pass
    from fsdpx.ext.offload.records import pair_with_stored_slots

    disk = replace(TIED, stored_slots=pair_with_stored_slots(RECORDS))
    kinds = ("step", "update", "evaluate", "backward")
    state = {f"{k}-tied-fsdp-offload-1": compile(requests(k, disk, 1, "fsdp")) for k in kinds}
    spilled = replace(CHAIN, stored_slots=pair_with_stored_slots(tuple(Slot("saved", unit) for unit in range(4))))
    return state | {"step-chain-fsdp-spilled-2": compile(requests("step", spilled, 2, "fsdp"))}


def own_speed() -> dict[str, Program]:
    """Ranks that push and mix, and replicas that train by themselves: fragments in turn, under way for no or two steps;
    and a step between. None where that extension is not there."""
    if not is_present("asynchronous"):
        return {}
    from fsdpx.ext.asynchronous.local import OuterStep, RoundSchedule

    apart = (frozenset({0, 2}), frozenset({1}))
    found = {"at-once": RoundSchedule(4, (frozenset(range(3)),)).get_replica_communication(4), "between": OuterStep()}
    found |= {f"apart-{step}": RoundSchedule(4, apart, delay=2).get_replica_communication(step) for step in (6, 7, 8)}
    step = requests("step", TIED, 1, "fsdp")
    pairs = ("push", "frozen"), ("mix", "tied")
    pushed = {f"{k}-{s}-2": compile(requests(k, STAGES[s], 2, "fsdp")) for k, s in pairs}
    return pushed | {
        f"step-tied-rounds-{n}": compile(replace(step, sync=outer.communication_rules)) for n, outer in found.items()
    }


def everything() -> dict[str, Program]:
    """All programs whose text is kept in tests/golden."""
    ranks = {f"pipe-{name}-rank{r}": program for name, found in pipes().items() for r, program in enumerate(found)}
    return golden() | ranks


def kept(program: Program) -> str:
    """The text of a golden file: longer lines than a page has, so that a change shows in fewer of them."""
    return textwrap.fill(" ".join(map(str, program.actions)), 110, break_long_words=False) + "\n"


def demand_refusals(name: str, program: Program, require: Callable[[Program], None]) -> None:
    """`require` raises if any one action of the program is dropped or repeated."""
    actions = program.actions
    for i, action in enumerate(actions):
        for what, made in (("without", actions[:i] + actions[i + 1 :]), ("twice", actions[: i + 1] + actions[i:])):
            try:
                require(replace(program, actions=made))
            except ProgramError:
                continue
            pytest.fail(f"{name} {what} {i} {action} was accepted")
