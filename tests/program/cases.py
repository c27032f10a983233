"""Small stages and requests that the program tests share."""

from itertools import product

from fsdpx.program import Program, Request, Stage, compile

CHAIN = Stage.of([((u,), (u,), (u + 1,)) for u in range(4)], [True] * 4, [0], [4])
"""Four units in a row, one page each."""

TIED = Stage.of([((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2, 0), (2,), (3,))], [True] * 3, [0], [3])
"""The last unit uses the first one's page as well, like a GPT with tied embeddings."""

SKIP = Stage.of([((0,), (0,), (1,)), ((1,), (1,), (2,)), ((2,), (1, 2), (3,))], [True, True, True], [0], [3])
"""A value that is read by two units."""

FROZEN = Stage.of([((0, 1), (0,), (1,)), ((2,), (1,), (2,))], [True, False, True], [0], [2])
"""The first unit has a page that is not trained."""

STAGES = {"chain": CHAIN, "tied": TIED, "skip": SKIP, "frozen": FROZEN}
PLACEMENTS = {"ddp": (True, False), "zero2": (True, True), "fsdp": (False, True), "kept-grads": (False, False)}


def requests(kind: str, stage: Stage, microbatches: int, placement: str, ahead: int = 1) -> Request:
    keep_full, reduce_each = PLACEMENTS[placement]
    carried = frozenset(stage.trained) if kind == "update" else frozenset()
    return Request(
        kind, stage, microbatches, keep_full=keep_full, reduce_each=reduce_each, ahead=ahead,
        grads=carried, weighed=kind == "update",
    )  # fmt: skip


def golden() -> dict[str, Program]:
    """The programs whose text is kept in tests/golden."""
    names = product(("step",), STAGES, PLACEMENTS, (1, 2))
    steps = {f"{k}-{s}-{p}-{m}": compile(requests(k, STAGES[s], m, p)) for k, s, p, m in names}
    others = ("accumulate", "local", "update", "evaluate", "predict", "forward", "backward")
    return steps | {f"{k}-tied-{p}-1": compile(requests(k, TIED, 1, p)) for k in others for p in ("ddp", "fsdp")}
