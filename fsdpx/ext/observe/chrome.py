"""Traces as files: events as JSON that Perfetto and chrome://tracing open, one gzip file per rank, and all in one.

Times are microseconds. The format is Google's "Trace Event Format"; the part of a file that is not events ("fsdpx") is
skipped by those viewers."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fsdpx.core.base import safe_files
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.mesh import AXES, Axes
from fsdpx.core.program import VERBS, Action, Event
from fsdpx.errors import ConfigError
from fsdpx.ext.observe.measure import Reading, offset_at
from fsdpx.ext.observe.recording import Acted, Outside, TransferSpan, Turn

__all__ = [
    "LAYER", "MERGED", "SIMULATED", "RankTrace", "TraceHeader", "TracePlace", "events_of", "merge", "name_of", "read",
    "traced", "waits_of", "write", "write_simulated",
]  # fmt: skip

LEAST = 1e-6
"""Seconds: what is shorter is no wait but Python."""


@dataclass(frozen=True)
class TracePlace:
    """Where a rank stands. lines: lane of a verb -> a name for the ranks it communicates with there, the same on all of
    them."""

    rank: int
    lines: dict[str, str]

    @classmethod
    def of(cls, axes: Axes) -> TracePlace:
        here = axes.coordinates._asdict()
        lines = {axis: ".".join(f"{name}{at}" for name, at in here.items() if name != axis) for axis in AXES}
        together = "" if axes.group is axes.world else f"replica{axes.coordinates.replica}"
        return cls(axes.world.rank, {**lines, "world": together})

    def key(self, turn: Turn, action: Action, time: int) -> Hashable:
        """The common name of a transfer on all ranks that take part; None if no other rank does. time: the action is
        there for the nth time."""
        verb = VERBS[action.op]
        if verb.lane not in self.lines:
            return None
        kind = "message" if verb.sends or verb.receives else action.op
        return (verb.lane, self.lines[verb.lane], turn.number, kind, action.unit, action.mb, time)


def events_of(turn: Turn, place: TracePlace) -> list[Event]:
    """One event for each action, in the order of the program. An action that computes lasts from when it had all it
    needed to its end; one that moves data beside the computing from the same moment to when this rank saw that it was
    complete."""
    flights: dict[Action, list[TransferSpan]] = defaultdict(list)
    for flight in turn.flights:
        flights[flight.action].append(flight)
    times: Counter[Action] = Counter()
    found = []
    for one in turn.acted:
        times[one.action] += 1
        start, end = _span(one, flights[one.action])
        found.append(
            Event(place.rank, one.action, start, end, one.nbytes, place.key(turn, one.action, times[one.action]))
        )
    return found


def _span(one: Acted, flights: Sequence[TransferSpan]) -> tuple[float, float]:
    """From when the action had all it needed to the end of the last transfer that it began, if it began any. A message
    may arrive before the call that sends it has returned, on a machine that then does something else."""
    landed = [flight.landed for flight in flights if one.ready <= flight.issued <= one.end]
    return one.ready, max(landed, default=one.end)


def waits_of(turn: Turn, events: Sequence[Event]) -> list[Event]:
    """Where the rank stood still before an action, until transfers were complete that it was the first to need. action
    and key are those of the last of these; of the action itself where none is known. events: of the turn."""
    moving = [event for event in events if VERBS[event.action.op].moves]
    found = []
    for one, event in zip(turn.acted, events, strict=True):
        if one.ready - one.begin > LEAST:
            late = max((e for e in moving if one.begin < e.end <= one.ready), key=lambda e: e.end, default=None)
            action, key = (one.action, None) if late is None else (late.action, late.key)
            found.append(Event(event.rank, action, one.begin, one.ready, 0, key))
    return found


MERGED = "trace.json.gz"
SIMULATED, APART = "simulated.json.gz", 1_000_000
"""A file that `merge` puts beside the measured ranks, and how far its numbers of processes are from theirs."""
LARGEST = 1 << 30
"""Bytes that a file may unpack to."""
MOST_NAMED = 10
"""Files that are missing and are named."""
MICRO = 1e6
COMPUTE, FIRST = 0, 2
"""Threads: of what occupies the rank, and of what moves beside it."""
STEPS = 1
LAYER = "layer"
"""The category of slices of layers, which lie inside slices of actions."""
JSON = dict[str, Any]


@dataclass
class TraceHeader:
    """The content of a file beside its events. origin: zero of its times, in seconds of the rank's clock. clock:
    readings of that clock beside rank 0's. place: on the mesh, by axis. simulated: (action, start, end) of this rank in
    the step `shown`, if messages took no time. alive: (seconds, bytes of activations) in that step. memory: what is
    held besides, by kind."""

    rank: int
    ranks: int
    mesh: str
    place: dict[str, int]
    host: str
    origin: float
    clock: list[Reading]
    shown: int | None = None
    simulated: list[tuple[str, float, float]] = field(default_factory=list)
    alive: list[tuple[float, int]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    version: str = __version__


@dataclass(frozen=True)
class RankTrace:
    """One file, read again. events: as in the file."""

    header: TraceHeader
    events: list[JSON]

    def aligned(self, seconds: float) -> float:
        """A time of this rank, in seconds of rank 0's clock. seconds: since the file's origin."""
        at = self.header.origin + seconds
        return at - offset_at(self.header.clock, at)

    @property
    def error(self) -> float:
        """Seconds by which its times may be off beside rank 0's."""
        return max(reading.error for reading in self.header.clock)


