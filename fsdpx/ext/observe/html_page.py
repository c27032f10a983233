"""The report of a run, as text and as an HTML page with plots: where the time goes, and which ranks wait for which
other ranks."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from io import BytesIO
from statistics import median
from typing import Any

from fsdpx.core.base import safe_files
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.messages import format_bytes, format_table
from fsdpx.core.program import VERBS, ActionEvent, compute_idle_share, parse_actions
from fsdpx.errors import ConfigError, escape_control
from fsdpx.ext.observe import plots
from fsdpx.ext.observe.chrome import LAYER, MICROSECONDS_PER_SECOND, RankTrace, read_traces
from fsdpx.ext.observe.folder import MAX_FILE_BYTES, RunFolder, naming_folder_in_errors

__all__ = ["RankSpans", "WaitMatrix", "compute_wait_matrix", "iterate_page_sections", "write_report_page"]


@dataclass(frozen=True)
class RankSpans:
    """How one rank spent its time during the steps of a trace, in seconds.

    Attributes
    ----------
    whole : total time of the steps
    computing : time spent in computations
    transferring : time that this rank was blocked in transfers while data was moving, after all participating ranks had
        entered the transfer
    """

    whole: float
    computing: float
    transferring: float


@dataclass(frozen=True)
class WaitMatrix:
    """How long ranks waited for each other.

    Attributes
    ----------
    matrix : matrix[i][j] is the time, in seconds, that rank i waited for rank j because j was the last rank to arrive
    spans : how each rank spent its time
    steps : number of steps in the traces
    """

    matrix: list[list[float]]
    spans: list[RankSpans]
    steps: int


def compute_wait_matrix(ranks: Sequence[RankTrace]) -> WaitMatrix:
    """Return how long each rank waited for each other rank, in seconds, summed over all steps of the traces."""
    # key of a transfer -> pairs (time when the rank entered the transfer, rank)
    come: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for n, one in enumerate(ranks):
        for key, begin, _, _ in _iterate_transfer_times(one):
            come[key].append((begin, n))
    last = {key: max(some) for key, some in come.items()}
    size = len(ranks)
    matrix, spans, steps = [[0.0] * size for _ in ranks], list[RankSpans](), 0
    for n, one in enumerate(ranks):
        transferring = 0.0
        for key, begin, end, stops in _iterate_waits_of_rank(one):
            late, who = last.get(key, (begin, n))
            came = min(max(late, begin), end)
            if who != n:
                matrix[n][who] += came - begin
            transferring += end - came if stops or who != n else end - begin
        whole = sum(e["dur"] for e in one.events if e.get("cat") == "step") / MICROSECONDS_PER_SECOND
        computing = sum(e["dur"] for e in one.events if e.get("cat") in ("compute", "host")) / MICROSECONDS_PER_SECOND
        spans.append(RankSpans(whole, computing, transferring))
        steps = sum(e.get("cat") == "step" for e in one.events)
    return WaitMatrix(matrix, spans, steps)


def _iterate_transfer_times(one: RankTrace) -> Iterator[tuple[str, float, float, bool]]:
    """Yield (key, begin, end, whether the rank was blocked) for each transfer with other ranks. Times are in seconds,
    on rank 0's clock."""
    for event in one.events:
        key = event.get("args", {}).get("key")
        if event["ph"] == "X" and event["cat"] != "wait" and key:
            yield (key, *_get_rank0_span(one, event), bool(event["args"]["stops"]))


def _iterate_waits_of_rank(one: RankTrace) -> Iterator[tuple[str, float, float, bool]]:
    """Yield each wait of a rank, as (key of the transfer, begin, end, whether the rank was blocked inside the
    transfer).

    A rank can be blocked in two places: inside the transfer itself (True), or before an action that needs the result of
    the transfer (False)."""
    for key, begin, end, stops in _iterate_transfer_times(one):
        if stops:
            yield key, begin, end, True
    for event in one.events:
        if event.get("cat") == "wait":
            yield (event["args"]["key"], *_get_rank0_span(one, event), False)


