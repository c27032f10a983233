"""Plots with Matplotlib (the extra `plot`): timelines of steps with the memory of each rank, and training curves."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.program import VERBS, ActionEvent
from fsdpx.core.program.verbs import get_partner_verb
from fsdpx.errors import ConfigError, install_hint

__all__ = [
    "MEMORY",
    "THEMES",
    "StepLanes",
    "draw_scaling",
    "draw_steps",
    "draw_training_curves",
    "format_missing_matplotlib_message",
    "get_color",
    "make_step_figure",
    "save_figure",
]

COLORS = {  # name -> (color in the light theme, color in the dark theme)
    "forward": ("#4a86c9", "#5b9be0"), "recompute": ("#a3c4e6", "#3f6a98"), "backward": ("#2f9a78", "#37ab86"),
    "gradients of weights": ("#8fc9a0", "#6f9c7d"), "update": ("#8c6bb8", "#a183cf"), "gather": ("#e3a32f", "#e0a83f"),
    "reduce": ("#d2605a", "#dd6d66"), "message": ("#6c7a89", "#93a1b0"), "disk": ("#a1785a", "#b98d6d"),
    "other": ("#a0a6ad", "#767d85"), "waiting": ("#e3e6ea", "#2c3036"),
    "ink": ("#24292f", "#d7dce1"), "faint": ("#6a737d", "#8b949e"), "page": ("#ffffff", "#131416"),
}  # fmt: skip
COLOR_OF_VERB = {
    **dict.fromkeys(("F", "E", "C", "LOSS", "SCORE"), "forward"), "R": "recompute", "B": "backward", "I": "backward",
    "W": "gradients of weights", "UPDATE": "update", "GATHER": "gather", "REDUCE": "reduce", "JOIN": "reduce",
    "SEND": "message", "FETCH": "disk", "STORE": "disk",
}  # fmt: skip
"""Verb -> color name."""
MEMORY = {"optimizer": "update", "parameters": "gather", "gradients": "reduce", "activations": "forward"}
"""Kind of memory -> color name. Kinds are stacked from the bottom in this order, with other kinds on top."""
THEMES = ("light", "dark")
WIDTH, LEFT, RIGHT = 9.25, 0.85, 0.85
LANE, STRIP, BAND, GAP, TITLE, LEGEND, FOOT = 0.25, 0.13, 0.72, 0.12, 0.36, 0.3, 0.28
"""Heights in inches: lane with computations, strip with transfers, band with memory, gap below a row, title, legend,
axis."""
DARKER, LATER = "darker: later stages of a rank", 0.55
LETTER_INCHES = 0.08
"""Assumed width of a letter, in inches."""
MIN_GAP_SHARE = 0.004
"""A gap shorter than this share of the displayed time gets no arrow, and is not shown as waiting."""


@dataclass(frozen=True)
class StepLanes:
    """One panel of `make_step_figure`: the timeline of a step, with one row per rank.

    Parameters
    ----------
    title : title above the panel
    events : events of the step; the attribute `rank` of an event is the index of its row
    names : name of each row
    held : for each row, kind of memory -> pairs (time, bytes from that time on). No memory is drawn for a row with an
        empty dict; with the default (), no memory is drawn at all
    numbered : which number the boxes show: "mb" (default) for the microbatch, or "unit" for the unit (group of layers)
    second : number of time units in a second; if 0 (default), the times have no unit
    limit : bytes of available memory; None (default) if unknown
    """

    title: str
    events: Sequence[ActionEvent]
    names: Sequence[str]
    held: Sequence[Mapping[str, Sequence[tuple[float, float]]]] = ()
    numbered: str = "mb"
    second: float = 0.0
    limit: float | None = None

    @property
    def end_time(self) -> float:
        """Time at which the last event ends."""
        return max(event.end for event in self.events)

    @property
    def peak_bytes(self) -> float:
        """Peak memory over all rows, in bytes."""
        return max((max(_compute_stacked_memory_areas(held)[1][-1][1]) for held in self.held if held), default=0.0)

    @property
    def memory_axis_top_bytes(self) -> float:
        """Number of bytes at the top of the memory scale: the larger of the peak and the limit, or just the peak if the
        limit is far above it."""
        return (
            max(self.peak_bytes, self.limit or 0.0)
            if (self.limit or 0.0) <= FAR_LIMIT_FACTOR * self.peak_bytes
            else self.peak_bytes
        )

    @property
    def has_equal_rows(self) -> bool:
        """True if all rows have the same memory curve; it is then drawn only once."""
        return all(held == self.held[0] for held in self.held)

    def list_transfer_lanes(self, row: int) -> list[str]:
        """Return the names of the lanes, such as mesh axes, on which a row has transfers. Each lane is drawn as a
        strip."""
        return sorted(
            {VERBS[event.action.op].lane for event in self.events if event.rank == row and _is_transfer(event)}
        )

    def compute_row_height(self, row: int) -> float:
        """Return the height of a row in inches."""
        held = bool(self.held and self.held[row]) and (not self.has_equal_rows or row == len(self.names) - 1)
        return LANE + STRIP * len(self.list_transfer_lanes(row)) + (BAND + 0.05) * held + GAP


def _is_transfer(event: ActionEvent) -> bool:
    """Return whether an event is drawn as a transfer. Barriers and receives are not drawn as transfers, because they
    only wait for other ranks."""
    verb = VERBS[event.action.op]
    return bool(verb.moves) and not verb.is_synchronizing and not verb.is_receive and event.end > event.start


def _is_compute(event: ActionEvent) -> bool:
    return VERBS[event.action.op].lane == "compute" and event.end > event.start


def format_missing_matplotlib_message() -> str:
    """Return a message that explains why plots cannot be drawn and how to install Matplotlib, or "" if it is installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"matplotlib is not installed: {install_hint('plot')}"
    return ""