def name_of(rank: int) -> str:
    return f"rank-{rank:05}.json.gz"


def write(
    folder: Path, header: TraceHeader, turns: Sequence[Turn], place: TracePlace, after: Iterable[Outside] = ()
) -> Path:
    """Write one rank's file; returns its path. after: what was done since the last turn."""
    path = folder / name_of(header.rank)
    _save(path, {"traceEvents": traced(header, turns, place, after), "displayTimeUnit": "ms", "fsdpx": asdict(header)})
    return path


def write_simulated(path: Path, ranks: Sequence[tuple[TraceHeader, Turn, TracePlace]]) -> None:
    """Write one simulated step of some ranks into one file, in the same format."""
    events = [{**event, "pid": event["pid"] + APART} for one in ranks for event in traced(one[0], [one[1]], one[2])]
    _save(path, {"traceEvents": events, "displayTimeUnit": "ms"})


def traced(header: TraceHeader, turns: Sequence[Turn], place: TracePlace, after: Iterable[Outside] = ()) -> list[JSON]:
    """The events of one rank: steps, actions, layers, waits and transfers as slices, messages as arrows, activations
    as a curve."""
    lanes = _Lanes(header)
    for turn in turns:
        if not turn.acted:
            continue
        lanes.outside(turn.before, turn.number)
        events = events_of(turn, place)
        lanes.step(turn, max(event.end for event in events))
        for wait in waits_of(turn, events):
            lanes.wait(wait)
        for one, event in zip(turn.acted, events, strict=True):
            lanes.event(event, stops=(event.start, event.end) == (one.ready, one.end))
            lanes.alive(one.end, one.alive)
        for path, what, begin, end in turn.layers:
            lanes.slice(COMPUTE, f"{path} {what}", LAYER, begin, end)
    lanes.outside(after, len(turns))
    return [*lanes.names(), *lanes.found]


