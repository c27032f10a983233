"""A run as one HTML page, with all that it shows inside: it can be read offline, and sent."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import Any

from fsdpx import files
from fsdpx.errors import ConfigError
from fsdpx.observe import svg
from fsdpx.observe.chrome import LAYER, MICRO, RankTrace, read
from fsdpx.observe.folder import LARGEST, RunFolder
from fsdpx.observe.svg import TimeBar
from fsdpx.observe.waits import Waits, waits
from fsdpx.program import VERBS
from fsdpx.state.tuning import bytes_text

__all__ = ["page", "write_page"]

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 16px; color: #222; }
h1 { font-size: 1.5em; margin: 0; }
h2 { font-size: 1.1em; margin: 0 0 6px; }
.cards { display: grid; gap: 16px; margin-top: 16px; }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
section { border: 1px solid #ddd; border-radius: 6px; padding: 12px; min-width: 0; }
.wide { grid-column: 1 / -1; }
.tall { grid-row: span 2; }
.scroll { overflow-x: auto; }
.scroll svg { min-width: 760px; }
svg { width: 100%; height: auto; display: block; font-size: 12px; }
svg text { fill: #444; }
@media (max-width: 640px) { section > svg { font-size: 14px; } }
.grid { stroke: #e4e4e4; }
table { border-collapse: collapse; }
td, th { padding: 2px 10px 2px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { white-space: nowrap; }
.numbers td, .numbers th { text-align: right; padding: 3px 8px; }
pre { margin: 0; font-size: 12px; overflow-x: auto; }
.legend span { margin-right: 14px; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
p { margin: 6px 0; }
.note { color: #666; }
"""
NO_TRACE = "no trace was kept: --trace of the main job, distribute(trace=...) or FSDPX_TRACE"


def write_page(folder: RunFolder) -> None:
    """Write report.html into the folder, of a run or of traces alone; ConfigError if it holds neither."""
    files.write(folder.page, page(folder), files.READABLE)


def page(folder: RunFolder) -> str:
    """The page as text."""
    of_a_run = folder.config.exists()
    traces = read(folder.trace) if folder.trace.exists() else []
    if not of_a_run and not traces:
        raise ConfigError(
            f"{folder.path} holds no run and no traces: there is no {folder.config.name}, and no rank-*.json.gz; "
            "`fsdpx runs` lists those in runs/"
        )
    found = waits(traces) if traces else None
    cards = [
        _card("Run", _facts(folder) if of_a_run else _facts_of_traces(traces), "tall"),
        *(_curves(folder.metrics()) if of_a_run else ()),
        _card("One step: measured, and simulated with messages that take no time", _step(traces), "wide"),
        _card("Activations over that step", _memory(traces)),
        *([_card("Bytes sent or received, by axis", _bytes(folder))] if of_a_run else []),
        _card("Where the time of ranks goes", _stragglers(found)),
        _card("Who waits for whom", _matrix(found)),
        _card("Slowest layers", _layers(traces)),
        *([_card("Summary over all ranks", _summary(folder), "wide")] if of_a_run else []),
    ]
    name = escape(folder.path.resolve().name)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    body = f'<h1>{name}</h1><div class="cards">{"".join(cards)}</div>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def _card(title: str, content: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{content}</section>'


def _facts(folder: RunFolder) -> str:
    config, environment = folder.read_json("config.json"), folder.read_json("environment.json")
    ended = folder.read_json("report.json").get("ended", "not yet, or not well")
    rows = [("begun", config.get("begun")), ("ended", ended), ("ranks", config.get("ranks"))]
    rows += [("host", environment.get("host")), ("command", " ".join(environment.get("command", [])))]
    rows += [(name, value) for name, value in config.get("arguments", {}).items() if value not in (None, False, "")]
    return _table(rows)


def _facts_of_traces(traces: Sequence[RankTrace]) -> str:
    header = traces[0].header
    hosts = ", ".join(dict.fromkeys(one.header.host for one in traces))
    return _table([("ranks", header.ranks), ("mesh", header.mesh), ("hosts", hosts), ("fsdpx", header.version)])