def require_writable_picture(option: str, path: str | Path) -> None:
    """Raise ConfigError if no figure can be written to `path`, so that a long job fails at its start rather than at its
    end.

    Checks that Matplotlib is installed, that the file format is supported, and that the folder exists and is writable.
    `option` is the name of the command-line option, for the message."""
    path = expanduser(path)
    if why := format_missing_matplotlib_message():
        raise ConfigError(f"{option} {path}: {why}")
    from matplotlib.backend_bases import FigureCanvasBase

    suffix, known = Path(path).suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if suffix and suffix not in known:
        raise ConfigError(f"{option} {path}: {suffix} is no format of pictures; use {', '.join(sorted(known))}")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {Path(path).parent}; make it first")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: no file can be written there")


def draw_steps(events: Sequence[ActionEvent], path: str | Path, title: str = "") -> Path:
    """Save a figure with the timeline of one or more steps, with one row per rank.

    Each box in a row is a computation, labeled with its microbatch number if the box is wide enough. Transfers are
    drawn below the boxes. Where a rank waited, an arrow leads from the transfer that ended the wait to the end of the
    wait. If a rank has several stages, later ones are darker.

    Parameters
    ----------
    events : events of all ranks, as in `MeasuredStep.events`, with times in any unit
    path : path of the figure; its suffix determines the file format
    title : title above the figure; "" (default): no title

    Returns
    -------
    pathlib.Path
        `path`, with "~" expanded

    Raises
    ------
    ConfigError : Matplotlib is not installed, or all events have zero duration
    """
    shown = [event for event in events if event.end > event.start]
    if not shown:
        raise ConfigError("draw: there is no event that takes time")
    names = [f"rank {rank}" for rank in range(max(event.rank for event in shown) + 1)]
    return Path(save_figure(make_step_figure([StepLanes(title, shown, names)]), expanduser(path)))


def save_figure(drawn: Any, path: Any) -> Any:
    """Save a Matplotlib figure to a path or file object, and return that path or file object."""
    drawn.savefig(path, dpi=160, facecolor=drawn.get_facecolor())
    return path


def make_step_figure(panels: Sequence[StepLanes], theme: str = "light") -> Any:
    """Return a Matplotlib figure with one panel per step, stacked vertically, all with the same time axis and memory
    scale.

    Each row shows computations, the transfers below them, and memory by kind. Where a rank waited, an arrow leads from
    the transfer that ended the wait to the end of the wait. Raises ConfigError without Matplotlib."""
    if why := format_missing_matplotlib_message():
        raise ConfigError(f"draw: {why}")
    heights = [TITLE + sum(map(panel.compute_row_height, range(len(panel.names)))) for panel in panels]
    legend = LEGEND * (
        1 + (len(_list_used_color_names(panels)) > 7) + any(held for panel in panels for held in panel.held)
    )
    found = _make_blank_figure(WIDTH, whole := legend + sum(heights) + FOOT)
    found.set_facecolor(get_color("page", theme))
    last, most = max(panel.end_time for panel in panels), max(panel.memory_axis_top_bytes for panel in panels)
    at = whole - legend
    for panel, height in zip(panels, heights, strict=True):
        at -= height
        place = (LEFT / WIDTH, at / whole, 1 - (LEFT + RIGHT) / WIDTH, (height - TITLE) / whole)
        axes = found.add_axes(place, xlim=(0, last), ylim=(TITLE - height, 0))
        _PanelDrawing(axes, panel, last, most, theme).draw_rows()
    _draw_time_axis(found.axes, panels[0].second, last, theme)
    _draw_legend(found, panels, theme)
    return found