def _get_rank0_span(one: RankTrace, event: dict[str, Any]) -> tuple[float, float]:
    return one.to_rank0_clock(event["ts"] / MICROSECONDS_PER_SECOND), one.to_rank0_clock(
        (event["ts"] + event["dur"]) / MICROSECONDS_PER_SECOND
    )


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 16px; color: #222; }
h2 { font-size: 1.1em; margin: 24px 0 6px; }
img { max-width: 100%; }
pre { margin: 0; font-size: 13px; overflow-x: auto; }
"""
NO_TRACE = "no trace was recorded: --trace of the main job, distribute(trace=...) or FSDPX_TRACE"
MAX_SHOWN_ROWS = 10
"""Maximum number of rows in the table of the slowest layers."""


def write_report_page(folder: RunFolder) -> str:
    """Write report.html for the folder of a run, or for a folder that contains only traces, and return the report as
    text.

    Raises ConfigError if the folder is neither of these. Without Matplotlib, the page has no plots."""
    traces = read_traces(folder.trace_folder) if folder.trace_folder.exists() else []
    with naming_folder_in_errors(folder.path):
        texts, name = dict(iterate_page_sections(folder, traces)), escape(folder.path.resolve().name)
        drawn = (
            []
            if plots.format_missing_matplotlib_message()
            else [_embed_image(figure) for figure in _iterate_figures(folder, traces)]
        )
    blocks = [f"<h2>{escape(title)}</h2><pre>{escape(text)}</pre>" for title, text in texts.items()]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>'
    body = f"<h1>{name}</h1>{''.join(blocks[:1] + drawn + blocks[1:])}"
    page = f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'
    safe_files.write_file(folder.page_path, page, safe_files.READABLE)
    return escape_control("\n\n".join(f"{title}\n\n{text}" for title, text in texts.items()))


def iterate_page_sections(folder: RunFolder, traces: Sequence[RankTrace]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for each section of the report."""
    of_a_run = folder.config_path.exists()
    if not of_a_run and not traces:
        raise ConfigError(
            f"{folder.path} holds no run and no traces: there is no {folder.config_path.name}, and no rank-*.json.gz; "
            "`fsdpx runs` lists those in runs/"
        )
    yield "Run", _format_run_facts(folder) if of_a_run else _format_trace_facts(traces)
    if of_a_run:
        yield "Bytes sent or received, by axis", _format_traffic(folder)
    if found := compute_wait_matrix(traces) if traces else None:
        yield "One step: measured, and simulated with messages that take no time", _format_step_times(traces)
        yield "How ranks spend their time", _format_stragglers(found)
        yield "Which ranks wait for which", _format_wait_matrix(found)
        yield "Slowest layers", _format_slowest_layers(traces)
    else:
        yield "Trace", NO_TRACE
    if of_a_run:
        yield "Summary over all ranks", _read_report_text(folder)


def _format_run_facts(folder: RunFolder) -> str:
    config, environment = folder.read_json("config.json"), folder.read_json("environment.json")
    ended = folder.read_json("report.json").get("ended", "not yet, or with an error")
    rows = [
        ("begun", config.get("begun")),
        ("resumed", config.get("resumed")),
        ("ended", ended),
        ("ranks", config.get("ranks")),
    ]
    rows += [("host", environment.get("host")), ("command", " ".join(environment.get("command", [])))]
    return _format_pairs([*rows, *config.get("arguments", {}).items()])


def _format_trace_facts(traces: Sequence[RankTrace]) -> str:
    header = traces[0].header
    hosts = ", ".join(dict.fromkeys(one.header.host for one in traces))
    return _format_pairs([("ranks", header.ranks), ("mesh", header.mesh), ("hosts", hosts), ("fsdpx", header.version)])


def _format_pairs(rows: Sequence[tuple[str, Any]]) -> str:
    rows = [(name, str(value)) for name, value in rows if value is not False and value not in (None, "")]
    return "\n".join(f"{name:{max(len(one) for one, _ in rows)}}  {value}" for name, value in rows)


def _iterate_figures(folder: RunFolder, traces: Sequence[RankTrace]) -> Iterator[Any]:
    if rows := folder.read_metrics():
        yield plots.draw_training_curves(rows)
    if any(_list_representative_step_events(traces)):
        names = [name for n in range(len(traces)) for name in (f"rank {n}\nmeasured", "simulated")]
        measured = [replace(event, rank=2 * event.rank) for event in _list_representative_step_events(traces)]
        simulated = [replace(event, rank=2 * event.rank + 1) for event in _list_simulated_events(traces)]
        title = "one step: measured, and simulated with messages that take no time"
        alive = [[(1e3 * at, nbytes) for at, nbytes in one.header.alive] for one in traces]
        held = [row for points in alive for row in ({"activations": points} if points else {}, {})]
        yield plots.make_step_figure([plots.StepLanes(title, [*measured, *simulated], names, held, second=1e3)])


def _embed_image(figure: Any) -> str:
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    return f'<p><img alt="" src="data:image/png;base64,{b64encode(drawn.getvalue()).decode()}"></p>'


def _format_step_times(traces: Sequence[RankTrace]) -> str:
    rows = [("", "ms", "idle")]
    for what, events in (
        ("measured", _list_representative_step_events(traces)),
        ("simulated", _list_simulated_events(traces)),
    ):
        computing = [event for event in events if VERBS[event.action.op].lane == "compute"]
        if computing:
            span = max(event.end for event in computing) - min(event.start for event in computing)
            rows.append((what, f"{span:.2f}", f"{100 * compute_idle_share(computing):.0f} %"))
    most = max((nbytes / 2**20 for one in traces for _, nbytes in one.header.alive), default=0.0)
    held = max(sum(one.header.memory.values()) for one in traces)
    alive = f"activations: at most {most:.2f} MiB, in addition to {format_bytes(held)} that a rank always holds"
    return f"{format_table(rows)}\n\n{alive}"


