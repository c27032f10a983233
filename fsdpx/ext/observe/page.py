"""A run as text, and as one HTML page with pictures inside: where time goes, and who waits for whom."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from statistics import median
from typing import Any

from fsdpx.core.base import safe_files
from fsdpx.core.base.messages import bytes_text, table
from fsdpx.core.program import VERBS, Event, idle, parse
from fsdpx.errors import ConfigError, printable
from fsdpx.ext.observe import plots
from fsdpx.ext.observe.chrome import LAYER, MICRO, RankTrace, read
from fsdpx.ext.observe.folder import LARGEST, RunFolder, as_written

__all__ = ["Spans", "Waits", "sections", "waits", "write_page"]

@dataclass(frozen=True)
class Spans:
    """Seconds of one rank in the steps of a trace: in all, computing, and in the transfers that it waited for after all
    ranks had come."""

    whole: float
    computing: float
    moving: float


@dataclass(frozen=True)
class Waits:
    """matrix: seconds, by [waiting rank][rank waited for]. spans: by rank. steps: how many."""

    matrix: list[list[float]]
    spans: list[Spans]
    steps: int


def waits(ranks: Sequence[RankTrace]) -> Waits:
    """Over all steps in the traces."""
    come: dict[str, list[tuple[float, int]]] = defaultdict(list)  # key -> when each rank came
    for n, one in enumerate(ranks):
        for key, begin, _, _ in _slices(one):
            come[key].append((begin, n))
    last = {key: max(some) for key, some in come.items()}
    size = len(ranks)
    matrix, spans, steps = [[0.0] * size for _ in ranks], list[Spans](), 0
    for n, one in enumerate(ranks):
        moving = 0.0
        for key, begin, end, stops in _standing(one):
            late, who = last.get(key, (begin, n))
            came = min(max(late, begin), end)
            if who != n:
                matrix[n][who] += came - begin
            moving += end - came if stops or who != n else end - begin
        whole = sum(e["dur"] for e in one.events if e.get("cat") == "step") / MICRO
        computing = sum(e["dur"] for e in one.events if e.get("cat") in ("compute", "host")) / MICRO
        spans.append(Spans(whole, computing, moving))
        steps = sum(e.get("cat") == "step" for e in one.events)
    return Waits(matrix, spans, steps)


def _slices(one: RankTrace) -> Iterator[tuple[str, float, float, bool]]:
    """The transfers that other ranks take part in: key, begin and end on rank 0's clock, and whether this rank
    stood still."""
    for event in one.events:
        key = event.get("args", {}).get("key")
        if event["ph"] == "X" and event["cat"] != "wait" and key:
            yield (key, *_span(one, event), bool(event["args"]["stops"]))


def _standing(one: RankTrace) -> Iterator[tuple[str, float, float, bool]]:
    """Where the rank stood still: in transfers, and before actions that need one."""
    for key, begin, end, stops in _slices(one):
        if stops:
            yield key, begin, end, True
    for event in one.events:
        if event.get("cat") == "wait":
            yield (event["args"]["key"], *_span(one, event), False)


def _span(one: RankTrace, event: dict[str, Any]) -> tuple[float, float]:
    return one.aligned(event["ts"] / MICRO), one.aligned((event["ts"] + event["dur"]) / MICRO)


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 16px; color: #222; }
h2 { font-size: 1.1em; margin: 24px 0 6px; }
img { max-width: 100%; }
pre { margin: 0; font-size: 13px; overflow-x: auto; }
"""
NO_TRACE = "no trace was kept: --trace of the main job, distribute(trace=...) or FSDPX_TRACE"
SHOWN = 10
"""Layers of the table of the slowest ones."""


def write_page(folder: RunFolder) -> str:
    """Write report.html into the folder of a run, or of traces alone, and return what it says as text. ConfigError if
    the folder holds neither. Without Matplotlib the page has no pictures."""
    traces = read(folder.trace) if folder.trace.exists() else []
    with as_written(folder.path):
        texts, name = dict(sections(folder, traces)), escape(folder.path.resolve().name)
        drawn = [] if plots.missing() else [_image(figure) for figure in _figures(folder, traces)]
    blocks = [f"<h2>{escape(title)}</h2><pre>{escape(text)}</pre>" for title, text in texts.items()]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    body = f"<h1>{name}</h1>{''.join(blocks[:1] + drawn + blocks[1:])}"
    page = f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'
    safe_files.write(folder.page, page, safe_files.READABLE)
    return printable("\n\n".join(f"{title}\n\n{text}" for title, text in texts.items()))


