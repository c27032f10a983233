"""Reports on a trainer's traffic, memory and time, for one rank and as a summary over all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import isnan, nan
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.core.base.messages import format_bytes, format_count, format_table
from fsdpx.core.comm.communicator import split_evenly
from fsdpx.core.compression import CodecRoute, NoCompression
from fsdpx.core.engine.clock import VerbTimings
from fsdpx.core.engine.engine import Engine
from fsdpx.core.engine.stage_messages import is_dtype_sent
from fsdpx.core.program import Program, Traffic, TrafficSizes, Transfers, count_traffic
from fsdpx.core.state.footprint import Footprint, get_peak_rss, make_footprint_reader
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TieGroup
from fsdpx.core.trainer.call_runner import CallRunner
from fsdpx.ext.observe.recording import LayerTime, find_timeline_recorder
from fsdpx.ext.observe.routing import (
    ExpertLoad,
    format_expert_load,
    make_expert_load_by_layer,
    sum_expert_load_over_ranks,
)

__all__ = [
    "Report",
    "ReportSummary",
    "format_transfer_name",
    "gather_summary",
    "get_sizes_for_traffic_prediction",
    "make_report_of_rank",
]

NO_TIMINGS = VerbTimings()
COLUMN_MEANINGS = """\
calls and bytes of all ranks; seconds per rank in the actions of a verb, as mean
and maximum over ranks; waited: mean seconds that a rank waited before these
actions; GB/s: bytes of a rank over the time that its transfers were pending;
hidden: share of that time in which the rank computed."""


ROUTING_MEANINGS = """\
choices: positions x experts per position; most, least: share of the expert that was chosen most and least; entropy: 1
if all are chosen equally often, 0 if only one is; dropped: choices that no expert computed; busiest: rows by rank."""


@dataclass(frozen=True)
class ReportSummary:
    """The reports of all ranks. `str` formats them as tables over all ranks.

    Attributes
    ----------
    reports : the report of each rank, in rank order
    """

    reports: tuple[Report, ...]

    def __str__(self) -> str:
        one = self.reports[0]
        seconds = max(report.seconds for report in self.reports)
        head = f"{format_count(len(self.reports), 'rank')}: {_format_model(one, f', {seconds:.1f} s')}"
        routed = [f"{text}\n{ROUTING_MEANINGS}" for text in format_expert_load(self.expert_load, all_ranks=True)]
        parts = (
            f"{self._format_verbs()}\n{COLUMN_MEANINGS}",
            self._format_traffic(),
            *routed,
            self._format_memory(),
            *self._format_layers(),
        )
        return "\n\n".join([head, *parts])

    @property
    def expert_load(self) -> dict[str, ExpertLoad]:
        """Path of each mixture-of-experts layer -> load of its experts, summed over all ranks."""
        return sum_expert_load_over_ranks(report.routing for report in self.reports)

    def list_timings_of_verb(self, verb: str) -> list[VerbTimings]:
        """Return the timings of one kind of action, such as all-gathers, on each rank.

        Parameters
        ----------
        verb : verb of the actions, such as "GATHER"

        Returns
        -------
        list of VerbTimings
            one entry per rank, with zeros for a rank without such actions
        """
        return [report.times.get(verb, NO_TIMINGS) for report in self.reports]

    def compute_mean_bandwidth_of_verb(self, verb: str) -> float | None:
        """Return the bandwidth of one kind of transfer, averaged over ranks and over the time during which such
        transfers are pending.

        Parameters
        ----------
        verb : verb of the actions, such as "GATHER"

        Returns
        -------
        float or None
            bytes per second; None if the verb transfers nothing
        """
        rows = self.list_timings_of_verb(verb)
        moved, seconds = sum(one.nbytes for one in rows), sum(one.in_flight or one.seconds for one in rows)
        return moved / seconds if moved and seconds else None

    def compute_hidden_share(self, verb: str) -> float | None:
        """Return the share of the pending time of one kind of transfer that overlaps with computation.

        Parameters
        ----------
        verb : verb of the actions, such as "GATHER"

        Returns
        -------
        float or None
            share from 0 to 1; None if the verb transfers nothing
        """
        in_flight, busy = (
            sum(getattr(one, name) for one in self.list_timings_of_verb(verb)) for name in ("in_flight", "busy")
        )
        return 1 - busy / in_flight if in_flight else None

    def _sort_key(self, verb: str) -> float:
        return -sum(one.seconds + one.waited for one in self.list_timings_of_verb(verb))

    def _format_verbs(self) -> str:
        verbs = {verb for report in self.reports for verb in report.times}
        rows: list[tuple[str, ...]] = [("verb", "calls", "mean s", "max s", "waited", "bytes", "GB/s", "hidden")]
        for verb in sorted(verbs, key=self._sort_key):
            spent = self.list_timings_of_verb(verb)
            seconds = [one.seconds for one in spent]
            moved, rate, hidden = (
                sum(one.nbytes for one in spent),
                self.compute_mean_bandwidth_of_verb(verb),
                self.compute_hidden_share(verb),
            )
            rows.append(
                (
                    re.sub(r":.*\)", ")", verb), f"{sum(one.calls for one in spent):,}", f"{np.mean(seconds):.3f}",
                    f"{max(seconds):.3f}", f"{np.mean([one.waited for one in spent]):.3f}",
                    format_bytes(moved) if moved else "", f"{rate / 1e9:.3f}" if rate else "",
                    "" if hidden is None else f"{100 * hidden:.0f} %",
                )
            )  # fmt: skip
        return format_table(rows)

    def _format_traffic(self) -> str:
        rows: list[tuple[str, ...]] = [("moved", "calls", "bytes of all ranks", "least per rank", "most")]
        for key in sorted({key for report in self.reports for key in report.traffic}):
            counts = [report.traffic.get(key) for report in self.reports]
            moved = [0 if one is None else one.bytes for one in counts]
            calls = sum(0 if one is None else one.calls for one in counts)
            rows.append(
                (format_transfer_name(*key), f"{calls:,}", *map(format_bytes, (sum(moved), min(moved), max(moved))))
            )
        return format_table(rows if len(rows) > 1 else [*rows, ("nothing: one rank", "", "", "", "")])

    def _format_layers(self) -> Iterator[str]:
        """Yield a table of the slowest layers, if the ranks record traces."""
        paths = dict.fromkeys(path for report in self.reports for path in report.layers)
        return format_slowest_layers(
            {path: {r.rank: r.layers[path] for r in self.reports if path in r.layers} for path in paths}
        )

    def _format_memory(self) -> str:
        """Return a table of memory by kind, with the rank that holds the most of each kind."""
        kinds = sorted({kind for report in self.reports for kind in report.high_water})
        rows: list[tuple[str, ...]] = [("peak memory of a rank", "planned", "held", "rank")]
        for kind in kinds:
            held = [report.high_water.get(kind, (0, 0)) for report in self.reports]
            rank = max(range(len(held)), key=lambda rank: held[rank][1])
            planned, most = held[rank]
            rows.append((kind, "" if planned is None else format_bytes(planned), format_bytes(most), str(rank)))
        peaks = [report.peak_rss for report in self.reports]
        rows.append(("process (RSS)", "", format_bytes(max(peaks)), str(peaks.index(max(peaks)))))
        return format_table(rows)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the reports as plain data, in rank order, for JSON files and report pages."""
        return [_report_to_dict(report) for report in self.reports]