def _list_representative_step_events(traces: Sequence[RankTrace]) -> list[ActionEvent]:
    """Return the actions of all ranks in the representative step. Times are on rank 0's clock, in milliseconds since
    the first action of any rank."""
    found = []
    for n, one in enumerate(traces):
        shown = [e for e in one.events if e.get("cat") == "step" and e["args"]["run"] == one.header.shown]
        begin, end = (shown[0]["ts"], shown[0]["ts"] + shown[0]["dur"]) if shown else (0.0, 0.0)
        for e in one.events:
            if e["ph"] == "X" and e["cat"] not in ("step", "outside", "wait", LAYER) and begin <= e["ts"] < end:
                start, until = (
                    1e3 * one.to_rank0_clock(at / MICROSECONDS_PER_SECOND) for at in (e["ts"], e["ts"] + e["dur"])
                )
                found.append(ActionEvent(n, parse_actions(e["name"])[0], start, until, key=e["args"].get("key")))
    zero = min((event.start for event in found), default=0.0)
    return [replace(event, start=event.start - zero, end=event.end - zero) for event in found]


def _list_simulated_events(traces: Sequence[RankTrace]) -> list[ActionEvent]:
    """Return the events of the representative step, simulated with messages that take no time. Times are in
    milliseconds."""
    return [
        ActionEvent(n, parse_actions(name)[0], 1e3 * start, 1e3 * end)
        for n, one in enumerate(traces)
        for name, start, end in one.header.simulated
        if end > start
    ]


def _format_traffic(folder: RunFolder) -> str:
    total: dict[str, float] = defaultdict(float)
    for report in folder.read_json("report.json").get("ranks", []):
        for axis, call, _, nbytes in report["traffic"]:
            total[f"{call.replace('_', '-')}, {axis}"] += nbytes / 2**20
    if not total:
        return "nothing: one rank, or the run has no report yet"
    rows = sorted(total.items(), key=lambda one: -one[1])
    return format_table([("transfer", "MiB"), *((name, f"{mib:,.3f}") for name, mib in rows)])


def _format_stragglers(found: WaitMatrix) -> str:
    rows: list[tuple[str, ...]] = [("ms per step", "computing", "waiting for others", "waiting for transfers", "other")]
    each, computing = 1e3 / (found.steps or 1), []
    for n, span in enumerate(found.spans):
        waiting = sum(found.matrix[n])
        rest = max(span.whole - span.computing - waiting - span.transferring, 0.0)
        times = [each * seconds for seconds in (span.computing, waiting, span.transferring, rest)]
        computing.append(times[0])
        rows.append((f"rank {n}", *(f"{ms:.2f}" for ms in times)))
    usual = median(computing)
    slow = [f"rank {n} ({ms / usual - 1:+.0%})" for n, ms in enumerate(computing) if ms > 1.1 * usual]
    named = f"at least 10 % longer than the median: {', '.join(slow)}" if slow else "no rank is slow"
    return f"{format_table(rows)}\n\ncomputing: {named}; mean of {found.steps} steps"


def _format_wait_matrix(found: WaitMatrix) -> str:
    rows = [("ms per step", *(f"for {n}" for n in range(len(found.matrix))))]
    each = 1e3 / (found.steps or 1)
    rows += [(f"rank {n}", *(f"{each * seconds:.2f}" for seconds in row)) for n, row in enumerate(found.matrix)]
    table = format_table(rows)
    return f"{table}\n\nwaiting time of the rank on the left because the other rank had not entered a transfer yet"


def _format_slowest_layers(traces: Sequence[RankTrace]) -> str:
    """Return a table of the slowest layers, each with the time on its slowest rank."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(traces))
    for one in traces:
        for event in one.events:
            if event.get("cat") == LAYER:
                spent[event["name"].rpartition(" ")[0]][one.header.rank] += event["dur"] / 1e3
    steps = sum(event.get("cat") == "step" for event in traces[0].events) or 1
    slowest = sorted(((path, max(ms) / steps) for path, ms in spent.items()), key=lambda one: -one[1])[:MAX_SHOWN_ROWS]
    rows = [("layer", "ms per step"), *((path, f"{ms:.3f}") for path, ms in slowest)]
    return f"{format_table(rows)}\n\n{len(spent)} layers in all, on the slowest rank of each; mean of {steps} steps"


def _read_report_text(folder: RunFolder) -> str:
    path = folder.path / "report.txt"
    there = path.exists()
    return safe_files.read_file(path, MAX_FILE_BYTES, ours=False).decode() if there else "the run has not ended"