class _Lanes:
    """Events of one rank as they are added. Slices of a thread lie beside or inside each other: what moves at the same
    time as another transfer of its axis gets one more thread."""

    def __init__(self, header: TraceHeader) -> None:
        self.header = header
        self.found: list[JSON] = []
        self._free: dict[str, list[float]] = {}  # lane -> when each of its threads is free
        self._threads: dict[tuple[str, int], int] = {}

    def names(self) -> Iterator[JSON]:
        where = " ".join(f"{axis} {at}" for axis, at in self.header.place.items())
        yield self._meta("process_name", 0, name=f"rank {self.header.rank} ({where}) on {self.header.host}")
        yield self._meta("process_sort_index", 0, sort_index=self.header.rank)
        named = {COMPUTE: "compute", STEPS: "steps"}
        named |= {tid: lane + (f" ({n + 1})" if n else "") for (lane, n), tid in self._threads.items()}
        for tid, name in named.items():
            yield self._meta("thread_name", tid, name=name)
            yield self._meta("thread_sort_index", tid, sort_index=tid)

    def _meta(self, what: str, tid: int, **args: Any) -> JSON:
        return {"ph": "M", "name": what, "pid": self.header.rank, "tid": tid, "args": args}

    def slice(self, tid: int, name: str, kind: str, start: float, end: float, **args: Any) -> None:
        common = {"ph": "X", "name": name, "cat": kind, "pid": self.header.rank, "tid": tid}
        begin = self._micro(start)
        self.found.append({**common, "ts": begin, "dur": round(self._micro(end) - begin, 3), "args": args})

    def outside(self, some: Iterable[Outside], turn: int) -> None:
        """What was done before a turn."""
        for what, begin, end, nbytes in some:
            args: JSON = {"bytes": nbytes} if nbytes else {}
            self.slice(COMPUTE, what, "outside", begin, end, key=f"{turn}", stops=True, **args)

    def step(self, turn: Turn, end: float) -> None:
        words = f"{turn.program.kind} {turn.steps + 1}"
        self.slice(STEPS, words, "step", turn.acted[0].begin, end, turn=turn.number, steps=turn.steps)

    def wait(self, event: Event) -> None:
        self.slice(COMPUTE, f"wait for {event.action}", "wait", event.start, event.end, key=_words(event))

    def event(self, event: Event, stops: bool) -> None:
        """stops: the rank did nothing else."""
        verb = VERBS[event.action.op]
        occupies = verb.lane in ("compute", "host")
        tid = COMPUTE if occupies else self._thread(verb.lane, event)
        args: JSON = {"bytes": event.nbytes} if event.nbytes else {}
        if event.key is not None:
            args |= {"key": _words(event), "stops": stops}
        self.slice(tid, str(event.action), verb.lane, event.start, event.end, **args)
        if event.nbytes and (verb.sends or verb.receives):
            self._arrow(tid, event, verb.sends)

    def alive(self, at: float, nbytes: int) -> None:
        common = {"ph": "C", "name": "activations", "pid": self.header.rank, "ts": self._micro(at)}
        self.found.append({**common, "args": {"bytes": nbytes}})

    def _thread(self, lane: str, event: Event) -> int:
        free = self._free.setdefault(lane, [])
        n = next((n for n, until in enumerate(free) if until <= event.start), len(free))
        free[n:] = [event.end, *free[n + 1 :]]
        return self._threads.setdefault((lane, n), FIRST + len(self._threads))

    def _arrow(self, tid: int, event: Event, sends: bool) -> None:
        """From the beginning of a send to the end of its receive."""
        number = int.from_bytes(blake2b(repr(event.key).encode(), digest_size=6).digest(), "big")
        common = {"name": "message", "cat": "message", "id": number, "pid": self.header.rank, "tid": tid}
        if sends:
            self.found.append({**common, "ph": "s", "ts": self._micro(event.start)})
        else:
            start, end = self._micro(event.start), self._micro(event.end)
            inside = max(end - 0.01, (start + end) / 2)  # an arrow belongs to the slice around its end
            self.found.append({**common, "ph": "f", "bp": "e", "ts": round(inside, 3)})

    def _micro(self, at: float) -> float:
        return round((at - self.header.origin) * MICRO, 3)


