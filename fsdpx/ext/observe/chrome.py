"""Trace files for Perfetto and chrome://tracing: one gzipped file of JSON events per rank, and one file that merges
them.

The format is Google's "Trace Event Format", with times in microseconds. Data that this format cannot represent is
stored under the key "fsdpx", which viewers ignore."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fsdpx.core.base import safe_files
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.mesh import AXES, MeshAxes
from fsdpx.core.program import VERBS, Action, ActionEvent
from fsdpx.errors import ConfigError
from fsdpx.ext.observe.measure import ClockReading, interpolate_offset
from fsdpx.ext.observe.recording import ActionSpan, OutsideSpan, ProgramRecord, TransferSpan

__all__ = [
    "LAYER",
    "MERGED",
    "SIMULATED",
    "RankTrace",
    "TraceGroups",
    "TraceHeader",
    "convert_program_record_to_events",
    "get_trace_file_name",
    "list_trace_events_of_rank",
    "list_wait_events",
    "merge_traces",
    "read_traces",
    "write_simulated_trace",
    "write_trace",
]  # fmt: skip

MIN_SLICE_SECONDS = 1e-6
"""Gaps shorter than this are attributed to Python overhead, and are not shown as waiting."""


@dataclass(frozen=True)
class TraceGroups:
    """The process groups of a rank, with a name for each group that is the same on all of its members.

    `groups` maps a lane (a mesh axis such as "shard", or "world") to the name of the group of ranks that communicate on
    it."""

    rank: int
    groups: dict[str, str]

    @classmethod
    def from_axes(cls, axes: MeshAxes) -> TraceGroups:
        here = axes.coordinates._asdict()
        groups = {axis: ".".join(f"{name}{at}" for name, at in here.items() if name != axis) for axis in AXES}
        together = "" if axes.group is axes.world else f"replica{axes.coordinates.replica}"
        return cls(axes.world.rank, {**groups, "world": together})

    def make_transfer_key(self, record: ProgramRecord, action: Action, time: int) -> Hashable:
        """Return a key that identifies a transfer and is the same on all ranks that take part. Return None if no other
        rank takes part.

        `time` counts the occurrences of the action in its program, starting at 1."""
        verb = VERBS[action.op]
        if verb.lane not in self.groups:
            return None
        kind = "message" if verb.is_send or verb.is_receive else action.op
        return (verb.lane, self.groups[verb.lane], record.number, kind, action.unit, action.mb, time)


def convert_program_record_to_events(record: ProgramRecord, place: TraceGroups) -> list[ActionEvent]:
    """Return one event per action of a recorded program, in program order.

    An event begins when the inputs of the action are available. A computation ends when its call returns, and a
    transfer that overlaps computation ends when this rank notices that it is complete."""
    flights: dict[Action, list[TransferSpan]] = defaultdict(list)
    for flight in record.transfers:
        flights[flight.action].append(flight)
    times: Counter[Action] = Counter()
    found = []
    for one in record.actions:
        times[one.action] += 1
        start, end = _find_input_ready_and_last_transfer_end(one, flights[one.action])
        key = place.make_transfer_key(record, one.action, times[one.action])
        found.append(ActionEvent(place.rank, one.action, start, end, one.nbytes, key))
    return found


def _find_input_ready_and_last_transfer_end(one: ActionSpan, flights: Sequence[TransferSpan]) -> tuple[float, float]:
    """Return when the inputs of an action were available, and when the last transfer that the action issued was
    complete.

    If the action issued no transfer, the second time is the end of the action. Otherwise, it may be earlier than the
    end of the action: on a busy machine, a message may be complete before the call that sent it returns."""
    landed = [flight.landed for flight in flights if one.ready <= flight.issued <= one.end]
    return one.ready, max(landed, default=one.end)


def list_wait_events(record: ProgramRecord, events: Sequence[ActionEvent]) -> list[ActionEvent]:
    """Return one event for each time that the rank was blocked because an action needed an incomplete transfer.

    Each returned event has the action and the key (identifier) of the transfer that ended the wait. If that transfer is
    unknown, the event has the action that was blocked, and no key. `events` are the events of all actions in
    `record`."""
    moving = [event for event in events if VERBS[event.action.op].moves]
    found = []
    for one, event in zip(record.actions, events, strict=True):
        if one.ready - one.begin > MIN_SLICE_SECONDS:
            late = max((e for e in moving if one.begin < e.end <= one.ready), key=lambda e: e.end, default=None)
            action, key = (one.action, None) if late is None else (late.action, late.key)
            found.append(ActionEvent(event.rank, action, one.begin, one.ready, 0, key))
    return found


MIN_MESSAGE_SECONDS = 1e-8
"""Minimum time from the send to the receive of a message. It is larger than the rounding error of the times in the
files."""
MERGED = "trace.json.gz"
SIMULATED, SIMULATED_PID_OFFSET = "simulated.json.gz", 1_000_000
"""Name of the file with a simulated step, which `merge_traces` adds to the measured traces, and the offset that keeps
its process numbers distinct from the process numbers in the measured traces."""
MAX_UNPACKED_BYTES = 1 << 30
"""Maximum size in bytes of a trace file after decompression."""
MAX_NAMED_FILES = 10
"""Maximum number of missing files that an error message lists."""
MICROSECONDS_PER_SECOND = 1e6
COMPUTE_THREAD, FIRST_TRANSFER_THREAD = 0, 2
"""Thread numbers in the trace: the thread for actions that occupy the rank, and the first thread for transfers that
overlap these actions."""
STEPS_THREAD = 1
LAYER = "layer"
"""Category of the slices of layers, which are nested in slices of actions."""
JSON = dict[str, Any]


@dataclass
class TraceHeader:
    """The data that a rank's trace file holds in addition to its events.

    Attributes
    ----------
    rank, ranks : this rank, and the number of ranks
    mesh, host : the mesh of ranks as text, and the name of the machine
    place : mesh axis -> coordinate of the rank
    origin : the time on the rank's clock, in seconds, that corresponds to time 0 in the file
    clock : offsets of the rank's clock from rank 0's clock, measured at the beginning and at the end of the run
    shown : index of the representative run of a program, whose timeline is shown in reports; None if there is none
    simulated : (action, start, end) of each action of the rank, from a simulation of the representative run. The
        simulation assumes that messages take no time
    alive : pairs (time in seconds, bytes of activations from that time on) for the representative run
    memory : kind of memory -> bytes that the rank holds in addition to activations
    """

    rank: int
    ranks: int
    mesh: str
    place: dict[str, int]
    host: str
    origin: float
    clock: list[ClockReading]
    shown: int | None = None
    simulated: list[tuple[str, float, float]] = field(default_factory=list)
    alive: list[tuple[float, int]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    version: str = __version__


@dataclass(frozen=True)
class RankTrace:
    """The parsed trace file of one rank: its header, its events in the trace format, and the delay in seconds that
    `read_traces` added to its times, so that no message seems to arrive before it was sent."""

    header: TraceHeader
    events: list[JSON]
    delay: float = 0.0

    def to_rank0_clock(self, seconds: float) -> float:
        """Convert a time of this rank, in seconds since the origin of its file, to seconds on rank 0's clock."""
        at = self.header.origin + seconds
        return at - interpolate_offset(self.header.clock, at) + self.delay

    @property
    def clock_error(self) -> float:
        """Upper bound, in seconds, on the error of times that are converted from this rank's clock to rank 0's clock.
        """
        return max(reading.error for reading in self.header.clock)