def sections(folder: RunFolder, traces: Sequence[RankTrace]) -> Iterator[tuple[str, str]]:
    """What the page says: titles and texts."""
    of_a_run = folder.config.exists()
    if not of_a_run and not traces:
        raise ConfigError(
            f"{folder.path} holds no run and no traces: there is no {folder.config.name}, and no rank-*.json.gz; "
            "`fsdpx runs` lists those in runs/"
        )
    yield "Run", _facts(folder) if of_a_run else _facts_of_traces(traces)
    if of_a_run:
        yield "Bytes sent or received, by axis", _bytes(folder)
    if found := waits(traces) if traces else None:
        yield "One step: measured, and simulated with messages that take no time", _step(traces)
        yield "Where the time of ranks goes", _stragglers(found)
        yield "Who waits for whom", _matrix(found)
        yield "Slowest layers", _layers(traces)
    else:
        yield "Trace", NO_TRACE
    if of_a_run:
        yield "Summary over all ranks", _summary(folder)


def _facts(folder: RunFolder) -> str:
    config, environment = folder.read_json("config.json"), folder.read_json("environment.json")
    ended = folder.read_json("report.json").get("ended", "not yet, or not well")
    rows = [("begun", config.get("begun")), ("ended", ended), ("ranks", config.get("ranks"))]
    rows += [("host", environment.get("host")), ("command", " ".join(environment.get("command", [])))]
    return _pairs([*rows, *config.get("arguments", {}).items()])


def _facts_of_traces(traces: Sequence[RankTrace]) -> str:
    header = traces[0].header
    hosts = ", ".join(dict.fromkeys(one.header.host for one in traces))
    return _pairs([("ranks", header.ranks), ("mesh", header.mesh), ("hosts", hosts), ("fsdpx", header.version)])


def _pairs(rows: Sequence[tuple[str, Any]]) -> str:
    rows = [(name, str(value)) for name, value in rows if value is not False and value not in (None, "")]
    return "\n".join(f"{name:{max(len(one) for one, _ in rows)}}  {value}" for name, value in rows)


def _figures(folder: RunFolder, traces: Sequence[RankTrace]) -> Iterator[Any]:
    if rows := folder.metrics():
        yield plots.curves(rows)
    if any(_measured(traces)):
        names = [name for n in range(len(traces)) for name in (f"rank {n}\nmeasured", "simulated")]
        measured = [replace(event, rank=2 * event.rank) for event in _measured(traces)]
        simulated = [replace(event, rank=2 * event.rank + 1) for event in _simulated(traces)]
        title = "one step: measured, and simulated with messages that take no time"
        alive = [[(1e3 * at, nbytes) for at, nbytes in one.header.alive] for one in traces]
        held = [row for points in alive for row in ({"activations": points} if points else {}, {})]
        yield plots.figure([plots.StepLanes(title, [*measured, *simulated], names, held, second=1e3)])


def _image(figure: Any) -> str:
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    return f'<p><img alt="" src="data:image/png;base64,{b64encode(drawn.getvalue()).decode()}"></p>'


def _step(traces: Sequence[RankTrace]) -> str:
    rows = [("", "ms", "idle")]
    for what, events in (("measured", _measured(traces)), ("simulated", _simulated(traces))):
        computing = [event for event in events if VERBS[event.action.op].lane == "compute"]
        if computing:
            span = max(event.end for event in computing) - min(event.start for event in computing)
            rows.append((what, f"{span:.2f}", f"{100 * idle(computing):.0f} %"))
    most = max((nbytes / 2**20 for one in traces for _, nbytes in one.header.alive), default=0.0)
    held = max(sum(one.header.memory.values()) for one in traces)
    alive = f"activations: at most {most:.2f} MiB, beside {bytes_text(held)} that a rank holds all the time"
    return f"{table(rows)}\n\n{alive}"


