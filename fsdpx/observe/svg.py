"""Pictures as SVG text: curves, bars, and boxes in time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from fsdpx.program import VERBS

__all__ = ["TimeBar", "bars", "colour_of", "curves", "legend", "schedule"]

COLOURS = {
    "F": "#4c78a8", "E": "#4c78a8", "C": "#4c78a8", "R": "#9ecae9", "B": "#54a24b", "I": "#88d27a", "W": "#f58518",
    "LOSS": "#b279a2", "SCORE": "#b279a2", "UPDATE": "#e45756",
    "GATHER": "#72b7b2", "REDUCE": "#d67195", "JOIN": "#ff9da6", "SEND": "#eeca3b",
}  # fmt: skip
SERIES = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#b279a2", "#72b7b2", "#eeca3b", "#79706e")
WAITING, OTHER = "#dddddd", "#79706e"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 220, 58, 12, 10, 34
ROW, LABEL = 26, 130
"""Of a schedule: the height of a row, and the room for its name."""


def colour_of(op: str) -> str:
    return COLOURS.get(op, WAITING if VERBS[op].moves else OTHER)


class TimeBar(NamedTuple):
    """From start to end, in milliseconds. level: 0 above the middle of its row, 1 for a thin line below."""

    row: int
    start: float
    end: float
    op: str
    text: str
    level: int = 0


def curves(series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> str:
    """Lines of (x, y) points with axes; names are for `legend`. Points alone where a line has few."""
    shown = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    every = [point for points in shown.values() for point in points]
    if not every:
        return "<p>no figures</p>"
    xs, ys = _axis([p[0] for p in every]), _axis([p[1] for p in every])
    parts = [*_frame(xs, ys, x, y)]
    for colour, points in zip(_colours(len(shown)), shown.values(), strict=True):
        places = [(_along(px, xs, LEFT, WIDTH - RIGHT), _along(py, ys, HEIGHT - BOTTOM, TOP)) for px, py in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(places) <= 30:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.2" fill="{colour}"/>' for a, b in places]
    return _svg(WIDTH, HEIGHT, parts)


def bars(rows: Sequence[tuple[str, Sequence[float]]], unit: str) -> str:
    """One bar per row, of several parts behind each other."""
    left, right = 170, 125  # of the bars, for their names and numbers
    most = max((sum(parts) for _, parts in rows), default=0.0) or 1.0
    made = []
    for n, (name, values) in enumerate(rows):
        top, at = 6 + 22 * n, float(left)
        made.append(f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{escape(name)}</text>')
        for colour, value in zip(_colours(len(values)), values, strict=True):
            long = value / most * (WIDTH - left - right)
            made.append(f'<rect x="{at:.1f}" y="{top}" width="{long:.1f}" height="15" fill="{colour}"/>')
            at += long
        made.append(f'<text x="{at + 6:.1f}" y="{top + 12}">{_number(sum(values))} {unit}</text>')
    return _svg(WIDTH, 12 + 22 * len(rows), made)


def schedule(names: Sequence[str], boxes: Sequence[TimeBar], width: int = 1000) -> str:
    """A row per name, time from left to right."""
    last, height = max((box.end for box in boxes), default=1.0), ROW * len(names) + 30
    ms = _axis([0.0, last])
    parts = []
    for n, name in enumerate(names):
        parts.append(f'<text x="{LABEL - 8}" y="{ROW * n + 17}" text-anchor="end">{escape(name)}</text>')
    for at in _ticks(ms):
        x = _along(at, ms, LABEL, width - RIGHT)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{ROW * len(names)}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle">{_number(at)}</text>')
    parts.append(f'<text x="{width - RIGHT}" y="{height - 1}" text-anchor="end">ms</text>')
    for box in boxes:
        start, end = (_along(at, ms, LABEL, width - RIGHT) for at in (box.start, box.end))
        top, high = (ROW * box.row + 3, 15) if box.level == 0 else (ROW * box.row + 19, 4)
        colour = WAITING if box.op == "wait" else colour_of(box.op)
        place = f'x="{start:.2f}" y="{top}" width="{max(end - start, 0.3):.2f}" height="{high}" fill="{colour}"'
        parts.append(f"<rect {place}><title>{escape(box.text)}</title></rect>")
    return _svg(width, height, parts)


def legend(names: Sequence[str], colours: Sequence[str] = ()) -> str:
    """The meaning of the colours, as text below a picture."""
    shown = zip(names, colours or list(_colours(len(names))), strict=True)
    return '<p class="legend">' + " ".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in shown
    ) + "</p>"  # fmt: skip


def _colours(count: int) -> Iterator[str]:
    return (SERIES[n % len(SERIES)] for n in range(count))


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _frame(xs: tuple[float, float], ys: tuple[float, float], x: str, y: str) -> Iterator[str]:
    for at in _ticks(ys):
        place = _along(at, ys, HEIGHT - BOTTOM, TOP)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}" class="grid"/>'
        yield f'<text x="{LEFT - 5}" y="{place + 4:.1f}" text-anchor="end">{_number(at)}</text>'
    for at in _ticks(xs):
        place = _along(at, xs, LEFT, WIDTH - RIGHT)
        yield f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_number(at)}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>'
    yield f'<text transform="translate(13,{HEIGHT / 2 - 12}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'


def _axis(values: Sequence[float]) -> tuple[float, float]:
    least, most = min(values), max(values)
    margin = 0.0 if least == 0 else 0.04 * (most - least)
    return least - margin, (most if most > least else least + (abs(least) or 1.0)) + 0.04 * (most - least)


def _ticks(axis: tuple[float, float]) -> list[float]:
    """About four round numbers."""
    wide = axis[1] - axis[0]
    step = 10 ** math.floor(math.log10(wide / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if wide / (factor * step) <= 5)
    return [n * step for n in range(math.ceil(axis[0] / step), math.floor(axis[1] / step) + 1)]


def _along(value: float, axis: tuple[float, float], first: float, last: float) -> float:
    return first + (value - axis[0]) / (axis[1] - axis[0]) * (last - first)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