def get_trace_file_name(rank: int) -> str:
    return f"rank-{rank:05}.json.gz"


def write_trace(
    folder: Path,
    header: TraceHeader,
    records: Sequence[ProgramRecord],
    place: TraceGroups,
    after: Iterable[OutsideSpan] = (),
) -> Path:
    """Write the trace file of one rank, and return its path. `after` contains the time spans of the work that was done
    after the last recorded program ended."""
    path = folder / get_trace_file_name(header.rank)
    _write_gzip_json(
        path,
        {
            "traceEvents": list_trace_events_of_rank(header, records, place, after),
            "displayTimeUnit": "ms",
            "fsdpx": asdict(header),
        },
    )
    return path


def write_simulated_trace(path: Path, ranks: Sequence[tuple[TraceHeader, ProgramRecord, TraceGroups]]) -> None:
    """Write the simulated timelines of one step on several ranks to a single file, in the format of a recorded
    trace."""
    events = [
        {**event, "pid": event["pid"] + SIMULATED_PID_OFFSET}
        for one in ranks
        for event in list_trace_events_of_rank(one[0], [one[1]], one[2])
    ]
    _write_gzip_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})


def list_trace_events_of_rank(
    header: TraceHeader, records: Sequence[ProgramRecord], place: TraceGroups, after: Iterable[OutsideSpan] = ()
) -> list[JSON]:
    """Return the trace events of one rank: slices (of steps, actions, layers, waits and transfers), arrows (for
    messages), and a counter (of the bytes of activations)."""
    lanes = _TraceLanes(header)
    for record in records:
        if not record.actions:
            continue
        lanes.add_outside_spans(record.before, record.number)
        events = convert_program_record_to_events(record, place)
        lanes.add_step(record, max(event.end for event in events))
        for wait in list_wait_events(record, events):
            lanes.add_wait(wait)
        for one, event in zip(record.actions, events, strict=True):
            lanes.add_action(event, stops=(event.start, event.end) == (one.ready, one.end))
            lanes.add_memory(one.end, one.alive)
        for path, what, begin, end in record.layers:
            lanes.add_slice(COMPUTE_THREAD, f"{path} {what}", LAYER, begin, end)
    lanes.add_outside_spans(after, len(records))
    return [*lanes.iterate_name_metadata(), *lanes.found]