def _format_model(one: Report, end: str = "") -> str:
    end += f"\n{ONE_UNIT}" * one.gathers_whole_model + f"\nplanned: {one.planned}" * bool(one.planned)
    return f"{one.parameters:,} parameters in {format_count(one.units, 'unit')}, {format_count(one.steps, 'step')}{end}"


def _report_to_dict(report: Report) -> dict[str, Any]:
    names = ("rank", "ranks", "steps", "parameters", "units", "seconds", "memory", "peak_rss", "overlap", "high_water")
    return {
        **{name: getattr(report, name) for name in (*names, "planned")},
        "times": {verb: one._asdict() for verb, one in report.times.items()},
        "layers": {path: one._asdict() for path, one in report.layers.items()},
        "routing": {path: {"chosen": one.chosen, "computed": one.computed} for path, one in report.routing.items()},
        "traffic": [[axis, call, one.calls, one.bytes] for (axis, call), one in sorted(report.traffic.items())],
    }


ONE_UNIT = "one unit: all layers are gathered and reduced at once\n(group_bytes=0 makes each layer a unit)"
PARTS = "arena: large buffers of fsdpx; windows: memory that ranks of a host share,\nwhich PSS divides among them"
OUTSIDE_MEANINGS = "outside of programs: reading data, printing, callbacks, and Python between two programs"


