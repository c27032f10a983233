"""Pictures, drawn by Matplotlib (the extra `plot`): actions in time, the activations of a step, the curves of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.program import VERBS, Event

__all__ = ["DARKER", "curves", "draw", "missing", "step"]

COLOURS = {
    "F": "#4c78a8", "E": "#4c78a8", "C": "#4c78a8", "R": "#9ecae9", "B": "#54a24b", "I": "#88d27a", "W": "#f58518",
    "LOSS": "#b279a2", "SCORE": "#b279a2", "UPDATE": "#e45756",
    "GATHER": "#72b7b2", "REDUCE": "#d67195", "JOIN": "#ff9da6", "SEND": "#eeca3b",
}  # fmt: skip
WAITING, OTHER = "#dddddd", "#79706e"
DARKER = "darker: later stages of a rank"
LEGEND = {"frameon": False, "borderaxespad": 3.5}  # far enough below the numbers of the axis
LETTER = 0.011  # of the width of the picture that a character takes


def missing() -> str:
    """The reason why nothing can be drawn; "" where Matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "matplotlib is not installed: pip install 'fsdpx[plot]'"
    return ""


def draw(events: Sequence[Event], path: str | Path, title: str = "") -> Path:
    """Write a picture with one row per rank; returns its path, whose suffix says the format.

    Computation fills the row, with the microbatch's number where the box is wide enough; communication runs along the
    bottom, grey where it waits for other ranks. If a rank has several stages, later ones are darker."""
    shown = [event for event in events if event.end > event.start]
    if not shown:
        raise ConfigError("draw: there is no event that takes time")
    if why := missing():
        raise ConfigError(f"draw: {why}")
    names = [f"rank {rank}" for rank in range(max(event.rank for event in shown) + 1)]
    figure = _figure(14, 1.6 + 0.5 * len(names))
    _timeline(figure.add_subplot(), shown, names, _shades(shown)).set(xlabel="time", title=title)
    figure.savefig(path, dpi=120)
    return Path(path)


def step(events: Sequence[Event], names: Sequence[str], alive: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
    """A figure of one step: a row of boxes for each name, and below it the MiB of activations of each rank.

    events: in milliseconds, with the row as their rank. alive: rank -> (milliseconds, MiB)."""
    figure = _figure(14, 4.4 + 0.5 * len(names))
    rows, memory = figure.subplots(2, height_ratios=(1.0 + 0.5 * len(names), 2.4))
    shown = [event for event in events if event.end > event.start]
    _timeline(rows, shown, names, {}).set(title="one step: measured, and simulated with messages that take no time")
    for name, points in alive.items():
        memory.plot(*zip(*points, strict=True), drawstyle="steps-post", label=name, linewidth=1)
    _labelled(memory, "ms", "MiB of activations")
    memory.set(xlim=rows.get_xlim())
    return figure


def curves(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A figure of a run: its losses and its throughput by step. rows: those of metrics.jsonl."""
    figure = _figure(11, 3.6)
    losses, rates = figure.subplots(1, 2)
    for axes, name, style in ((losses, "loss", "-"), (losses, "validation_loss", "o-"), (rates, "rate", "-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        points = points[1:] if name == "rate" else points  # the first one has the time of the start in it
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "), linewidth=1, markersize=4)
    _labelled(losses, "step", "loss")
    _labelled(rates, "step", "per second")
    return figure


def _figure(width: float, height: float) -> Any:
    """A figure of its own, known to no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _labelled(axes: Any, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _timeline(
    axes: Any, shown: Sequence[Event], names: Sequence[str], shades: Mapping[tuple[int, int | None], float]
) -> Any:
    """Draw the boxes of all events, in rows from the top, and what their colours mean below; returns the axes.

    shades: (row, unit) -> brightness, 1 where there is none."""
    from matplotlib.patches import Patch

    zero, last = min(event.start for event in shown), max(event.end for event in shown)
    spans = defaultdict[tuple[int, bool, str], list[tuple[float, float]]](list)
    for event in shown:
        op, start, length = event.action.op, event.start - zero, event.end - event.start
        colour = _darker(_colour(op), shades.get((event.rank, event.action.unit), 1.0))
        spans[event.rank, _computes(op), colour].append((start, length))
        text = "" if event.action.mb is None else str(event.action.mb)
        if _computes(op) and text and length / (last - zero) > LETTER * len(text):
            middle = (start + length / 2, event.rank - 0.1)
            axes.text(*middle, text, ha="center", va="center", color="white", fontsize=8)
    for (row, computes, colour), some in spans.items():
        top, height = (-0.42, 0.64) if computes else (0.25, 0.17)
        axes.broken_barh(some, (row + top, height), facecolors=colour, edgecolors="white", linewidth=0.4)
    axes.set(xlim=(0, last - zero), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    verbs = [op for op in VERBS if any(event.action.op == op for event in shown)]
    boxes = [Patch(facecolor=_colour(op), label=op) for op in verbs]
    if min(shades.values(), default=1.0) < 1.0:
        boxes.append(Patch(facecolor=_darker("#aaaaaa", min(shades.values())), label=DARKER))
    axes.legend(handles=boxes, ncols=min(len(boxes), 10), loc="upper center", bbox_to_anchor=(0.5, 0), **LEGEND)
    return axes


def _computes(op: str) -> bool:
    return VERBS[op].lane == "compute"


def _colour(op: str) -> str:
    return COLOURS.get(op, WAITING if VERBS[op].moves else OTHER)


def _shades(events: Sequence[Event]) -> dict[tuple[int, int | None], float]:
    """(row, unit) -> brightness from 0 to 1, less for later stages of a rank."""
    computed = [e for e in events if _computes(e.action.op) and e.action.unit is not None]
    rows = {event.rank for event in computed}
    stages_of = {row: sorted({e.action.unit or 0 for e in computed if e.rank == row}) for row in rows}
    return {
        (row, stage): 1 - 0.45 * n / max(len(stages) - 1, 1)
        for row, stages in stages_of.items()
        for n, stage in enumerate(stages)
    }


def _darker(colour: str, shade: float) -> str:
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(channel * shade):02x}" for channel in channels)