class _TraceLanes:
    """Builds the trace events of one rank, and assigns them to the threads under which the viewer shows them.

    Slices of the same thread may be nested, but must not partially overlap. A transfer that overlaps another transfer
    on the same mesh axis is therefore assigned to an additional thread."""

    def __init__(self, header: TraceHeader) -> None:
        self.header = header
        self.found: list[JSON] = []
        self._free: dict[str, list[float]] = {}  # lane -> the times at which its threads become free
        self._threads: dict[tuple[str, int], int] = {}

    def iterate_name_metadata(self) -> Iterator[JSON]:
        where = " ".join(f"{axis} {at}" for axis, at in self.header.place.items())
        yield self._make_metadata("process_name", 0, name=f"rank {self.header.rank} ({where}) on {self.header.host}")
        yield self._make_metadata("process_sort_index", 0, sort_index=self.header.rank)
        named = {COMPUTE_THREAD: "compute", STEPS_THREAD: "steps"}
        named |= {tid: lane + (f" ({n + 1})" if n else "") for (lane, n), tid in self._threads.items()}
        for tid, name in named.items():
            yield self._make_metadata("thread_name", tid, name=name)
            yield self._make_metadata("thread_sort_index", tid, sort_index=tid)

    def _make_metadata(self, what: str, tid: int, **args: Any) -> JSON:
        return {"ph": "M", "name": what, "pid": self.header.rank, "tid": tid, "args": args}

    def add_slice(self, tid: int, name: str, kind: str, start: float, end: float, **args: Any) -> None:
        common = {"ph": "X", "name": name, "cat": kind, "pid": self.header.rank, "tid": tid}
        begin = self._to_microseconds(start)
        self.found.append({**common, "ts": begin, "dur": round(self._to_microseconds(end) - begin, 3), "args": args})

    def add_outside_spans(self, spans: Iterable[OutsideSpan], run_number: int) -> None:
        """Add the spans of work done between two programs, such as agreeing on a batch, before run `run_number`."""
        for what, begin, end, nbytes in spans:
            args: JSON = {"bytes": nbytes} if nbytes else {}
            self.add_slice(COMPUTE_THREAD, what, "outside", begin, end, key=f"{run_number}", stops=True, **args)

    def add_step(self, record: ProgramRecord, end: float) -> None:
        words = f"{record.program.kind} {record.steps + 1}"
        self.add_slice(STEPS_THREAD, words, "step", record.actions[0].begin, end, run=record.number, steps=record.steps)

    def add_wait(self, event: ActionEvent) -> None:
        self.add_slice(
            COMPUTE_THREAD, f"wait for {event.action}", "wait", event.start, event.end, key=_format_key(event)
        )

    def add_action(self, event: ActionEvent, stops: bool) -> None:
        """Add an action as a slice. `stops` says whether the rank was blocked during the action."""
        verb = VERBS[event.action.op]
        occupies = verb.lane in ("compute", "host")
        tid = COMPUTE_THREAD if occupies else self._choose_thread(verb.lane, event)
        args: JSON = {"bytes": event.nbytes} if event.nbytes else {}
        if event.key is not None:
            args |= {"key": _format_key(event), "stops": stops}
        self.add_slice(tid, str(event.action), verb.lane, event.start, event.end, **args)
        if event.nbytes and (verb.is_send or verb.is_receive):
            self._add_arrow_end(tid, event, verb.is_send)

    def add_memory(self, at: float, nbytes: int) -> None:
        common = {"ph": "C", "name": "activations", "pid": self.header.rank, "ts": self._to_microseconds(at)}
        self.found.append({**common, "args": {"bytes": nbytes}})

    def _choose_thread(self, lane: str, event: ActionEvent) -> int:
        free = self._free.setdefault(lane, [])
        n = next((n for n, until in enumerate(free) if until <= event.start), len(free))
        free[n:] = [event.end, *free[n + 1 :]]
        return self._threads.setdefault((lane, n), FIRST_TRANSFER_THREAD + len(self._threads))

    def _add_arrow_end(self, tid: int, event: ActionEvent, sends: bool) -> None:
        """Add one end of an arrow that leads from the beginning of a send to the end of the matching receive."""
        number = int.from_bytes(blake2b(repr(event.key).encode(), digest_size=6).digest(), "big")
        common = {"name": "message", "cat": "message", "id": number, "pid": self.header.rank, "tid": tid}
        if sends:
            self.found.append({**common, "ph": "s", "ts": self._to_microseconds(event.start)})
        else:
            start, end = self._to_microseconds(event.start), self._to_microseconds(event.end)
            # this time lies inside the slice, so that viewers attach the arrow to it
            inside = max(end - 0.01, (start + end) / 2)
            self.found.append({**common, "ph": "f", "bp": "e", "ts": round(inside, 3)})

    def _to_microseconds(self, at: float) -> float:
        return round((at - self.header.origin) * MICROSECONDS_PER_SECOND, 3)