Moving = tuple[str, str]
"""A kind of communication, as (mesh axis, collective)."""
MAX_SHOWN_ROWS = 20
"""Maximum number of compressed reductions that are listed individually."""
MAX_SHOWN_LAYERS = 10
"""Maximum number of layers that are listed individually."""


class ReduceReport(NamedTuple):
    """How much a codec compresses the reduction of the gradient of one page (flat parameter buffer) over a mesh axis.

    Attributes
    ----------
    page, axis, codec : names of the page, the mesh axis and the codec
    sent : bytes that this rank sends in each reduction
    plain : bytes that it would send uncompressed
    error : relative error of this rank's last reduction: the norm of the error-feedback buffer after the reduction,
        divided by the norm of (gradient + buffer) before the reduction; NaN without a buffer
    """

    page: str
    axis: str
    codec: str
    sent: int
    plain: int
    error: float


@dataclass(frozen=True, kw_only=True)
class TrafficReport:
    """The communication of one rank.

    Attributes
    ----------
    traffic : (axis, collective) -> number of calls and bytes, as counted
    predicted : (axis, collective) -> number of calls and bytes, as predicted from the program for the steps that `per`
        describes
    reduces : the compressed reductions of gradients
    per : text that says which steps `predicted` covers
    routing : path of a mixture-of-experts layer -> load of its experts, counted for this rank's tokens
    planned : text that names the strategy chosen by strategy="auto", and gives the reason
    gathers_whole_model : whether parameters are sharded but all layers of the model are gathered at once
    shared_parameters : bytes of full parameters that several ranks of the host share as one copy, and the number of
        these ranks
    """

    traffic: dict[tuple[str, str], Traffic]
    predicted: dict[tuple[str, str], Traffic]
    reduces: list[ReduceReport] = field(default_factory=list)
    per: str = "step"
    routing: dict[str, ExpertLoad] = field(default_factory=dict)
    planned: str = ""
    gathers_whole_model: bool = False
    shared_parameters: tuple[int, int] = (0, 1)

    def _format_traffic(self) -> str:
        rows: list[tuple[str, ...]] = [("moved by this rank", "calls", "bytes in total", f"predicted per {self.per}")]
        for (axis, call), count in sorted(self.traffic.items()):
            one = self.predicted.get((axis, call))
            expected = f"{format_count(one.calls, 'call')}, {format_bytes(one.bytes)}" if one else ""
            rows.append((format_transfer_name(axis, call), f"{count.calls:,}", format_bytes(count.bytes), expected))
        return format_table(rows if len(rows) > 1 else [*rows, ("nothing: one rank", "", "", "")])

    def _format_compressed_reduces(self) -> Iterator[str]:
        """Yield a table of the compressed reductions that send the most bytes, with totals. Yield nothing if no
        reduction is compressed."""
        if not self.reduces:
            return
        rows: list[tuple[str, ...]] = [("compressed", "over", "codec", "bytes each time", "saved", "relative error")]
        sent, plain = (sum(n) for n in zip(*((one.sent, one.plain) for one in self.reduces), strict=True))
        for one in sorted(self.reduces, key=lambda one: -one.sent)[:MAX_SHOWN_ROWS]:
            error = "" if isnan(one.error) else f"{one.error:.2g}"
            rows.append(
                (one.page, one.axis, one.codec, format_bytes(one.sent), _format_saved_share(one.sent, one.plain), error)
            )
        rest = f"{len(self.reduces)} reduces" if len(self.reduces) > MAX_SHOWN_ROWS else "in all"
        yield format_table([*rows, (rest, "", "", format_bytes(sent), _format_saved_share(sent, plain), "")])