def _words(event: Event) -> str:
    """A key as text: equal on all ranks that take part."""
    return "" if event.key is None else repr(event.key)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> list[RankTrace]:
    """The files of all ranks, by rank; ConfigError if there are none, or some are missing or damaged."""
    paths = sorted(folder.glob("rank-*.json.gz"))
    if not paths:
        raise ConfigError(
            f"{folder}: there is no rank-*.json.gz; run with --trace, FSDPX_TRACE or distribute(trace=...)"
        )
    found = [_read(path) for path in paths]
    there, ranks = {one.header.rank for one in found}, found[0].header.ranks
    if len(there) != ranks or max(there) >= ranks:
        numbers = ", ".join(str(n) for n in range(min(ranks, len(there) + MOST_NAMED)) if n not in there)
        raise ConfigError(f"{folder}: of {found[0].header.ranks} ranks the files of {numbers} are missing")
    return found


def _unpacked(path: Path) -> Any:
    with safe_files.open_file(path, ours=False) as raw, gzip.open(raw) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"more than {LARGEST:,} bytes are packed in it")
    return safe_files.parse_json(text)


def _read(path: Path) -> RankTrace:
    try:
        found = _unpacked(path)
        header = TraceHeader(**found["fsdpx"])
        header.clock = [Reading(*map(float, reading)) for reading in header.clock]
        if not (header.clock and type(header.rank) is type(header.ranks) is int and 0 <= header.rank < header.ranks):
            raise ValueError("it does not say of which rank it is, or what its clock was")
        return RankTrace(header, found["traceEvents"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ConfigError(f"{path}: no trace of fsdpx can be read there: {error!r}") from error


def merge(folder: Path) -> tuple[Path, float, int]:
    """All ranks of a folder in one file, on the clock of rank 0: its path, the error bound in seconds between any two
    ranks, and the number of messages of which both ends are there. A simulated step, if there is one, begins with the
    measured step of the median time."""
    ranks = read(folder)
    zero = min(one.aligned(0.0) for one in ranks)
    events = [dict(event) for one in ranks for event in _on_one_clock(one, zero)]
    errors = sorted((one.error for one in ranks), reverse=True)
    bound = sum(errors[:2])
    path = folder / MERGED
    header = {"ranks": len(ranks), "clock_error_us": [round(one.error * MICRO, 3) for one in ranks]}
    header["clock_error_between_ranks_us"] = round(bound * MICRO, 3)
    _save(path, {"traceEvents": [*events, *_beside(ranks[0], folder, zero)], "displayTimeUnit": "ms", "fsdpx": header})
    ends = [{event["id"] for event in events if event["ph"] == kind} for kind in "sf"]
    return path, bound, len(ends[0] & ends[1])


def _beside(first: RankTrace, folder: Path, zero: float) -> list[JSON]:
    """The events of a simulated step in the folder, moved to where rank 0 begins the step that is shown."""
    path = folder / SIMULATED
    if not path.exists():
        return []
    steps = (e["ts"] for e in first.events if e.get("cat") == "step" and e["args"]["turn"] == first.header.shown)
    begin = round((first.aligned(next(steps, 0.0) / MICRO) - zero) * MICRO, 3)
    try:
        return [{**one, "ts": one["ts"] + begin} if "ts" in one else one for one in _unpacked(path)["traceEvents"]]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ConfigError(f"{path}: no trace of fsdpx can be read there: {error!r}") from error


def _on_one_clock(one: RankTrace, zero: float) -> Iterator[JSON]:
    def moved(ts: float) -> float:
        return (one.aligned(ts / MICRO) - zero) * MICRO

    for event in one.events:
        if "ts" not in event:
            yield event
            continue
        begin = round(moved(event["ts"]), 3)
        dur = {"dur": round(moved(event["ts"] + event["dur"]) - begin, 3)} if "dur" in event else {}
        yield {**event, "ts": begin, **dur}


def _save(path: Path, content: JSON) -> None:
    text = json.dumps(content, separators=(",", ":")).encode()
    safe_files.write(path, gzip.compress(text, compresslevel=5) if path.suffix == ".gz" else text, safe_files.READABLE)