def _format_key(event: ActionEvent) -> str:
    """Return the key of an event as text, or "" if the event has no key. The text is the same on all ranks that take
    part in the event's transfer."""
    return "" if event.key is None else repr(event.key)


def read_traces(folder: Path) -> list[RankTrace]:
    """Read the trace files of all ranks in a folder, in rank order. Raises ConfigError if any is missing or damaged.

    Because of errors in the measured clock offsets, a message can seem to arrive before it was sent. In that case, the
    receiving rank's events are moved later, by at most the error of the offsets."""
    paths = sorted(folder.glob("rank-*.json.gz"))
    if not paths:
        raise ConfigError(
            f"{folder}: there is no rank-*.json.gz; run with --trace, FSDPX_TRACE or distribute(trace=...)"
        )
    found = [_read_trace(path) for path in paths]
    there, ranks = {one.header.rank for one in found}, found[0].header.ranks
    if len(there) != ranks or max(there) >= ranks:
        numbers = ", ".join(str(n) for n in range(min(ranks, len(there) + MAX_NAMED_FILES)) if n not in there)
        raise ConfigError(f"{folder}: of {found[0].header.ranks} ranks the files of {numbers} are missing")
    try:
        delays = _compute_clock_corrections(found)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: its content is not what fsdpx writes: {error!r}") from error
    return [replace(one, delay=delay) for one, delay in zip(found, delays, strict=True)]


def _compute_clock_corrections(ranks: Sequence[RankTrace]) -> list[float]:
    """Return the smallest delay, in seconds, that must be added to each rank's times so that no message arrives before
    it is sent.

    A rank's delay is the length of the longest path to it, in a graph of ranks whose edges lead from senders to
    receivers. It is found by the Bellman-Ford algorithm. If clocks drift, there may be a cycle in which delays grow
    forever, so the search ends after as many rounds as there are ranks."""
    sent, received = ({
        event["id"]: (rank, one.to_rank0_clock(event["ts"] / MICROSECONDS_PER_SECOND))
        for rank, one in enumerate(ranks) for event in one.events if event["ph"] == end
    } for end in "sf")  # fmt: skip
    earliest: dict[tuple[int, int], float] = {}  # (sender, receiver) -> receiver's minimum delay relative to the sender
    for message in sent.keys() & received.keys():
        (source, begin), (target, end) = sent[message], received[message]
        least = begin + MIN_MESSAGE_SECONDS - end
        earliest[source, target] = max(earliest.get((source, target), least), least)
    delays = [0.0] * len(ranks)
    for _ in ranks:
        for (source, target), least in earliest.items():
            delays[target] = max(delays[target], delays[source] + least)
    return delays