@dataclass(frozen=True, kw_only=True)
class Report(TrafficReport):
    """The report of one rank on its traffic, memory and time. `str` formats it as tables.

    Attributes
    ----------
    rank, ranks : this rank, and the number of ranks
    steps : number of optimizer updates
    parameters : number of elements of the full model
    units : number of units (groups of layers that are gathered together) of the full model
    memory : kind of memory -> bytes that this rank holds
    disk : kind of memory -> bytes on disk
    peak_rss : peak resident memory of the process in bytes
    times : verb (kind of action) -> its timings
    overlap : mesh axis -> share (from 0 to 1) of the time with pending transfers that this rank spent computing
    seconds : seconds since the trainer was made or its counters were reset
    disk_seconds : seconds with pending reads or writes; None if nothing is stored on disk
    high_water : kind of memory -> (planned bytes, peak bytes). Planned bytes are None without a plan, and activations
        are included only if the trainer keeps a trace
    layers : path of a layer -> its time, if the trainer records a trace
    read_footprint : memory of the process, or a function that reads it; see `footprint`
    """

    rank: int
    ranks: int
    steps: int
    parameters: int
    units: int
    memory: dict[str, int]
    disk: dict[str, int]
    peak_rss: int
    times: dict[str, VerbTimings]
    overlap: dict[str, float]
    seconds: float
    disk_seconds: float | None = None
    high_water: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    layers: dict[str, LayerTime] = field(default_factory=dict)
    read_footprint: Callable[[], Footprint | None] | Footprint | None = field(default=None, repr=False, compare=False)

    @cached_property
    def footprint(self) -> Footprint | None:
        """Memory of this rank's process, read at the first access; None if the system does not report it."""
        return self.read_footprint() if callable(self.read_footprint) else self.read_footprint

    def with_footprint(self) -> Report:
        """Return a copy that contains the current memory of this process as plain data, so that the copy can be sent
        to other ranks."""
        return replace(self, read_footprint=self.footprint)

    def __getstate__(self) -> dict[str, Any]:
        """Measure the memory use of this process before pickling, because another process may print the report."""
        return {**self.__dict__, "footprint": self.footprint}

    def __str__(self) -> str:
        head = f"rank {self.rank} of {self.ranks}: {_format_model(self)}"
        layers = format_slowest_layers({path: {self.rank: one} for path, one in self.layers.items()})
        parts = (
            self._format_traffic(),
            *self._format_compressed_reduces(),
            *self.routing_text,
            self.memory_text,
            self._format_timings(),
            *layers,
        )
        return "\n\n".join([head, *parts])

    @property
    def routing_text(self) -> list[str]:
        """Table of expert load, as a list with one string; the list is empty if there are no experts."""
        return format_expert_load(self.routing, all_ranks=self.ranks == 1)

    @property
    def memory_text(self) -> str:
        """Table of this rank's memory by kind."""
        rows = [("memory of this rank", "bytes")]
        rows += [(kind, format_bytes(n)) for kind, n in sorted(self.memory.items())]
        rows += [("in all", format_bytes(sum(self.memory.values())))]
        rows += [(f"on disk: {kind}", format_bytes(n)) for kind, n in sorted(self.disk.items())]
        now = self.footprint
        process, peak = ([], self.peak_rss) if now is None else ([f"{now}\n{PARTS}"], max(self.peak_rss, now.rss))
        table, (nbytes, n) = format_table(rows), self.shared_parameters
        shared = f"\n{n} ranks of this host share the full parameters, {format_bytes(nbytes)}; each counts 1/{n}"
        return "\n\n".join([table + shared * (n > 1), *process, f"peak of the process (RSS): {format_bytes(peak)}"])

    def _format_timings(self) -> str:
        rows = [("time by verb", "count", "seconds", "waited", "share")]
        total = sum(one.seconds + one.waited for one in self.times.values()) or 1.0
        for verb, one in sorted(self.times.items(), key=lambda item: -sum(item[1][:2])):
            share = f"{100 * (one.seconds + one.waited) / total:.1f} %"
            rows.append((verb, f"{one.calls:,}", f"{one.seconds:.3f}", f"{one.waited:.3f}", share))
        rows.append(("outside of programs", "", f"{max(self.seconds - total, 0.0):.3f}", "", ""))
        hidden = ", ".join(f"{axis} {100 * share:.0f} %" for axis, share in sorted(self.overlap.items()))
        disk = [f"disk: {self.disk_seconds:.3f} s busy"] if self.disk_seconds else []
        transfers = [f"transfers hidden behind computing: {hidden}"] if hidden else []
        return "\n".join([format_table(rows), OUTSIDE_MEANINGS, *transfers, *disk])