def _make_blank_figure(width: float, height: float, **options: Any) -> Any:
    """Return an empty figure that is not registered in pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **options)


def get_color(name: str, theme: str) -> str:
    """Return the color for a key of `COLORS` in one of the `THEMES`."""
    return COLORS[name][THEMES.index(theme)]


def _get_color_name(event: ActionEvent) -> str:
    return COLOR_OF_VERB.get(event.action.op, "other")


def _list_used_color_names(panels: Sequence[StepLanes]) -> list[str]:
    """Return the names of the colors used by the boxes of these panels, in the order of `COLORS`, for the legend."""
    found = {
        _get_color_name(event)
        for panel in panels
        for event in panel.events
        if _is_transfer(event) or _is_compute(event)
    }
    found |= {"waiting"} if any(gap for panel in panels for gap in _iterate_idle_gaps(panel)) else set()
    return [name for name in COLORS if name in found]


def _draw_legend(figure: Any, panels: Sequence[StepLanes], theme: str) -> None:
    from matplotlib.patches import Patch

    boxes = [Patch(facecolor=get_color(name, theme), label=name) for name in _list_used_color_names(panels)]
    if any(shade < 1 for panel in panels for shade in _assign_stage_shades(panel).values()):
        boxes.append(Patch(facecolor=_darken_color(get_color("other", theme), LATER), label=DARKER))
    look = {"frameon": False, "fontsize": 9.5, "handlelength": 1.0, "handleheight": 0.9, "columnspacing": 1.5}
    place, ink = {"loc": "upper left", "ncols": 7, "borderaxespad": 0.4, "handletextpad": 0.5}, get_color("ink", theme)
    figure.legend(handles=boxes, bbox_to_anchor=(0.0, 1.0), labelcolor=ink, **look, **place)
    kinds = {kind for panel in panels for held in panel.held for kind in held}
    if areas := [Patch(facecolor=get_color(MEMORY[k], theme), alpha=0.5, label=k) for k in MEMORY if k in kinds]:
        top, height = LEGEND * (1 + (len(boxes) > 7)), figure.get_figheight()
        figure.legend(handles=areas, bbox_to_anchor=(LEFT / WIDTH, 1 - top / height), labelcolor=ink, **look, **place)
        figure.text(0.06 / WIDTH, 1 - (top + 0.16) / height, "memory", fontsize=9.5, va="center", color=ink)


def _iterate_idle_gaps(panel: StepLanes) -> Iterator[tuple[int, float, float]]:
    """Yield (row, start, end) for each gap between two consecutive computations of a row."""
    for row in range(len(panel.names)):
        own = sorted((e.start, e.end) for e in panel.events if e.rank == row and _is_compute(e))
        free = 0.0
        for start, end in own:
            if start - free > MIN_GAP_SHARE * panel.end_time:
                yield row, free, start
            free = max(free, end)


def _compute_stacked_memory_areas(
    held: Mapping[str, Sequence[tuple[float, float]]],
) -> tuple[list[float], list[tuple[str, list[float]]]]:
    """Return the data of a stacked area chart of memory: the times at which memory changes, and (kind, stacked bytes)
    from bottom to top.

    The stacked bytes of a kind have one value for each time, and include all kinds below it."""
    times = sorted({time for points in held.values() for time, _ in points})
    below, found = [0.0] * len(times), list[tuple[str, list[float]]]()
    for kind in sorted(held, key=lambda kind: [*MEMORY, kind].index(kind)):
        starts = [time for time, _ in held[kind]]
        now = [held[kind][at - 1][1] if (at := bisect_right(starts, time)) else 0.0 for time in times]
        below = [low + nbytes for low, nbytes in zip(below, now, strict=True)]
        found.append((kind, below))
    return times, found


FAR_LIMIT_FACTOR = 3
"""If the memory limit is more than this many times the peak, the limit is not drawn to scale."""
LIMIT_COLOR = "limit"
"""Id of the line that shows the memory limit in a figure, and of its label."""


@dataclass
class _PanelDrawing:
    """Draws the panel of one step. `last` is the end of the time axis, and `most` is the number of bytes at the top of
    the memory scale."""

    axes: Any
    panel: StepLanes
    last: float
    most: float
    theme: str

    def draw_rows(self) -> None:
        """Draw all rows, from top to bottom."""
        axes, panel = self.axes, self.panel
        axes.set_facecolor("none")
        self.shade = _assign_stage_shades(panel)
        tops = [-sum(map(panel.compute_row_height, range(row))) for row in range(len(panel.names))]
        name, _, about = panel.title.partition(": ")
        head = self.draw_text(0, 0.1, name, fontsize=11, weight="bold", va="baseline", x=0.06 - LEFT)
        look = {"textcoords": "offset points", "fontsize": 9.5, "va": "baseline", "color": get_color("ink", self.theme)}
        axes.annotate(about, (1, 0), (8, 2.6), xycoords=head, annotation_clip=False, **look)
        for row, top in enumerate(tops):
            size = 8.5 if "\n" in panel.names[row] else 9.5
            self.draw_text(0, top - 0.04, panel.names[row], fontsize=size, va="top", x=0.06 - LEFT)
            self.draw_row(row, top)
        self.crossed: list[float] = []
        for row, _, end in _iterate_idle_gaps(panel):
            self.draw_wait_arrow(row, end, tops)
        for row, held in list(enumerate(panel.held))[-1 if panel.has_equal_rows else 0 :]:
            if held:
                self.draw_memory(held, tops[row] - panel.compute_row_height(row) + GAP)
        self.draw_text(
            panel.end_time, tops[0] - LANE / 2, _format_seconds(panel.end_time, panel.second), x=0.06, fontsize=9.5
        )

    def draw_text(self, time: float, y: float, words: str, x: float = 0.0, **options: Any) -> Any:
        """Draw the text `words`, `x` inches to the right of the position of `time`."""
        look: dict[str, Any] = {"color": get_color("ink", self.theme), "va": "center", "clip_on": False}
        return self.axes.text(time + x / self.inches_per_unit, y, words, **(look | options))

    @property
    def inches_per_unit(self) -> float:
        """Length of one unit of time in the figure, in inches."""
        return (WIDTH - LEFT - RIGHT) / self.last

    def draw_row(self, row: int, top: float) -> None:
        """Draw the computations of a row, and its transfers below them."""
        panel, strips = self.panel, self.panel.list_transfer_lanes(row)
        for _, start, end in (gap for gap in _iterate_idle_gaps(panel) if gap[0] == row):
            self.axes.broken_barh(
                [(start, end - start)], (top - LANE, LANE), facecolors=get_color("waiting", self.theme)
            )
        own = [event for event in panel.events if event.rank == row]
        computed = [event for event in own if _is_compute(event)]
        for event in _merge_adjacent_events(computed) if panel.numbered == "mb" and not self.shade else computed:
            self.draw_box(event, top, LANE, 8.5)
        for event in filter(_is_transfer, own):
            self.draw_box(
                event, top - LANE - STRIP * strips.index(VERBS[event.action.op].lane) - 0.015, STRIP - 0.015, 6.5
            )

    def draw_box(self, event: ActionEvent, top: float, height: float, size: float) -> None:
        """Draw the box of a computation, with its microbatch or unit number if the box is wide enough."""
        look = {"edgecolors": get_color("page", self.theme), "linewidth": 0.5}
        fill = _darken_color(
            get_color(_get_color_name(event), self.theme), self.shade.get((event.rank, event.action.unit), 1.0)
        )
        span = event.start, event.end - event.start
        self.axes.broken_barh([span], (top - height, height), facecolors=fill, **look)
        unit = self.panel.numbered == "unit" or (VERBS[event.action.op].about == "page" and _is_transfer(event))
        number = event.action.unit if unit else event.action.mb
        if number is not None and span[1] * self.inches_per_unit > LETTER_INCHES * len(str(number)) + 0.03:
            middle = event.start + span[1] / 2
            self.draw_text(middle, top - height / 2 - 0.005, str(number), ha="center", color="white", fontsize=size)

    def draw_wait_arrow(self, row: int, end: float, tops: Sequence[float]) -> None:
        """Draw an arrow that shows which transfer ended a wait. The arrow leads from this transfer to `end`, the time
        at which the wait ended.

        The transfer is in this row, or it is another rank's send of the message that this row's rank received."""
        near = MIN_GAP_SHARE * self.panel.end_time / 4
        for event in self.panel.events:
            if event.rank != row or abs(event.end - end) > near:
                continue
            came = event
            if VERBS[event.action.op].is_receive:
                sent = replace(event.action, op=get_partner_verb(event.action.op))
                came = next((e for e in self.panel.events if (e.action, e.key) == (sent, event.key)), event)
            if not _is_transfer(came):
                continue
            other, down = came.rank != row, came.rank < row
            strip = self.panel.list_transfer_lanes(came.rank).index(VERBS[came.action.op].lane)
            start = came.start if other else end, tops[came.rank] - LANE - STRIP * (strip + (down if other else 0.5))
            look = {"arrowstyle": "-|>", "color": get_color("ink", self.theme), "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
            place, look["mutation_scale"] = (end, tops[row] - LANE * (not down)), 7
            self.axes.annotate("", place, start, arrowprops=look, annotation_clip=False)
            self.crossed += [start[0], end] * other
            return

    def draw_memory(self, held: Mapping[str, Sequence[tuple[float, float]]], bottom: float) -> None:
        """Draw the memory of a row by kind, label the peak, and label the kinds where there is room."""
        scale = BAND / self.most
        times, stack = _compute_stacked_memory_areas(held)
        times, below = [*times, self.panel.end_time], [0.0] * len(times)
        for kind, tops in stack:
            low, high = ([bottom + nbytes * scale for nbytes in (*row, row[-1])] for row in (below, tops))
            fill = get_color(MEMORY.get(kind, "other"), self.theme)
            self.axes.fill_between(times, low, high, step="post", color=fill, alpha=0.5, linewidth=0)
            if place := self.find_free_label_position(times, low, high, len(kind)):
                self.draw_text(place[0], place[1], kind, x=0.05, fontsize=8)
            below = tops
        peak = max(range(len(below)), key=lambda n: below[n])
        y, line = bottom + below[peak] * scale, {"color": get_color("faint", self.theme), "linewidth": 0.7}
        self.axes.plot([times[peak], self.last], [y, y], linestyle=(0, (2, 2)), **line)
        self.axes.plot([0, self.panel.end_time], [bottom, bottom], **line)
        self.draw_text(self.last, y, _format_bytes(below[peak]), x=0.06, fontsize=9.5)
        self.draw_memory_limit(bottom, scale, y)
        self.draw_text(0, bottom + 0.09, "memory", x=0.06 - LEFT, fontsize=9.5)

    def draw_memory_limit(self, bottom: float, scale: float, peak: float) -> None:
        """Draw a line that marks the available memory. If the line would lie beyond the end of the scale, write the
        available memory as text below the label of the peak, which is at height `peak`."""
        limit = self.panel.limit
        if limit is None:
            return
        if limit * scale <= BAND:
            y, line = bottom + limit * scale, {"color": get_color("ink", self.theme), "linewidth": 1.0}
            self.axes.plot([0, self.last], [y, y], gid=LIMIT_COLOR, **line)
            words = f"limit {_format_bytes(limit)}"
            self.draw_text(self.last, y + 0.02, words, ha="right", va="bottom", fontsize=8, gid=LIMIT_COLOR)
        else:
            self.draw_text(self.last, peak - 0.16, f"of {_format_bytes(limit)}", x=0.06, fontsize=8, gid=LIMIT_COLOR)

    def find_free_label_position(
        self, times: list[float], low: list[float], high: list[float], letters: int
    ) -> tuple[float, float] | None:
        """Return the first (time, height) at which a word of `letters` letters fits between two curves without
        crossing an arrow. Return None if it fits nowhere."""
        for n, time in enumerate(times):
            end = time + (letters * 0.062 + 0.1) / self.inches_per_unit
            until = bisect_right(times, end)
            floor, roof = max(low[n:until]), min(high[n:until])
            if roof - floor > 0.12 and until < len(times) and not any(time < at < end for at in self.crossed):
                return time, (floor + roof) / 2 - 0.005
        return None


def _merge_adjacent_events(events: Sequence[ActionEvent]) -> list[ActionEvent]:
    """Return the events, with adjacent events of the same verb and microbatch merged into one."""
    found = list[ActionEvent]()
    for event in sorted(events, key=lambda event: event.start):
        last = found[-1] if found else event
        alike = (last.action.op, last.action.mb) == (event.action.op, event.action.mb)
        if alike and found and event.start - last.end <= 1e-9 * event.end:
            found[-1] = replace(last, end=event.end)
        else:
            found.append(event)
    return found


def _assign_stage_shades(panel: StepLanes) -> dict[tuple[int, int | None], float]:
    """Return a dict from (row, unit) to a brightness from 0 to 1. Later pipeline stages of a rank are darker.

    Returns {} if the schedule is not a pipeline."""
    computed = [e for e in panel.events if _is_compute(e) and e.action.unit is not None]
    if panel.numbered == "unit" or any(_is_transfer(event) for event in panel.events):
        return {}
    rows = {event.rank for event in computed}
    stages_of = {row: sorted({e.action.unit or 0 for e in computed if e.rank == row}) for row in rows}
    return {
        (row, stage): 1 - (1 - LATER) * n / max(len(stages) - 1, 1)
        for row, stages in stages_of.items()
        for n, stage in enumerate(stages)
    }


def _darken_color(color: str, shade: float) -> str:
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(channel * shade):02x}" for channel in channels)


def _draw_time_axis(all_axes: Sequence[Any], second: float, last: float, theme: str) -> None:
    """Draw time ticks below the last panel, and faint grid lines through all panels."""
    unit, each = _choose_time_unit(last, second)
    faint = get_color("faint", theme)
    for axes in all_axes:
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=9, colors=faint, labelbottom=axes is all_axes[-1])
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(lambda time, _: f"{time / each:.4g}{unit}")
        axes.grid(axis="x", color=faint, alpha=0.2, linewidth=0.6)
        axes.set_axisbelow(True)


def _choose_time_unit(longest: float, second: float) -> tuple[str, float]:
    """Choose a readable unit for times up to `longest`. Return the unit's suffix, such as " ms", and the length of this
    unit, expressed in the unit in which `longest` is given."""
    if not second:
        return "", 1.0
    units = ((" s", 1.0), (" ms", 1e-3), (" µs", 1e-6))
    name, times = next((one for one in units if longest / second >= one[1]), units[-1])
    return name, times * second


def _format_seconds(time: float, second: float) -> str:
    unit, each = _choose_time_unit(time, second)
    return f"{time / each:.3g}{unit}" if second else ""


def _format_bytes(nbytes: float) -> str:
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    name, each = next((one for one in units if nbytes >= one[1]), ("B", 1))
    return f"{nbytes / each:.3g} {name}"


def draw_scaling(title: str, rows: Sequence[tuple[int, float, float]], limit: float | None = None) -> Any:
    """Return a figure that plots step time and memory against the number of ranks.

    Each row is (ranks, seconds per step, bytes per rank). `limit` is the available memory of a rank in bytes."""
    figure = _make_blank_figure(9, 3.6, layout="constrained")
    figure.suptitle(title, fontsize=9)
    times, memory = figure.subplots(1, 2)
    ranks, seconds, held = zip(*rows, strict=True)
    times.plot(ranks, seconds, "o-", label="predicted", markersize=4)
    times.plot(ranks, [seconds[0] * ranks[0] / n for n in ranks], ":", label="in proportion to ranks")
    memory.plot(ranks, [n / 2**30 for n in held], "o-", markersize=4)
    if limit is not None:
        memory.axhline(limit / 2**30, color=COLORS["ink"][0], linewidth=1.0, gid=LIMIT_COLOR)
    for axes, words in ((times, "seconds of a step"), (memory, "GiB of a rank")):
        axes.set(xlabel="ranks", ylabel=words, xscale="log", yscale="log", xticks=ranks, xticklabels=ranks)
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.grid(alpha=0.3)
    times.legend()
    return figure


def draw_training_curves(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a figure of losses and throughput over steps. `rows` are the rows of metrics.jsonl."""
    figure = _make_blank_figure(11, 3.6, layout="constrained")
    losses, rates = figure.subplots(1, 2)
    for axes, name, style in ((losses, "loss", "-"), (losses, "validation_loss", "o-"), (rates, "rate", "-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        # omit the throughput of the first step, because the time of that step includes the startup
        points = points[1:] if name == "rate" else points
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "), linewidth=1, markersize=4)
    for axes, words in ((losses, "loss"), (rates, "per second")):
        axes.set(xlabel="step", ylabel=words)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    return figure