def _measured(traces: Sequence[RankTrace]) -> list[Event]:
    """The actions of the step that is shown, in milliseconds since the first one, on rank 0's clock."""
    found = []
    for n, one in enumerate(traces):
        shown = [e for e in one.events if e.get("cat") == "step" and e["args"]["turn"] == one.header.shown]
        begin, end = (shown[0]["ts"], shown[0]["ts"] + shown[0]["dur"]) if shown else (0.0, 0.0)
        for e in one.events:
            if e["ph"] == "X" and e["cat"] not in ("step", "outside", "wait", LAYER) and begin <= e["ts"] < end:
                start, until = (1e3 * one.aligned(at / MICRO) for at in (e["ts"], e["ts"] + e["dur"]))
                found.append(Event(n, parse(e["name"])[0], start, until, key=e["args"].get("key")))
    zero = min((event.start for event in found), default=0.0)
    return [replace(event, start=event.start - zero, end=event.end - zero) for event in found]


def _simulated(traces: Sequence[RankTrace]) -> list[Event]:
    """The same step where messages take no time, in milliseconds."""
    return [
        Event(n, parse(name)[0], 1e3 * start, 1e3 * end)
        for n, one in enumerate(traces)
        for name, start, end in one.header.simulated
        if end > start
    ]


def _bytes(folder: RunFolder) -> str:
    total: dict[str, float] = defaultdict(float)
    for report in folder.read_json("report.json").get("ranks", []):
        for axis, call, _, nbytes in report["traffic"]:
            total[f"{call.replace('_', '-')}, {axis}"] += nbytes / 2**20
    if not total:
        return "nothing: one rank, or the run has no report yet"
    rows = sorted(total.items(), key=lambda one: -one[1])
    return table([("transfer", "MiB"), *((name, f"{mib:,.3f}") for name, mib in rows)])


def _stragglers(found: Waits) -> str:
    rows: list[tuple[str, ...]] = [("ms per step", "computing", "waiting for others", "waiting for transfers", "other")]
    each, computing = 1e3 / (found.steps or 1), []
    for n, span in enumerate(found.spans):
        waiting = sum(found.matrix[n])
        rest = max(span.whole - span.computing - waiting - span.moving, 0.0)
        times = [each * seconds for seconds in (span.computing, waiting, span.moving, rest)]
        computing.append(times[0])
        rows.append((f"rank {n}", *(f"{ms:.2f}" for ms in times)))
    usual = median(computing)
    slow = [f"rank {n} ({ms / usual - 1:+.0%})" for n, ms in enumerate(computing) if ms > 1.1 * usual]
    named = f"longer by a tenth and more than the median: {', '.join(slow)}" if slow else "no rank is slow"
    return f"{table(rows)}\n\ncomputing: {named}; mean of {found.steps} steps"


def _matrix(found: Waits) -> str:
    rows = [("ms per step", *(f"for {n}" for n in range(len(found.matrix))))]
    each = 1e3 / (found.steps or 1)
    rows += [(f"rank {n}", *(f"{each * seconds:.2f}" for seconds in row)) for n, row in enumerate(found.matrix)]
    return f"{table(rows)}\n\nin which the rank in front stood still because the other had not come to a transfer yet"


def _layers(traces: Sequence[RankTrace]) -> str:
    """The ten that take longest, each on the rank on which it takes longest."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(traces))
    for one in traces:
        for event in one.events:
            if event.get("cat") == LAYER:
                spent[event["name"].rpartition(" ")[0]][one.header.rank] += event["dur"] / 1e3
    steps = sum(event.get("cat") == "step" for event in traces[0].events) or 1
    slowest = sorted(((path, max(ms) / steps) for path, ms in spent.items()), key=lambda one: -one[1])[:SHOWN]
    rows = [("layer", "ms per step"), *((path, f"{ms:.3f}") for path, ms in slowest)]
    return f"{table(rows)}\n\n{len(spent)} layers in all, on the slowest rank of each; mean of {steps} steps"


def _summary(folder: RunFolder) -> str:
    path = folder.path / "report.txt"
    there = path.exists()
    return safe_files.read(path, LARGEST, ours=False).decode() if there else "the run has not come to its end"