def format_slowest_layers(layers: Mapping[str, Mapping[int, LayerTime]]) -> Iterator[str]:
    """Yield a table of the slowest layers, each with the time on its slowest rank. Yield nothing if there are no
    layers.

    `layers` maps the path of a layer to the time on each rank."""

    def sum_seconds(one: LayerTime) -> float:
        return one.forward + one.backward

    if not layers:
        return
    worst = {path: max(ranks.items(), key=lambda item: sum_seconds(item[1])) for path, ranks in layers.items()}
    total = sum(sum_seconds(one) for _, one in worst.values()) or 1.0
    rows: list[tuple[str, ...]] = [("slowest layers", "rank", "forwards", "forward s", "backward s", "share")]
    for path, (rank, one) in sorted(worst.items(), key=lambda item: -sum_seconds(item[1][1]))[:MAX_SHOWN_LAYERS]:
        times = (
            f"{one.forwards:,}",
            f"{one.forward:.3f}",
            f"{one.backward:.3f}",
            f"{100 * sum_seconds(one) / total:.1f} %",
        )
        rows.append((path, str(rank), *times))
    yield f"{format_table(rows)}\n{format_count(len(layers), 'layer')}; share: of the time of all of them"


def format_transfer_name(axis: str, call: str) -> str:
    """Return a readable name of a transfer, such as "all-gather over shard" or "read, disk"."""
    return f"{call}, {axis}" if axis == "disk" else f"{call.replace('_', '-')} over {axis}"


def make_report_of_rank(engine: Engine, programs: Sequence[tuple[Program, int]]) -> Report:
    """Return the report of this rank.

    `programs` lists (program, number of runs) for each program of a step, or of a round of local steps."""
    clock, state, place = engine.clock, engine.state, engine.placement
    counted = {(axis, verb): Traffic(calls, nbytes) for axis, verb, calls, nbytes in place.axes.counters}
    shared = [row for row in state.ledger if row.key.kind == "full" and row.sharers > 1]
    predicted, traced = _predict_traffic(engine, programs), find_timeline_recorder(engine)
    return Report(
        rank=place.axes.world.rank,
        ranks=place.axes.world.size,
        steps=state.steps,
        parameters=place.layout.size,
        units=len(place.layout.units),
        traffic=counted,
        predicted=predicted,
        routing=make_expert_load_by_layer(place.axes.counters.tallies),
        per="step" if (every := sum(times for _, times in programs)) == 1 else f"round of {every} steps",
        memory=state.count_bytes_by_kind(),
        disk=state.ledger.count_offloaded_bytes_by_kind(),
        peak_rss=get_peak_rss(),
        times=clock.get_timings(),
        overlap={axis: 1.0 - busy / in_flight for axis, (in_flight, busy) in clock.in_flight.items() if in_flight > 0},
        seconds=perf_counter() - clock.start,
        reduces=list(_iterate_compressed_reduce_reports(engine)),
        layers={} if traced is None else dict(traced.layers),
        disk_seconds=state.storage.busy_seconds,
        high_water={
            **state.get_planned_and_peak_bytes(),
            **({"activations": (None, traced.activations.peak_bytes)} if traced else {}),
        },
        planned=place.options.planned,
        gathers_whole_model=not place.keeps_full_parameters and _is_whole_model_one_unit(place),
        shared_parameters=(sum(row.nbytes for row in shared), shared[0].sharers if shared else 1),
        read_footprint=make_footprint_reader(state) if place.device.holds_data else None,
    )


def _is_whole_model_one_unit(place: Placement) -> bool:
    """Return whether sharding saves little memory because all layers with parameters form a single unit, which is
    gathered as a whole."""
    layers = {field.source.rpartition(".")[0] for page in place.layout.pages for field in page.fields}
    return len(place.layout.units) == 1 < len(layers) and place.axes.shard.size > 1


def gather_summary(host: CallRunner) -> ReportSummary:
    """Gather the reports of all ranks, for `trainer.inspect.gather_summary`. Collective."""
    host.agree_on_call("gather_summary")
    mine = make_report_of_rank(host.session.engine, host.session.round_programs).with_footprint()
    return ReportSummary(tuple(host.world.all_gather_value(mine)))


def _predict_traffic(engine: Engine, programs: Sequence[tuple[Program, int]]) -> dict[tuple[str, str], Traffic]:
    sizes, total = get_sizes_for_traffic_prediction(engine), dict[tuple[str, str], Traffic]()
    for program, times in programs:
        for key, one in count_traffic(program, sizes).items():
            have = total.get(key, Traffic())
            total[key] = Traffic(have.calls + times * one.calls, have.bytes + times * one.bytes)
    return total


def _format_saved_share(sent: int, plain: int) -> str:
    return f"{100 * (1 - sent / plain):.1f} %" if plain else ""


