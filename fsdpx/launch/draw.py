"""draw: a picture of when each rank did what, from a schedule, from simulated programs or from a measured step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.observe.svg import colour_of
from fsdpx.program.timeline import Event
from fsdpx.program.verbs import VERBS

__all__ = ["draw"]

DARKER = "darker: later stages of a rank"
LETTER = 0.011  # of the width of the picture that a character takes


def draw(events: Sequence[Event], path: str | Path, title: str = "") -> Path:
    """Write a picture with one row per rank; returns its path, whose suffix says the format.

    Computation fills the row, with the microbatch's number where the box is wide enough; communication runs along the
    bottom, grey where it waits for other ranks. If a rank has several stages, later ones are darker."""
    shown = [event for event in events if event.end > event.start]
    if not shown:
        raise ConfigError("draw: there is no event that takes time")
    figure, axes, patches = _canvas(ranks=max(event.rank for event in shown) + 1)
    zero, last = min(event.start for event in shown), max(event.end for event in shown)
    shades = _shades(shown)
    for event in shown:
        _box(axes, event, zero, last - zero, shades.get((event.rank, event.action.unit), 1.0))
    axes.set(xlim=(0, last - zero), xlabel="time", title=title)
    verbs = [op for op in VERBS if any(event.action.op == op for event in shown)]
    boxes = [patches.Patch(facecolor=colour_of(op), label=op) for op in verbs]
    if min(shades.values(), default=1.0) < 1.0:
        boxes.append(patches.Patch(facecolor=_darker("#aaaaaa", min(shades.values())), label=DARKER))
    axes.legend(handles=boxes, ncols=len(boxes), loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    figure.savefig(path, dpi=120)
    return Path(path)


def _canvas(ranks: int) -> tuple[Any, Any, Any]:
    """A figure of its own, known to no global state, with an empty row per rank."""
    try:
        from matplotlib import patches
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("draw needs matplotlib: pip install 'fsdpx[plot]'") from error
    figure = Figure(figsize=(14, 1.6 + 0.5 * ranks), layout="constrained")
    axes = figure.add_subplot()
    axes.set(ylim=(ranks - 0.5, -0.5), yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure, axes, patches


def _box(axes: Any, event: Event, zero: float, span: float, shade: float) -> None:
    computes = VERBS[event.action.op].lane == "compute"
    top, height = (-0.42, 0.64) if computes else (0.25, 0.17)
    start, length = event.start - zero, event.end - event.start
    colour = _darker(colour_of(event.action.op), shade)
    axes.broken_barh(
        [(start, length)], (event.rank + top, height), facecolors=colour, edgecolors="white", linewidth=0.4
    )
    text = "" if event.action.mb is None else str(event.action.mb)
    if computes and text and length / span > LETTER * len(text):
        middle = (start + length / 2, event.rank + top + height / 2)
        axes.text(*middle, text, ha="center", va="center", color="white", fontsize=8)


def _shades(events: Sequence[Event]) -> dict[tuple[int, int | None], float]:
    """(rank, stage) -> brightness from 0 to 1, less for later stages of a rank."""
    computed = [e for e in events if VERBS[e.action.op].lane == "compute" and e.action.unit is not None]
    stages_of = {
        rank: sorted({e.action.unit or 0 for e in computed if e.rank == rank}) for rank in {e.rank for e in computed}
    }
    return {
        (rank, stage): 1 - 0.45 * n / max(len(stages) - 1, 1)
        for rank, stages in stages_of.items()
        for n, stage in enumerate(stages)
    }


def _darker(colour: str, shade: float) -> str:
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(channel * shade):02x}" for channel in channels)