def _read_gzip_json(path: Path) -> Any:
    with safe_files.open_file(path, ours=False) as raw, gzip.open(raw) as file:
        text = file.read(MAX_UNPACKED_BYTES + 1)
    if len(text) > MAX_UNPACKED_BYTES:
        raise ValueError(f"more than {MAX_UNPACKED_BYTES:,} bytes are packed in it")
    return safe_files.parse_json(text)


def _read_trace(path: Path) -> RankTrace:
    try:
        found = _read_gzip_json(path)
        header = TraceHeader(**found["fsdpx"])
        header.clock = [ClockReading(*map(float, reading)) for reading in header.clock]
        if not (header.clock and type(header.rank) is type(header.ranks) is int and 0 <= header.rank < header.ranks):
            raise ValueError("it lacks its rank or its clock readings")
        return RankTrace(header, found["traceEvents"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ConfigError(f"{path}: no trace of fsdpx can be read there: {error!r}") from error


def merge_traces(folder: Path) -> tuple[Path, float, int]:
    """Merge the trace files of all ranks in a folder into one file, with all times on the clock of rank 0.

    Returns the path of the file, an upper bound in seconds on the clock error between any two ranks, and the number of
    messages whose send and receive are both present. If the folder contains a simulated step, it is added, shifted to
    begin at the same time as the representative measured step."""
    ranks = read_traces(folder)
    zero = min(one.to_rank0_clock(0.0) for one in ranks)
    events = [dict(event) for one in ranks for event in _convert_to_rank0_clock(one, zero)]
    errors = sorted((one.clock_error for one in ranks), reverse=True)
    bound = sum(errors[:2])
    path = folder / MERGED
    header = {
        "ranks": len(ranks),
        "clock_error_us": [round(one.clock_error * MICROSECONDS_PER_SECOND, 3) for one in ranks],
    }
    header["clock_error_between_ranks_us"] = round(bound * MICROSECONDS_PER_SECOND, 3)
    _write_gzip_json(
        path,
        {
            "traceEvents": [*events, *_read_simulated_events(ranks[0], folder, zero)],
            "displayTimeUnit": "ms",
            "fsdpx": header,
        },
    )
    ends = [{event["id"] for event in events if event["ph"] == kind} for kind in "sf"]
    return path, bound, len(ends[0] & ends[1])


def _read_simulated_events(first: RankTrace, folder: Path, zero: float) -> list[JSON]:
    """Read the events of the simulated step in a folder, shifted so that they begin at the same time as the
    representative step on rank 0."""
    path = folder / SIMULATED
    if not path.exists():
        return []
    steps = (e["ts"] for e in first.events if e.get("cat") == "step" and e["args"]["run"] == first.header.shown)
    begin = round(
        (first.to_rank0_clock(next(steps, 0.0) / MICROSECONDS_PER_SECOND) - zero) * MICROSECONDS_PER_SECOND, 3
    )
    try:
        return [
            {**one, "ts": one["ts"] + begin} if "ts" in one else one for one in _read_gzip_json(path)["traceEvents"]
        ]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ConfigError(f"{path}: no trace of fsdpx can be read there: {error!r}") from error


def _convert_to_rank0_clock(one: RankTrace, zero: float) -> Iterator[JSON]:
    def move_time(ts: float) -> float:
        return (one.to_rank0_clock(ts / MICROSECONDS_PER_SECOND) - zero) * MICROSECONDS_PER_SECOND

    for event in one.events:
        if "ts" not in event:
            yield event
            continue
        begin = round(move_time(event["ts"]), 3)
        dur = {"dur": round(move_time(event["ts"] + event["dur"]) - begin, 3)} if "dur" in event else {}
        yield {**event, "ts": begin, **dur}


def _write_gzip_json(path: Path, content: JSON) -> None:
    text = json.dumps(content, separators=(",", ":")).encode()
    safe_files.write_file(
        path, gzip.compress(text, compresslevel=5) if path.suffix == ".gz" else text, safe_files.READABLE
    )