def _iterate_compressed_reduce_reports(engine: Engine) -> Iterator[ReduceReport]:
    """Yield a report on each gradient reduction that a codec compresses."""
    place, plain = engine.placement, CodecRoute(NoCompression(), NoCompression())
    itemsize = place.formats.gradients.itemsize
    for p in place.stage.trained_pages:
        route, page, own = place.get_codec_route(p), place.pages[p], place.count_replica_owned_elements(p)
        found = zip(
            *(place.accumulation.predict_transfers(r, page, own, itemsize) for r in (route, plain)), strict=True
        )
        for axis, codec, moves in zip(("shard", "replica"), route, found, strict=True):
            if axis in place.axes.reduction_axes and place.axes.data.size > 1 and not isinstance(codec, NoCompression):
                whole, kept = engine.state.ledger.codec_error_norms.get((axis, p), (nan, nan))
                sent, usual = (sum(nbytes for _, nbytes in some) for some in moves)
                yield ReduceReport(
                    place.format_page_name(p), axis, type(codec).__name__, sent, usual, kept / whole if whole else 0.0
                )


def get_sizes_for_traffic_prediction(engine: Engine) -> TrafficSizes:
    """Return the sizes of pages (flat parameter buffers), messages and mesh axes that are needed to predict this rank's
    traffic."""
    place = engine.placement
    itemsize = place.formats.gradients.itemsize
    moves = {
        p: place.accumulation.predict_transfers(
            place.get_codec_route(p), page, place.count_replica_owned_elements(p), itemsize
        )
        for p, page in place.pages.items()
    }
    return TrafficSizes(
        full={p: page.size for p, page in place.pages.items()},
        shard={p: page.own_range.size for p, page in place.pages.items()},
        replica_own={p: place.count_replica_owned_elements(p) for p in place.pages},
        param_itemsize=(place.formats.wire or place.formats.compute).itemsize,
        grad_itemsize=itemsize,
        tie_itemsize=itemsize,
        widths={"shard": place.axes.shard.size, "replica": place.axes.replica.size},
        ties={p: tuple(_iterate_tied_gradient_transfers(place, tie)) for p, tie in engine.state.ties.items()},
        amounts={"edge": _count_stage_message_bytes(engine), **engine.state.storage.get_bytes_per_transfer_by_record()},
        carried={
            ("shard", "reduce_scatter"): {p: reduce for p, (reduce, _) in moves.items()},
            ("replica", "all_reduce"): {p: join for p, (_, join) in moves.items()},
            ("replica", "reduce_scatter"): {p: _list_outer_gradient_transfers(place, p) for p in place.pages},
        },
        parts={p: place.list_optimizer_collectives(p) for p in place.stage.trained_pages},
    )


def _list_outer_gradient_transfers(place: Placement, page: int) -> Transfers:
    """Return the collectives that reduce the outer gradient of a page (flat parameter buffer), with the bytes that this
    rank sends in each. The outer gradient is the change of the parameters during a round of local steps."""
    replica = place.axes.replica
    counts = split_evenly(place.pages[page].own_range.size, replica.size)
    return place.get_codec_route(page).replica.predict_transfers(counts, replica.rank, place.formats.gradients.itemsize)


def _iterate_tied_gradient_transfers(place: Placement, tie: TieGroup) -> Iterator[tuple[str, str, int]]:
    """Yield (axis, collective, elements) for each transfer that sums the gradients of tied parameters."""
    here = [p for p in tie.pages if p in place.pages]
    n = place.pages[here[0]].own_range.size
    if tie.partial:
        tensor = place.axes.tensor
        for _ in here:
            yield "tensor", "all_reduce", 2 * (n - split_evenly(n, tensor.size)[tensor.rank])
    if tie.comm is not None:
        yield "peers", "all_gather", n * (len(tie.pages) - len(here))


def _count_stage_message_bytes(engine: Engine) -> dict[tuple[int, int | None], int]:
    """Return the size in bytes of each message between pipeline stages, given the shapes of the last batch. The result
    is keyed by (edge index, microbatch). An edge is a value, or the gradient of a value, that one stage sends to
    another."""
    found: dict[tuple[int, int | None], int] = {}
    for edge in engine.placement.stage.edges:
        for mb, batch in enumerate(engine.batch):
            if batch is not None:
                value = engine.placement.value_shapes.shape_of(edge.value, batch)
                found |= {(edge.number, mb): value.nbytes} if is_dtype_sent(edge, value.dtype) else {}
    return found