def _table(rows: Sequence[tuple[str, Any]]) -> str:
    cells = "".join(f"<tr><th>{escape(str(a))}</th><td>{escape(str(b))}</td></tr>" for a, b in rows if b is not None)
    return f"<table>{cells}</table>"


def _curves(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    def of(name: str) -> list[tuple[float, float]]:
        return [(row["step"], row[name]) for row in rows if name in row]

    losses = {"training": of("loss"), "validation": of("validation_loss")}
    yield _card("Loss", svg.curves(losses, "step", "loss") + svg.legend(list(losses)))
    yield _card("Throughput", svg.curves({"rate": of("rate")[1:]}, "step", "per second"))


def _step(traces: Sequence[RankTrace]) -> str:
    if not traces or traces[0].header.shown is None:
        return f'<p class="note">{NO_TRACE}</p>'
    windows = [_window(one) for one in traces]
    zero = min(one.aligned(start / MICRO) for one, (start, _) in zip(traces, windows, strict=True))
    boxes, names = list[TimeBar](), list[str]()
    for n, (one, (start, end)) in enumerate(zip(traces, windows, strict=True)):
        names += [f"rank {n} measured", "simulated"]
        boxes += [_measured(one, e, 2 * n, zero) for e in one.events if _within(e, start, end)]
        boxes += _simulated(one, 2 * n + 1)
    shown = [op for op in svg.COLOURS if any(box.op == op for box in boxes)]
    key = svg.legend([*shown, "waits, other moves"], [*map(svg.colour_of, shown), svg.WAITING])
    idle = " ".join(_idle(boxes, row, what) for row, what in ((0, "measured"), (1, "simulated")))
    return f'<div class="scroll">{svg.schedule(names, boxes)}</div>{key}<p>{idle}</p>'


def _window(one: RankTrace) -> tuple[float, float]:
    """From when to when the step lasts that is shown, in the file's time."""
    step = next(e for e in one.events if e.get("cat") == "step" and e["args"]["turn"] == one.header.shown)
    return step["ts"], step["ts"] + step["dur"]


def _within(event: dict[str, Any], start: float, end: float) -> bool:
    return event["ph"] == "X" and event["cat"] not in ("step", "outside", LAYER) and start <= event["ts"] < end


def _measured(one: RankTrace, event: dict[str, Any], row: int, zero: float) -> TimeBar:
    start, end = (1e3 * (one.aligned(at / MICRO) - zero) for at in (event["ts"], event["ts"] + event["dur"]))
    name = event["name"]
    if event["cat"] == "wait":
        return TimeBar(row, start, end, "wait", f"{name}: {end - start:.3f} ms")
    moved = f", {bytes_text(event['args']['bytes'])}" if "bytes" in event["args"] else ""
    level = 0 if event["cat"] in ("compute", "host") else 1
    return TimeBar(row, start, end, _verb(name), f"{name}: {end - start:.3f} ms{moved}", level)


def _simulated(one: RankTrace, row: int) -> list[TimeBar]:
    rows = [(name, 1e3 * start, 1e3 * end) for name, start, end in one.header.simulated]
    return [
        TimeBar(row, start, end, _verb(name), f"{name}: {end - start:.3f} ms")
        for name, start, end in rows
        if VERBS[_verb(name)].lane == "compute" and end > start
    ]


def _verb(name: str) -> str:
    return re.match("[A-Z]+", name)[0]  # type: ignore[index]


def _idle(boxes: Sequence[TimeBar], parity: int, what: str) -> str:
    """Over all ranks, the share of the step in which they do not compute."""
    rows: dict[int, list[TimeBar]] = defaultdict(list)
    for box in boxes:
        if box.row % 2 == parity and box.level == 0 and box.op != "wait" and VERBS[box.op].lane == "compute":
            rows[box.row].append(box)
    span = max((max(b.end for b in row) - min(b.start for b in row) for row in rows.values()), default=0.0)
    busy = sum(box.end - box.start for row in rows.values() for box in row)
    return f"{what.capitalize()}: {span:.2f} ms, {100 * (1 - busy / (span * len(rows))):.0f} % idle." if span else ""


def _memory(traces: Sequence[RankTrace]) -> str:
    series = {f"rank {n}": [(1e3 * at, b / 2**20) for at, b in one.header.alive] for n, one in enumerate(traces)}
    if not any(series.values()):
        return f'<p class="note">{NO_TRACE}</p>'
    most = max((y for points in series.values() for _, y in points), default=0.0)
    held = max(sum(one.header.memory.values()) for one in traces)
    note = f"<p>At most {most:.2f} MiB, beside {bytes_text(held)} that a rank holds all the time.</p>"
    return svg.curves(series, "ms", "MiB") + svg.legend(list(series)) + note


def _bytes(folder: RunFolder) -> str:
    total: dict[str, float] = defaultdict(float)
    for report in folder.read_json("report.json").get("ranks", []):
        for axis, call, _, nbytes in report["traffic"]:
            total[f"{call.replace('_', '-')}, {axis}"] += nbytes / 2**20
    if not total:
        return '<p class="note">nothing: one rank, or the run has no report yet</p>'
    return svg.bars([(name, [mib]) for name, mib in sorted(total.items(), key=lambda one: -one[1])], "MiB")


def _stragglers(found: Waits | None) -> str:
    if found is None or not found.steps:
        return f'<p class="note">{NO_TRACE}</p>'
    rows, each = [], 1e3 / found.steps
    for n, span in enumerate(found.spans):
        waiting = sum(found.matrix[n])
        rest = max(span.whole - span.computing - waiting - span.moving, 0.0)
        rows.append((f"rank {n}", [each * s for s in (span.computing, waiting, span.moving, rest)]))
    computing = [values[0] for _, values in rows]
    usual = median(computing)
    slow = [f"rank {n} ({ms / usual - 1:+.0%})" for n, ms in enumerate(computing) if ms > 1.1 * usual]
    words = (
        f"Computes more than a tenth longer than the median: {', '.join(slow)}." if slow else "No rank computes longer."
    )
    key = svg.legend(["computing", "waiting for others", "waiting for transfers", "other"])
    return f"{svg.bars(rows, 'ms per step')}{key}<p>{words} Mean of {found.steps} steps.</p>"


def _layers(traces: Sequence[RankTrace]) -> str:
    """The ten that take longest, each on the rank on which it takes longest."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(traces))
    for one in traces:
        for event in one.events:
            if event.get("cat") == LAYER:
                spent[event["name"].rpartition(" ")[0]][one.header.rank] += event["dur"] / 1e3
    if not spent:
        return f'<p class="note">{NO_TRACE}</p>'
    steps = sum(event.get("cat") == "step" for event in traces[0].events)
    slowest = sorted(((path, max(ms) / steps) for path, ms in spent.items()), key=lambda one: -one[1])[:10]
    more = f"<p>{len(spent)} layers in all, on the slowest rank of each. Mean of {steps} steps.</p>"
    return svg.bars([(path, [ms]) for path, ms in slowest], "ms per step") + more


def _matrix(found: Waits | None) -> str:
    if found is None or not found.steps:
        return f'<p class="note">{NO_TRACE}</p>'
    most = max(max(row) for row in found.matrix) or 1.0
    head = "".join(f"<th>for {n}</th>" for n in range(len(found.matrix)))
    rows = []
    for n, row in enumerate(found.matrix):
        cells = "".join(
            f'<td style="background:rgba(228,87,86,{0.75 * s / most:.2f})">{1e3 * s / found.steps:.2f}</td>'
            for s in row
        )
        rows.append(f"<tr><th>rank {n}</th>{cells}</tr>")
    note = "ms per step in which the rank in front stood still because the other had not come to a transfer yet"
    return (
        f'<div class="scroll"><table class="numbers"><tr><th></th>{head}</tr>{"".join(rows)}</table></div><p>{note}</p>'
    )


def _summary(folder: RunFolder) -> str:
    path = folder.path / "report.txt"
    text = files.read(path, LARGEST, ours=False).decode() if path.exists() else "the run has not come to its end"
    return f"<pre>{escape(text)}</pre>"
