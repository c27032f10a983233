"""What the benchmarks promise: ratios between two jobs of one interleaved run, and whether they were reached."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["AGAINST", "GOALS", "Goal", "verdicts"]

AGAINST = {
    "fsdpx ddp 1x1": "torch single 1x1",
    "fsdpx zero1 1x1": "torch single 1x1",
    "fsdpx zero2 1x1": "torch single 1x1",
    "fsdpx fsdp 1x1": "torch single 1x1",
    "fsdpx ddp 1x2": "torch single 1x2",
    "fsdpx zero1 1x2": "torch single 1x2",
    "fsdpx zero2 1x2": "torch single 1x2",
    "fsdpx fsdp 1x2": "torch single 1x2",
    "fsdpx ddp 2x1": "torch ddp 2x1",
    "fsdpx-parts ddp 2x1": "torch single 1x2",
    "fsdpx zero1 2x1": "torch zero1 2x1",
    "fsdpx zero2 2x1": "torch zero1 2x1",  # nearest: PyTorch has no ZeRO-2 of its own
    "fsdpx fsdp 2x1": "torch fsdp 2x1",
    "torch compile 1x1": "torch single 1x1",
    "torch compile 1x2": "torch single 1x2",
    "fsdpx-module ddp 1x1": "torch single 1x1",
    "fsdpx-module ddp 2x1": "torch ddp 2x1",
    "fsdpx-module fsdp 2x1": "torch fsdp 2x1",
    "fsdpx-bf16 ddp 1x1": "torch-bf16 single 1x1",
    "fsdpx-bf16 ddp 2x1": "torch-bf16 ddp 2x1",
    "fsdpx-bf16 fsdp 2x1": "torch-bf16 fsdp 2x1",
    "fsdpx-bf16-sums fsdp 2x1": "torch-bf16-sums fsdp 2x1",
}
"""Whom each job is compared with."""


@dataclass(frozen=True)
class Goal:
    """The figure of job `ours` divided by that of the job it is compared with: at least `least` or at most `most`."""

    model: str
    figure: str
    ours: str
    least: float | None = None
    most: float | None = None


def _rates(ours: str, **least: float) -> list[Goal]:
    return [Goal(model, "rate", ours, least=bound) for model, bound in least.items()]


ALL = ("tiny", "small", "mlp", "many")
FIRST = {"tiny": 0.2, "small": 0.4, "mlp": 1 / 3, "many": 1 / 3}
GOALS = [
    *_rates("fsdpx ddp 1x1", tiny=1.0, small=1.0, mlp=1.0, many=6.0, cnn=1.0),
    *_rates("fsdpx fsdp 2x1", tiny=2.0, small=1.7, mlp=5.0, many=400.0),
    *_rates("fsdpx ddp 2x1", tiny=1.3, small=1.3, mlp=1.3, many=12.0),
    *_rates("fsdpx-parts ddp 2x1", unet3d=1.0, unet2d=1.0, fno2d=1.2),
    *_rates("fsdpx-module fsdp 2x1", small=1.3),
    *_rates("fsdpx-module ddp 2x1", small=1.1),
    Goal("small", "pss", "fsdpx-module fsdp 2x1", most=0.7),
    *_rates("fsdpx-bf16 ddp 1x1", tiny=1.05, small=1.05, mlp=1.05),
    *_rates("fsdpx-bf16 fsdp 2x1", tiny=1.6, small=1.75, mlp=3.3, many=500.0),
    *_rates("fsdpx-bf16-sums fsdp 2x1", tiny=1.6, small=1.75, mlp=3.3, many=500.0),
    *(Goal(model, "pss", "fsdpx-bf16-sums fsdp 2x1", most=0.55) for model in ALL),
    *_rates("fsdpx-bf16 ddp 2x1", tiny=1.25, small=1.25, mlp=1.25, many=12.0),
    *(Goal(model, "pss", "fsdpx-bf16 fsdp 2x1", most=0.55) for model in ALL),
    *(Goal(model, "pss", "fsdpx fsdp 2x1", most=0.6) for model in ALL),
    Goal("small", "pss", "fsdpx ddp 1x1", most=0.8),
    *(Goal(model, "first", job, most=FIRST[model]) for model in ALL for job in ("fsdpx ddp 2x1", "fsdpx fsdp 2x1")),
    *(Goal(m, "first", f"fsdpx-bf16 {s} 2x1", most=FIRST[m]) for m in ("tiny", "small") for s in ("ddp", "fsdp")),
]


def verdicts(rows: Iterable[Mapping[str, Any]], goals: Iterable[Goal] = tuple(GOALS)) -> list[dict[str, Any]]:
    """Goals whose model was run, each with the ratio (None where a job has no figure) and whether it was reached."""
    found = {(row["model"], row["job"]): row for row in rows}
    models = {model for model, _ in found}
    return [_verdict(goal, found) for goal in goals if goal.model in models]


def _verdict(goal: Goal, found: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Any]:
    ours, theirs = (found.get((goal.model, job), {}).get(goal.figure) for job in (goal.ours, AGAINST[goal.ours]))
    ratio = ours / theirs if ours and theirs else None
    if goal.figure == "rate":  # median over turns, where two jobs took turns
        ratio = found.get((goal.model, goal.ours), {}).get("ratio", ratio)
    reached = None
    if ratio is not None:
        reached = ratio >= goal.least if goal.least is not None else ratio <= (goal.most or 0.0)
    return {**asdict(goal), "theirs": AGAINST[goal.ours], "ratio": ratio, "reached": reached}
